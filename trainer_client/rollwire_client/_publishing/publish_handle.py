"""What a trainer holds of a publish under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_client._concurrency.affinity import LoopAffinity

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from rollwire_client._publishing.publish import Publish
    from rollwire_client._publishing.report import PublishReport


class PublishHandle:
    """A publish under way."""

    def __init__(self, publish: Publish, task: asyncio.Task[PublishReport]) -> None:
        self._publish = publish
        self._task = task
        self._affinity = LoopAffinity("publish")

    @property
    def version(self) -> int | None:
        """As given to ``Publisher.publish``."""
        return self._publish.version

    @property
    def update_id(self) -> str:
        """Names it on the servers."""
        return self._publish.update_id

    @property
    def total_bytes(self) -> int:
        """What each server gets."""
        return self._publish.total_bytes

    @property
    def sent_bytes(self) -> int:
        """What all of them have."""
        return self._publish.sent_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self._task.done()

    @property
    def announced(self) -> Awaitable[None]:
        """Done when every server that can has checked the update and reserved memory for it.

        Raises what ``committed`` raises.
        """
        return self._reached(self._publish.announced)

    @property
    def released(self) -> Awaitable[None]:
        """Done when every server has everything, verified: the tensors may change again.

        Raises what ``committed`` raises.
        """
        return self._reached(self._publish.released)

    @property
    def committed(self) -> Awaitable[PublishReport]:
        """Done when every server that could has committed.

        Raises:
            PublishFailedError: None did.
            SourceError: The trainer did not give its tensors; no server has committed.
            TensorsChangedError: They changed before ``released``; no server has committed.
            PublishError: The publish could not go on; no server has committed.
            asyncio.CancelledError: It was cancelled.
        """
        self._affinity.check()
        return asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Ends the publish; servers that have not committed yet discard the update.

        Returns when the tensors may change again. A source that gives nothing is waited for no
        longer than ``PublishTimeouts.source``; see ``Publisher.publish``.
        """
        if self._affinity.forked:
            return
        self._affinity.check()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _reached(self, milestone: asyncio.Event) -> None:
        """Returns when the publish has come to a milestone; raises why if it never will."""
        self._affinity.check()
        waiting = asyncio.create_task(milestone.wait())
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not milestone.is_set():
            self._task.result()

"""What a trainer holds of a publish that is under way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_client._concurrency import LoopAffinity

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from rollwire_client._data import PublishReport
    from rollwire_client._publishing.publish import PublishProgress


class PublishHandle:
    """A publish under way.

    Attributes:
        version: The version given to ``Publisher.publish``.
        update_id: Id of the update on the servers.
    """

    def __init__(
        self, version: int | None, progress: PublishProgress, task: asyncio.Task[PublishReport]
    ) -> None:
        self.version = version
        self.update_id = progress.update_id
        self._progress = progress
        self._task = task
        self._affinity = LoopAffinity("publish")

    @property
    def total_bytes(self) -> int:
        """Bytes that are sent, as in ``PublishReport.bytes``; known once it is ``announced``."""
        return self._progress.total_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes of these that have been received."""
        return self._progress.sent_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended, with or without success."""
        return self._task.done()

    @property
    def announced(self) -> Awaitable[None]:
        """Done when every server that can take the update has checked it and reserved memory.

        Raises what ``committed`` raises.
        """
        return self._reach(self._progress.announced)

    @property
    def released(self) -> Awaitable[None]:
        """Done when the tensors may change: with deltas, once they are copied and the update is
        announced; else when every server has received and verified everything.

        Raises what ``committed`` raises.
        """
        return self._reach(self._progress.released)

    @property
    def committed(self) -> Awaitable[PublishReport]:
        """Done when every server that could has committed.

        Raises:
            PublishFailedError: No server committed.
            SourceError: The trainer did not provide its tensors; no server has committed.
            TensorsChangedError: They changed before ``released``; no server has committed.
            PublishError: The publish could not continue; no server has committed.
            asyncio.CancelledError: The publish was cancelled.
        """
        self._affinity.check()
        return asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Ends the publish; servers that have not committed yet discard the update.

        Returns when the tensors may change. It waits for a source that hangs no longer than
        ``PublishTimeouts.source``; see ``Publisher.publish``.
        """
        if self._affinity.forked:
            return
        self._affinity.check()
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _reach(self, milestone: asyncio.Event) -> None:
        self._affinity.check()
        waiting = asyncio.create_task(milestone.wait())
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not milestone.is_set():
            self._task.result()

"""What a trainer sees of a publish: the handle while it is under way, and the report."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollwire_client._affinity import LoopAffinity

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from rollwire.types import WeightTag

    from rollwire_client._errors import RollwireError


@dataclass(frozen=True, slots=True)
class ServerReport:
    """The result of a publish on one server.

    Attributes:
        address: Address of the server.
        weights: The weights that it serves now; None if it did not commit.
        error: Why it did not commit.
        received_bytes: Bytes of the update that it received.
        staging_seconds: Time from the announcement until the update was received and verified.
        apply_seconds: Time spent on putting the weights in place.
        paused_seconds: Time without any sampling.
        held_sequences: Number of sequences that waited meanwhile.
        kv_tokens_to_recompute: KV-cache entries, in tokens, that the new policy computes again.
        already_current: Whether it held these weights before.
    """

    address: str
    weights: WeightTag | None
    error: RollwireError | None
    received_bytes: int
    staging_seconds: float
    apply_seconds: float = 0.0
    paused_seconds: float = 0.0
    held_sequences: int = 0
    kv_tokens_to_recompute: int = 0
    already_current: bool = False


@dataclass(frozen=True, slots=True)
class PublishReport:
    """The result of a publish.

    Attributes:
        version: The version given to ``publish``.
        update_id: Id of the update on the servers.
        digest: Digest of the content that was sent.
        bytes: Bytes sent to each server.
        seconds: Time from ``publish`` to the last commit.
        servers: One entry per server, in the fleet's order; after ``catch_up``, of the servers that
            were behind.
    """

    version: int | None
    update_id: str
    digest: int
    bytes: int
    seconds: float
    servers: tuple[ServerReport, ...]

    @property
    def failed(self) -> tuple[ServerReport, ...]:
        """Servers that did not commit; they get no sequences until the next publish or ``catch_up``
        updates them.
        """
        return tuple(server for server in self.servers if server.weights is None)


@dataclass(slots=True)
class PublishProgress:
    """How far a publish is; written by the publish, read by its handle."""

    version: int | None
    update_id: str
    total_bytes: int
    sent_bytes: int = 0
    announced: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)


class PublishHandle:
    """A publish under way.

    Attributes:
        version: The version given to ``Publisher.publish``.
        update_id: Id of the update on the servers.
        total_bytes: Bytes that each server gets.
    """

    def __init__(self, progress: PublishProgress, task: asyncio.Task[PublishReport]) -> None:
        self.version = progress.version
        self.update_id = progress.update_id
        self.total_bytes = progress.total_bytes
        self._progress = progress
        self._task = task
        self._affinity = LoopAffinity("publish")

    @property
    def sent_bytes(self) -> int:
        """Bytes that every server has received."""
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
        """Done when every server has received and verified everything: the tensors may change.

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

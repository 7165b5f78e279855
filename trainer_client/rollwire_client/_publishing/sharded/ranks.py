"""The processes of a sharded trainer, which publish together: all gather, rank 0 sends."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from rollwire_client._arguments import seconds
from rollwire_client._concurrency.affinity import LoopAffinity
from rollwire_client._errors import PublishInProgressError
from rollwire_client._publishing.sharded.coordinator import Lead
from rollwire_client._publishing.sharded.participant import Follower
from rollwire_client._publishing.sharded.rendezvous import meet
from rollwire_client._wording import update_text

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rollwire.types import KvPolicy
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rollwire_client._publishing.publish_handle import PublishHandle
    from rollwire_client._publishing.publisher import Publisher
    from rollwire_client._publishing.report import PublishReport
    from rollwire_client._publishing.schema import Source

CATCHES_UP = "catches up"


class Ranks:
    """The processes of a sharded trainer; a context manager.

        with Ranks(torch.distributed.group.WORLD) as ranks:                   # in every process
            publisher = Publisher(fleet) if ranks.rank == 0 else None
            handle = await ranks.publish(publisher, version, model.state_dict())
            # the tensors may change again, in every process
            if handle is not None:
                report = await handle.committed

    Sharded tensors are gathered one at a time while they are sent, so that no process holds more of
    another's than one tensor. Until ``publish`` returns no process may use the groups of its
    tensors for anything else; others it may, also on the same GPU: gathers have a stream of their
    own there.

    The processes keep TCP connections with rank 0, over which they say only who does what next.
    One that dies or fails ends the publish on all of them: servers keep what they serve. A gather
    that waits for a dead process hangs for as long as its group lets it; it is left behind in a
    thread of its own (see ``PublishTimeouts.source`` and ``timeout``).

    Args:
        group: Of the processes; used once, here, to tell where they meet. Blocks until all come.
        host: Under which the others reach rank 0. Default: MASTER_ADDR as torch has it, else this
            machine's name.
        timeout: Seconds that processes wait for each other: to meet, to make the same call, for a
            sign of life (rank 0 gives one every second), and for a gather to end.

    Attributes:
        rank: Of this process in the group.

    Raises:
        PublishError: The processes cannot meet.
    """

    def __init__(
        self, group: ProcessGroup, *, host: str | None = None, timeout: float = 60.0
    ) -> None:
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise TypeError("name the process group: torch.distributed.group.WORLD for all ranks")
        self.rank = dist.get_rank(group)
        self._timeout = seconds("timeout", timeout)
        self._following = False
        self._lead: Lead | None = None
        self._lines = meet(group, host, timeout)
        self._affinity = LoopAffinity("Ranks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hangs up; a publish under way ends on all ranks. Idempotent."""
        if self._affinity.forked:  # to hang up here would end the parent's connections
            return
        for line in self._lines.values():
            line.close()

    async def publish(
        self,
        publisher: Publisher | None,
        version: int | None,
        tensors: Mapping[str, Tensor] | Source,
        *,
        kv_policy: KvPolicy | None = None,
        partial: bool = False,
        allow_version_rollback: bool = False,
    ) -> PublishHandle | None:
        """Publishes; every rank calls it with the same arguments.

        Returns when the tensors may change again, on every rank.

        Args:
            publisher: At rank 0; the others' is not looked at.
            version: As for ``Publisher.publish``.
            tensors: This rank's tensors by name, in the same order on all ranks: a DTensor is
                gathered. Or a callable that gives an iterator of (name, tensor), as for
                ``Publisher.publish``; the ranks iterate in step, each in a worker thread, so that
                it may gather from all of them, over stages of a pipeline too. What it gives where
                the rank is not 0 is dropped, but the names must be the same. DTensors and functions
                in place of tensors are gathered or called on all ranks, if they are needed.
            kv_policy: As for ``Publisher.publish``.
            partial: As for ``Publisher.publish``.
            allow_version_rollback: As for ``Publisher.publish``.

        Returns:
            The handle, whose ``committed`` is to come, at rank 0; None elsewhere.

        Raises:
            SourceError: A rank failed, is gone, or did not make the same call in time.
            PublishError: See ``Publisher.publish``; on other ranks, with what rank 0 says of it.
        """
        self._affinity.check_process()
        if self.rank != 0:
            await self._follow(publishes(version, partial=partial), tensors)
            return None
        handle = await _required(publisher).publish(
            version,
            tensors,
            kv_policy=kv_policy,
            partial=partial,
            allow_version_rollback=allow_version_rollback,
            ranks=self,
        )
        try:
            await handle.released
        except asyncio.CancelledError:
            await handle.cancel()
            raise
        return handle

    async def catch_up(
        self, publisher: Publisher | None, tensors: Mapping[str, Tensor] | Source
    ) -> PublishReport | None:
        """As ``Publisher.catch_up``; every rank calls it with the same arguments, as ``publish``.

        Returns:
            The report, at rank 0; None elsewhere.
        """
        self._affinity.check_process()
        if self.rank != 0:
            await self._follow(CATCHES_UP, tensors)
            return None
        return await _required(publisher).catch_up(tensors, ranks=self)

    @contextlib.asynccontextmanager
    async def lead(self, call: str) -> AsyncIterator[Lead]:
        """Leads the other ranks through a call, once all have made it; for ``Publisher``, which
        lets go of them.
        """
        if self._lead is not None and not self._lead.over:
            raise _in_progress()
        lead = self._lead = Lead(self._lines, self._timeout)
        try:
            await lead.assemble(call)
            yield lead
        except BaseException as error:
            lead.fail(error)
            raise

    async def _follow(self, call: str, tensors: Mapping[str, Tensor] | Source) -> None:
        if self._following:
            raise _in_progress()
        self._following = True
        try:
            await Follower(self._lines[0], tensors, self._timeout).follow(call)
        finally:
            self._following = False


def _in_progress() -> PublishInProgressError:
    return PublishInProgressError("these ranks are publishing: await that first")


def publishes(version: int | None, *, partial: bool) -> str:
    """The call of a publish, in words: the same on all ranks."""
    return f"publishes {'a part of ' if partial else ''}{update_text(version)}"


def _required(publisher: Publisher | None) -> Publisher:
    if publisher is None:
        raise TypeError("rank 0 publishes: it needs the publisher")
    return publisher

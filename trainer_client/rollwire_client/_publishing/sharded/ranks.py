"""``Ranks``: the processes of a sharded trainer, which publish together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Self

from rollwire_client._arguments import seconds, update_text
from rollwire_client._concurrency import LoopAffinity
from rollwire_client._errors import PublishInProgressError
from rollwire_client._publishing.sharded.coordination import Coordinator, Participant
from rollwire_client._publishing.sharded.rendezvous import connect_ranks

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rollwire.types import KvPolicy
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from rollwire_client._data import PublishReport
    from rollwire_client._publishing.publish_handle import PublishHandle
    from rollwire_client._publishing.publisher import Publisher
    from rollwire_client._publishing.tensors import TensorSource

_CATCHES_UP = "catches up"


class Ranks:
    """The processes of a sharded trainer; a context manager.

        with Ranks(torch.distributed.group.WORLD) as ranks:                   # in every process
            publisher = Publisher(fleet) if ranks.rank == 0 else None
            handle = await ranks.publish(publisher, version, model.state_dict())
            # the tensors may change from now on, in every process
            if handle is not None:
                report = await handle.committed

    Sharded tensors are gathered one at a time while they are sent, so that no process holds more
    than one whole tensor. Until ``publish`` returns, no process may use the process groups of its
    tensors for anything else. It may use other groups, also on the same GPU, since gathers run on a
    stream of their own.

    The processes coordinate over TCP connections with rank 0; tensors do not travel over these. If
    a process dies or fails, the publish ends on all of them, and servers keep the weights that they
    serve. A gather that waits for a dead process hangs until its group times out; its thread is
    left behind (see ``PublishTimeouts.source`` and ``timeout``).

    Args:
        group: Process group of the trainer; used once, here, to connect the processes. Blocks until
            all of them have called.
        host: Address at which the others reach rank 0. Default: torch's MASTER_ADDR, else this
            machine's name.
        timeout: Seconds that processes wait for each other: to connect, to make the same call, for
            a heartbeat (rank 0 sends one every second), and for a gather to end.

    Attributes:
        rank: Rank of this process in the group.

    Raises:
        PublishError: The processes cannot connect.
    """

    def __init__(
        self, group: ProcessGroup, *, host: str | None = None, timeout: float = 60.0
    ) -> None:
        import torch.distributed as dist

        if not isinstance(group, dist.ProcessGroup):
            raise TypeError("name the process group: torch.distributed.group.WORLD for all ranks")
        self.rank = dist.get_rank(group)
        self._timeout = seconds("timeout", timeout)
        self._participating = False
        self._coordinator: Coordinator | None = None
        self._connections = connect_ranks(group, host, timeout)
        self._affinity = LoopAffinity("Ranks")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; a publish under way ends on all ranks. Idempotent."""
        if self._affinity.forked:  # that would close the parent's connections
            return
        for connection in self._connections.values():
            connection.close()

    async def publish(
        self,
        publisher: Publisher | None,
        version: int | None,
        tensors: Mapping[str, Tensor] | TensorSource,
        *,
        kv_policy: KvPolicy | None = None,
        max_kv_lag: int | None = None,
        partial: bool = False,
        allow_version_rollback: bool = False,
    ) -> PublishHandle | None:
        """Publishes a new policy; every rank calls it with the same arguments.

        Returns when the tensors may change, on every rank.

        Args:
            publisher: The publisher, on rank 0; ignored on other ranks.
            version: As for ``Publisher.publish``.
            tensors: This rank's tensors by name, in the same order on all ranks; DTensors are
                gathered. Or a callable that returns an iterator of (name, tensor), as for
                ``Publisher.publish``. The ranks iterate in step, each in a worker thread, so that
                the iterator may gather from all of them, also across pipeline stages. The tensors
                of ranks other than 0 are dropped, but their names must be the same. DTensors, and
                functions instead of tensors, are gathered or called on all ranks, if they are
                needed.
            kv_policy, max_kv_lag: As for ``Publisher.publish``.
            partial: As for ``Publisher.publish``.
            allow_version_rollback: As for ``Publisher.publish``.

        Returns:
            On rank 0 the handle, whose ``committed`` is still to be awaited; None on other ranks.

        Raises:
            SourceError: A rank failed, is gone, or did not make the same call in time.
            PublishError: See ``Publisher.publish``; other ranks raise rank 0's message.
        """
        self._affinity.check_process()
        call = f"publishes {'a part of ' if partial else ''}{update_text(version)}"
        if self.rank != 0:
            await self._participate(call, tensors)
            return None
        async with self._coordinate(call) as coordinator:
            handle = await _require_publisher(publisher).publish(
                version,
                tensors,
                kv_policy=kv_policy,
                max_kv_lag=max_kv_lag,
                partial=partial,
                allow_version_rollback=allow_version_rollback,
                coordinator=coordinator,
            )
            try:
                await handle.released
            except asyncio.CancelledError:
                await handle.cancel()
                raise
        return handle

    async def catch_up(
        self, publisher: Publisher | None, tensors: Mapping[str, Tensor] | TensorSource
    ) -> PublishReport | None:
        """Like ``Publisher.catch_up``; every rank calls it with the same arguments.

        Returns:
            The report on rank 0; None on other ranks.
        """
        self._affinity.check_process()
        if self.rank != 0:
            await self._participate(_CATCHES_UP, tensors)
            return None
        async with self._coordinate(_CATCHES_UP) as coordinator:
            return await _require_publisher(publisher).catch_up(tensors, coordinator=coordinator)

    @contextlib.asynccontextmanager
    async def _coordinate(self, call: str) -> AsyncIterator[Coordinator]:
        """Yields once all ranks have made the same call; an error ends it on all of them."""
        if self._coordinator is not None and not self._coordinator.ended:
            raise _in_progress()
        coordinator = self._coordinator = Coordinator(self._connections, self._timeout)
        try:
            await coordinator.wait_for_ranks(call)
            yield coordinator
        except BaseException as error:
            coordinator.abort(error)
            raise

    async def _participate(self, call: str, tensors: Mapping[str, Tensor] | TensorSource) -> None:
        if self._participating:
            raise _in_progress()
        self._participating = True
        try:
            await Participant(self._connections[0], tensors, self._timeout).run(call)
        finally:
            self._participating = False


def _in_progress() -> PublishInProgressError:
    return PublishInProgressError("these ranks are publishing: await that first")


def _require_publisher(publisher: Publisher | None) -> Publisher:
    if publisher is None:
        raise TypeError("rank 0 publishes: it needs the publisher")
    return publisher

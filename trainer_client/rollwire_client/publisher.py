"""Publishing: a new policy goes to every server of a fleet, in one transaction each.

    publish()            the tensors are checked, every server is told and reserves memory
    handle.released      every server has everything, verified: the tensors may change again
    handle.committed     every server serves it: the report

A server that fails or falls silent is cut out after a bounded time; the others go on and commit.
Nothing that serves is touched before the commit, so a publish that fails leaves the servers as they
were.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING

from rollwire.v1 import weights_pb2, weights_pb2_grpc

from rollwire_client import wire
from rollwire_client.calls import unary
from rollwire_client.data import KvPolicy
from rollwire_client.errors import (
    MissingDependencyError,
    PublishError,
    PublishInProgressError,
    RollwireError,
)
from rollwire_client.recipient import PublishTimeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Mapping

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_client.fleet import Fleet
    from rollwire_client.publish import Publish
    from rollwire_client.reports import PublishReport
    from rollwire_client.schema import Source


class PublishHandle:
    """A publish under way."""

    def __init__(self, publish: Publish, task: asyncio.Task[PublishReport]) -> None:
        self._publish = publish
        self._task = task

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
    def released(self) -> Awaitable[None]:
        """Done when every server has everything, verified: the tensors may change again.

        Raises what ``committed`` raises.
        """
        return self.reached(self._publish.released)

    @property
    def committed(self) -> Awaitable[PublishReport]:
        """Done when every server that could has committed.

        Raises:
            PublishFailedError: None did.
            SourceError: The trainer did not give its tensors; no server has committed.
            PublishError: The publish could not go on; no server has committed.
            asyncio.CancelledError: It was cancelled.
        """
        return asyncio.shield(self._task)

    async def cancel(self) -> None:
        """Ends the publish; servers that have not committed yet discard the update.

        Returns when the tensors may change again. A source that gives nothing is waited for no
        longer than ``PublishTimeouts.source``; see ``Publisher.publish``.
        """
        self._task.cancel()
        await asyncio.wait([self._task])

    async def reached(self, milestone: asyncio.Event) -> None:
        """Returns when the publish has come to a milestone; raises why if it never will."""
        waiting = asyncio.create_task(milestone.wait())
        try:
            await asyncio.wait([waiting, self._task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not milestone.is_set():
            self._task.result()


class Publisher:
    """Publishes one trainer's policies to a fleet, one at a time.

    Args:
        fleet: An open fleet; closing it ends a publish that is under way.
        id: Names the trainer. Default: host name and process id.
        term: Counts the lives of the trainer: a higher one takes over from a lower one, which is
            refused from then on. Default: the time, in milliseconds.
        backend: Of the transport. Default: the first that this machine and all servers can use.
        host: Under which the servers reach this machine. Default: the local address of the route
            to them.
        kv_policy: What a commit does with keys and values of sequences that are under way.
        bucket_bytes: What travels as one message; a multiple of 64. Default: the transport's.
        timeouts: How long to wait.

    Raises:
        MissingDependencyError: torch is not installed.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        id: str | None = None,  # noqa: A002 - the API's word
        term: int | None = None,
        backend: str | None = None,
        host: str | None = None,
        kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
        bucket_bytes: int | None = None,
        timeouts: PublishTimeouts | None = None,
    ) -> None:
        _require_transport()
        self.id = id or f"{socket.gethostname()}-{os.getpid()}"
        self.term = term if term is not None else time.time_ns() // 1_000_000
        self._fleet = fleet
        self._backend = backend
        self._host = host
        self._kv_policy = kv_policy
        self._bucket_bytes = bucket_bytes
        self._timeouts = timeouts or PublishTimeouts()
        self._schema: tuple[TensorSpec, ...] | None = None
        self._busy = False
        self._handle: PublishHandle | None = None

    async def schema(self) -> tuple[TensorSpec, ...]:
        """The tensors that the servers want, in their order; asked once.

        Raises:
            RollwireError: No server tells.
        """
        if self._schema is None:
            self._schema = await self._ask_schema()
        return self._schema

    async def publish(
        self,
        version: int | None,
        tensors: Mapping[str, Tensor] | Source,
        *,
        kv_policy: KvPolicy | None = None,
        partial: bool = False,
        allow_version_rollback: bool = False,
    ) -> PublishHandle:
        """Announces a new policy to the fleet; what follows goes on by itself.

        Args:
            version: The trainer's step; None for an untagged update.
            tensors: The policy by name, as in a checkpoint; or a callable that gives a fresh
                iterator of (name, tensor) in the order of ``schema()``, aliases left out, so that
                a sharded trainer gathers one tensor at a time. It runs in a worker thread, once for
                each transport group that is needed. If it hangs the publish fails, but a thread
                cannot be killed: its thread is left to itself, and ends if the source does.
            kv_policy: Instead of the publisher's.
            partial: Tensors that are not named stay as they are.
            allow_version_rollback: ``version`` may be below what the servers hold.

        Returns:
            A handle, once every server that can has checked the update and reserved memory for it.

        Raises:
            SchemaMismatchError: The tensors are not those that the servers want.
            PublishInProgressError: The publish before has not ended.
            StalePublisherError: A publisher with a higher term took over.
            PublishFailedError: No server takes the update.
        """
        from rollwire_client.publish import Publish
        from rollwire_client.schema import device_of, fit

        if self._busy or (self._handle is not None and not self._handle.done):
            raise PublishInProgressError(
                "the publish before has not ended: await its `committed` first"
            )
        self._busy = True
        try:
            specs, source = fit(tensors, await self.schema(), partial=partial)
            publish = Publish(
                self._fleet,
                weights_pb2.Publisher(id=self.id, term=self.term),
                version,
                specs,
                source,
                device=device_of(tensors),
                partial=partial,
                allow_version_rollback=allow_version_rollback,
                bucket_bytes=self._bucket_bytes,
                backend=self._backend,
                host=self._host,
                kv_policy=kv_policy or self._kv_policy,
                timeouts=self._timeouts,
            )
            handle = PublishHandle(publish, self._fleet.own(publish.run()))
            self._handle = handle
        finally:
            self._busy = False
        try:
            await handle.reached(publish.announced)
        except asyncio.CancelledError:
            await handle.cancel()
            raise
        return handle

    async def _ask_schema(self) -> tuple[TensorSpec, ...]:
        problems: list[RollwireError] = []
        for member in self._fleet.members:
            stub = weights_pb2_grpc.WeightServiceStub(member.client.channel)
            try:
                answer = await unary(
                    stub.GetWeightSchema,
                    weights_pb2.GetWeightSchemaRequest(),
                    server=member.address,
                    timeout=self._timeouts.call,
                )
            except RollwireError as error:
                problems.append(error)
            else:
                return wire.schema(answer)
        raise PublishError(
            f"no server tells which tensors it wants: {'; '.join(map(str, problems))}"
        ) from problems[0]


def _require_transport() -> None:
    try:
        import rollwire_transport  # noqa: F401 - whether it can be imported
    except ImportError as error:
        raise MissingDependencyError(
            f"publishing needs {error.name}: pip install 'rollwire[transport]'"
        ) from error

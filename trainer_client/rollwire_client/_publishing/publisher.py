"""Publishes a policy to every server of a fleet, as one transaction per server."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollwire.types import KvPolicy
from rollwire.v1 import weights_pb2

from rollwire_client._arguments import checked_version, integer
from rollwire_client._data import PublishReport, PublishTimeouts, checked_share
from rollwire_client._errors import (
    MissingDependencyError,
    PublishError,
    PublishInProgressError,
    RollwireError,
    SchemaMismatchError,
)
from rollwire_client._publishing.publish_handle import PublishHandle
from rollwire_client._rpc.channel import unary
from rollwire_client._rpc.conversion import schema_from_proto

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_client._data import Require
    from rollwire_client._fleet.fleet import Fleet
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._publishing.names import ServerNames
    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.source import GivenOrder
    from rollwire_client._publishing.tensors import TensorSource


class Publisher:
    """Publishes one trainer's policies to a fleet, one at a time.

    A server that fails or falls silent is left out after a bounded time; the others
    commit. Serving weights are not touched before the commit, so a publish that fails leaves the
    servers as they were.

    Args:
        fleet: An open fleet; closing it ends a publish that is under way.
        id: Name of the trainer. Default: host name and process id.
        term: Number that rises with each start of the trainer. A publisher with a higher term takes
            over; those with lower terms are refused from then on. Default: the time in
            milliseconds.
        backend: Backend of the transport. Default: the first that this machine and all servers can
            use, of cuda_ipc (if all are on one GPU), ucx, nccl and gloo for tensors on a GPU, else
            of gloo, ucx and nccl.
        host: Address at which the servers reach this machine. Default: the local address of the
            route to them.
        kv_policy: What a commit does with the keys and values of sequences under way.
        max_kv_lag: With KEEP: how many commits older than the weights that sample a token the keys
            and values may be to which it attends. Sequences with older ones are computed again
            beside the decoding of the others. 0 is RECOMPUTE. Default: they may have any age.
        bucket_bytes: Size of one message; a multiple of 64. The trainer holds three buckets. A
            server allocates four if it cannot receive them where the update is staged. Default: a
            64th of the update, between 64 and 256 MiB.
        timeouts: How long to wait.
        cast: Whether floating-point tensors of another dtype than the servers' are cast to it, on
            their device, while they are read. Otherwise they are refused.
        delta: Whether servers that hold the last policy get only what has changed, bit for bit. The
            tensors are first copied, in the servers' dtypes, and everything is sent out of the
            copy. It lies on their device if it takes at most a quarter of the memory that is free
            there, else in pinned host memory if it takes at most half of what is free there, else
            there is none, with a warning. Without deltas, or servers that take them, the tensors
            are sent where they lie.
        full_every: With deltas: every so many publishes all servers get the whole policy. Default:
            only those that need it.

    Raises:
        TypeError, ValueError: An argument is invalid, such as a negative ``term``.
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
        kv_policy: KvPolicy = KvPolicy.KEEP,
        max_kv_lag: int | None = None,
        bucket_bytes: int | None = None,
        timeouts: PublishTimeouts | None = None,
        cast: bool = True,
        delta: bool = True,
        full_every: int | None = None,
    ) -> None:
        _require_transport()
        from rollwire_client._publishing.policy_copy import PolicyCopy

        if full_every is not None:
            full_every = integer("full_every", full_every, minimum=1)
        if not isinstance(timeouts, PublishTimeouts | None):
            raise TypeError(
                f"timeouts is {timeouts!r}: use for example PublishTimeouts(source={timeouts!r})"
            )
        self.id = id or f"{socket.gethostname()}-{os.getpid()}"
        term = term if term is not None else time.time_ns() // 1_000_000
        self.term = integer("term", term, maximum=(1 << 64) - 1)
        self._pool = fleet._pool  # noqa: SLF001 - the library's own
        self._backend = backend
        self._host = host
        self._max_kv_lag = checked_kv_lag(kv_policy, max_kv_lag)
        self._bucket_bytes = None if bucket_bytes is None else _check_bucket_bytes(bucket_bytes)
        self._timeouts = timeouts or PublishTimeouts()
        self._cast = cast
        self._copy = PolicyCopy(full_every, self._timeouts.source) if delta else None
        self._schema: tuple[TensorSpec, ...] | None = None
        self._names: ServerNames | None = None  # of this schema
        self._order: GivenOrder | None = None
        self._starting = False
        self._handle: PublishHandle | None = None

    async def schema(self) -> tuple[TensorSpec, ...]:
        """The tensors that the servers expect, in order. The servers are asked once.

        Raises:
            ClosedError: The fleet is not open.
            RollwireError: No server returned its schema.
        """
        self._pool.check_open()
        if self._schema is not None:
            return self._schema
        problems: list[RollwireError] = []
        for server in self._pool.servers:
            try:
                answer = await unary(
                    server.client.weight_service.GetWeightSchema,
                    weights_pb2.GetWeightSchemaRequest(),
                    server=server.address,
                    timeout=self._timeouts.call,
                )
            except RollwireError as error:
                problems.append(error)
            else:
                self._schema = schema_from_proto(answer)
                return self._schema
        raise PublishError(
            f"no server returned its schema: {'; '.join(map(str, problems))}"
        ) from problems[0]

    async def prepare(self, device: torch.device | str = "cpu") -> None:
        """Does the work ahead of time for which the first publish would wait.

        It reads the schema. On a GPU it also compiles kernels and lets UCX discover its transports.
        This takes about 2 s and delays tokens that this process reads meanwhile.

        Args:
            device: Device of the tensors that will be published.

        Raises:
            ClosedError: The fleet is not open.
            RollwireError: No server returned its schema.
        """
        import rollwire_transport as transport
        import torch

        await self.schema()
        await asyncio.to_thread(transport.warm_up, torch.device(device))

    async def publish(
        self,
        version: int | None,
        tensors: Mapping[str, Tensor] | TensorSource,
        *,
        kv_policy: KvPolicy | None = None,
        max_kv_lag: int | None = None,
        partial: bool = False,
        allow_version_rollback: bool = False,
        coordinator: Coordinator | None = None,
    ) -> PublishHandle:
        """Announces a new policy to the fleet; the rest of the publish runs in the background.

        Args:
            version: The trainer's step; None: the update has no version.
            tensors: The policy by name, as in a checkpoint or in transformers' model of it. The
                tensors must not change until ``handle.released``: an in-place change ends the
                publish, if torch counts it (it does not count writes through ``tensor.data``, by
                CUDA graphs, or to tensors of ``inference_mode``). Or a callable that returns a
                fresh iterator of (name, tensor), so that a sharded trainer can gather one tensor at
                a time. Instead of a tensor the iterator may yield a function, which is called if
                the tensor is needed. It runs in a worker thread, with deltas once, else once for
                each transport group: to its end, or it is closed there. What it does to the tensors
                after the last one is not taken for a change, such as unmerging an adapter. The
                order is free: what comes before its turn is copied to host memory until then. The
                first publish expects the order of ``schema()``, each later one the order of the
                last. If the callable hangs, the publish fails; its thread ends when it returns.
            kv_policy, max_kv_lag: If either is given, both replace the publisher's.
            partial: Whether some tensors are left out; servers keep the old values of these. A
                server that missed a publish gets no partial update, since it would mix two
                policies. A callable is first read to its end into host memory.
            allow_version_rollback: Whether ``version`` may be below the servers' version, or equal
                to it with other content. Servers that miss this update get the policy that was
                published last by the next publish or ``catch_up``, without this argument.
            coordinator: Coordinator of a sharded trainer, from ``Ranks.publish``.

        Returns:
            A handle, once every server that can take the update has checked it and reserved memory;
            with deltas the tensors have been copied before.

        Raises:
            TypeError: ``version`` is not an integer, or ``kv_policy`` is not a ``KvPolicy``.
            ValueError: ``version`` is negative, or needs more than 63 bits; or ``max_kv_lag`` is
                negative, or is given with RECOMPUTE.
            ClosedError: The fleet is not open.
            SchemaMismatchError: The tensors do not match the servers' schema. Without deltas, what
                is noticed only when they are read, such as values that overflow when they are cast,
                is raised by ``handle.released`` and ``committed``.
            SourceError, TensorsChangedError: With deltas: the callable failed, or the tensors
                changed while they were copied.
            PublishInProgressError: The previous publish has not ended.
            StalePublisherError: A publisher with a higher term took over.
            PublishFailedError: No server accepts the update.
        """
        version = checked_version("version", version)
        if kv_policy is None and max_kv_lag is None:
            max_kv_lag = self._max_kv_lag
        else:
            max_kv_lag = checked_kv_lag(kv_policy or KvPolicy.KEEP, max_kv_lag)
        with self._one_at_a_time():
            handle = await self._start(
                await self._pool.identified_servers(),
                version,
                tensors,
                coordinator,
                max_kv_lag=max_kv_lag,
                partial=partial,
                allow_version_rollback=allow_version_rollback,
            )
        try:
            await handle.announced
        except asyncio.CancelledError:
            await handle.cancel()
            raise
        return handle

    async def publish_and_wait(
        self,
        version: int | None,
        tensors: Mapping[str, Tensor] | TensorSource,
        *,
        require: Require = "all",
        kv_policy: KvPolicy | None = None,
        max_kv_lag: int | None = None,
        partial: bool = False,
        allow_version_rollback: bool = False,
    ) -> PublishReport:
        """Publishes a new policy and returns its report, once enough servers have committed it.

        Cancelling it cancels the publish.

        Args:
            version: As for ``publish``, like the other arguments.
            tensors: The policy.
            require: Which of the fleet's servers must commit: "all", "any", or a share of them,
                such as 0.5. See ``PublishReport.require``.
            kv_policy, max_kv_lag: What a commit does with keys and values.
            partial: Whether some tensors are left out.
            allow_version_rollback: Whether the version may fall.

        Raises:
            PublishIncompleteError: Fewer servers committed. These serve the new version; the others
                get no sequences until the next publish or ``catch_up``.
            RollwireError, TypeError, ValueError: As ``publish`` and ``PublishHandle.committed``.
        """
        checked_share(require)
        handle = await self.publish(
            version,
            tensors,
            kv_policy=kv_policy,
            max_kv_lag=max_kv_lag,
            partial=partial,
            allow_version_rollback=allow_version_rollback,
        )
        try:
            report = await handle.committed
        except asyncio.CancelledError:
            await handle.cancel()
            raise
        report.require(require)
        return report

    async def catch_up(
        self,
        tensors: Mapping[str, Tensor] | TensorSource,
        *,
        coordinator: Coordinator | None = None,
    ) -> PublishReport:
        """Publishes the fleet's current policy to servers that are new or missed a publish.

        The other servers are not disturbed.

        Args:
            tensors: All tensors of the version that was published last, as given to ``publish``.
            coordinator: Coordinator of a sharded trainer, from ``Ranks.catch_up``.

        Returns:
            The report, once these servers have committed. ``servers`` has one entry for each, and
            is empty if none was behind. Servers that do not answer, sleep or drain are left out.

        Raises:
            ClosedError: The fleet is not open.
            DigestMismatchError: The tensors are not those of that version; nothing was committed.
            PublishFailedError: None of the servers committed.
            PublishError: Nothing was published to this fleet yet; or see ``publish``.
        """
        with self._one_at_a_time():
            policy = self._pool.policy.current
            if policy is None:
                raise PublishError(
                    "there is nothing to catch up with: nothing was published through this `Fleet` "
                    "yet; publish first"
                )
            behind = await self._pool.outdated_servers()
            if not behind:
                if coordinator is not None:
                    coordinator.release()
                return PublishReport(
                    version=policy.version,
                    update_id="",
                    digest=policy.digest,
                    bytes=0,
                    seconds=0.0,
                    servers=(),
                )
            handle = await self._start(
                behind,
                policy.version,
                tensors,
                coordinator,
                max_kv_lag=self._max_kv_lag,
                allow_version_rollback=True,  # the others have it, whatever these have
                expected_digest=policy.digest,
            )
        try:
            return await handle.committed
        except asyncio.CancelledError:
            await handle.cancel()
            raise

    @contextlib.contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        self._pool.check_open()
        if self._starting or (self._handle is not None and not self._handle.done):
            raise PublishInProgressError(
                "the previous publish has not ended: await its `committed` first"
            )
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    async def _start(
        self,
        servers: Sequence[ServerHandle],
        version: int | None,
        tensors: Mapping[str, Tensor] | TensorSource,
        coordinator: Coordinator | None,
        *,
        max_kv_lag: int | None,
        partial: bool = False,
        allow_version_rollback: bool = False,
        expected_digest: int | None = None,
    ) -> PublishHandle:
        # Modules that need torch.
        import rollwire_transport as transport

        from rollwire_client._publishing.names import ServerNames
        from rollwire_client._publishing.publish import Publish
        from rollwire_client._publishing.schema import match_schema
        from rollwire_client._publishing.source import CheckedSource, GivenOrder
        from rollwire_client._publishing.tensors import ChangeDetector, check_tensors, device_of
        from rollwire_client._publishing.tied import TiedTensors

        schema = await self.schema()
        names = self._names = self._names or ServerNames(schema)
        detector, tied = ChangeDetector(), TiedTensors(names)
        match = functools.partial(
            match_schema,
            cast=self._cast,
            detector=detector,
            on_untied=tied.add,
            coordinator=coordinator,
        )
        source: TensorSource
        if isinstance(tensors, Mapping):
            specs, source = match(tensors, names, partial=partial)
        else:
            check_tensors(tensors)
            self._order = self._order or GivenOrder()
            checked = CheckedSource(
                tensors, names, self._order, detector, coordinator, tied, partial, self._cast
            )
            if partial:
                reading = checked.read(device_of(tensors), self._timeouts.source)
                if coordinator is not None:
                    reading = coordinator.run(reading, asyncio.Event())
                specs, source = match(await reading, names, partial=True)
            else:
                specs, source = self._order.sort(schema), checked
        try:
            manifest = transport.plan(specs, bucket_bytes=self._bucket_bytes, partial=partial)
        except transport.ManifestError as error:
            raise SchemaMismatchError(f"the tensors cannot be sent: {error}") from error
        publish = Publish(
            pool=self._pool,
            servers=servers,
            publisher=weights_pb2.Publisher(id=self.id, term=self.term),
            backend=self._backend,
            host=self._host,
            max_kv_lag=max_kv_lag,
            timeouts=self._timeouts,
            version=version,
            manifest=manifest,
            device=device_of(tensors),
            allow_version_rollback=allow_version_rollback,
            cast=self._cast,
            copy=self._copy,
            expected_digest=expected_digest,
            detector=detector,
            tied=tied,
            coordinator=coordinator,
        )
        work = publish.run(source)
        if coordinator is not None:
            work = coordinator.run(work, publish.progress.released)
        task = self._pool.create_task(work)
        self._handle = PublishHandle(version, publish.progress, task)
        return self._handle


def checked_kv_lag(kv_policy: KvPolicy, max_kv_lag: int | None) -> int | None:
    """Both arguments as one number: None keeps all keys and values, 0 keeps none."""
    if not isinstance(kv_policy, KvPolicy):
        raise TypeError(f"kv_policy is {kv_policy!r}, not a KvPolicy")
    if max_kv_lag is not None:
        max_kv_lag = integer("max_kv_lag", max_kv_lag, maximum=(1 << 32) - 1)
    if kv_policy is KvPolicy.KEEP:
        return max_kv_lag
    if max_kv_lag is not None:
        raise ValueError(
            f"max_kv_lag is {max_kv_lag}, but KvPolicy.RECOMPUTE keeps no keys and values: use "
            "KvPolicy.KEEP, or leave max_kv_lag out"
        )
    return 0


def _check_bucket_bytes(size: int) -> int:
    from rollwire_transport._layout import ALIGNMENT, MAX_BUCKET_BYTES

    size = integer("bucket_bytes", size, minimum=ALIGNMENT, maximum=MAX_BUCKET_BYTES)
    if size % ALIGNMENT:
        raise ValueError(f"bucket_bytes is {size}, not a multiple of {ALIGNMENT}")
    return size


def _require_transport() -> None:
    try:
        import rollwire_transport  # noqa: F401 - whether it can be imported
    except ImportError as error:
        raise MissingDependencyError(
            f"publishing needs {error.name}: pip install 'rollwire[transport]'"
        ) from error

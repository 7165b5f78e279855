"""One weight update: announced, received into staged memory, verified, committed or discarded.

UpdateWeights ─▶ READY ─JoinTransport─▶ RECEIVING ─▶ STAGED ─CommitWeights─▶ committed
                                            │  ▲
                                            ▼  │ JoinTransport
                                          STALLED

A delta is prepared by the engine after its last bucket, while the update is still RECEIVING.

In any of these phases an update is discarded when its publisher asks for it, when a publisher with
a higher term takes over, when its UpdateWeights call ends before STAGED, when its lease runs out
while it waits for its publisher, and when the server goes to sleep or shuts down.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog
from rollwire.deadlines import Timer
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase, weights_text

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import (
    ServiceError,
    bad_request,
    from_engine_error,
    result_of,
    spawn,
)
from rollwire_server.weights.transport_group import JoinStep

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import torch
    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_server.counters import CommitResult, ServerCounters
    from rollwire_server.engines.base import PreparedDelta
    from rollwire_server.weights.transport_group import JoinRequest, KeptGroup

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PublisherId:
    """Who publishes: one run of a trainer. A higher term takes the server over."""

    id: str
    term: int


@dataclass(frozen=True, slots=True)
class UpdateAnnouncement:
    publisher: PublisherId
    update_id: str
    version: int | None
    allow_version_rollback: bool
    manifest: transport.Manifest
    stage_lease: float  # in seconds
    # The group that the trainer has kept, if any, and how many updates that has moved.
    kept_epoch: str = ""
    kept_transfers: int = 0
    changed_share: float | None = None  # since the publisher's last update, as it says


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    phase: UpdatePhase
    received_bytes: int
    forwarded_bytes: int
    next_bucket: int
    digest: int
    detail: str
    epoch: str
    peer: int | None
    timed_out: bool


class WeightUpdate:
    """An announced update with its staged memory, its transport group and its lease.

    Args:
        announcement: What the publisher asked for.
        staged: The engine's memory for it.
        receiver: Writes received buckets into ``staged``.
        prepare: For a delta: has the engine prepare what was received.
        serving: What the server serves until this update is committed.
        device: Where links receive.
        listen: Where transfers may listen.
        bucket_timeout: Seconds to wait for the next bucket.
        group: Keeps the group for the next update.
        tasks: Owns joining and receiving.
        counters: Counts received and forwarded bytes.
        abandon: Discards this update, for the reason given.
    """

    def __init__(
        self,
        announcement: UpdateAnnouncement,
        staged: Mapping[str, Tensor],
        receiver: transport.Receiver,
        *,
        prepare: Callable[[Mapping[str, Tensor]], Awaitable[PreparedDelta]] | None,
        serving: WeightTag,
        device: torch.device,
        listen: transport.ListenOptions,
        bucket_timeout: float,
        group: KeptGroup,
        tasks: asyncio.TaskGroup,
        counters: ServerCounters,
        abandon: Callable[[WeightUpdate, str], None],
    ) -> None:
        self.announcement = announcement
        self.staged = staged
        self.delta: PreparedDelta | None = None
        self.receiver = receiver
        self.phase = UpdatePhase.READY
        self.changed = asyncio.Event()
        self.failure: ServiceError | None = None  # once set, the update is of no use
        self.lease: Timer | None = None
        self.receive_ns = 0
        self.receiving: asyncio.Task[None] | None = None
        self.committing: asyncio.Task[CommitResult | ServiceError] | None = None
        self._prepare_delta = prepare
        self._serving = serving
        self._device = device
        self._listen = listen
        self._bucket_timeout = bucket_timeout
        self._group = group
        self._tasks = tasks
        self._counters = counters
        self._abandon = abandon
        self._detail = ""
        self._lost_peer: int | None = None  # because of which it stalled
        self._timed_out = False
        self._epoch = ""  # of the current group
        self._phase_epoch = ""  # of the group in which the phase was entered
        self._opening: asyncio.Task[transport.Link | ServiceError | None] | None = None
        self._connecting: asyncio.Task[ServiceError | None] | None = None
        self._link: transport.Link | None = None
        self._forwarded_bytes = 0  # in former groups, less what a kept link had forwarded before

    @property
    def log_fields(self) -> dict[str, object]:
        """What names this update in log lines."""
        return {"update_id": self.announcement.update_id, "version": self.announcement.version}

    @property
    def digests(self) -> Mapping[str, int]:
        """The digest of each tensor, without aliases, once STAGED: it will have it."""
        return self.receiver.digests if self.delta is None else self.delta.digests

    @property
    def digest(self) -> int:
        """The digest of the update's tensors, once STAGED."""
        return transport.sum_digests(self.digests.values())

    def progress(self) -> UpdateProgress:
        forwarded = self._link.forwarded_bytes if self._link is not None else 0
        peer = self._lost_peer
        if self.phase is UpdatePhase.RECEIVING:
            peer = self._link.waits_for if self._link is not None else None
        return UpdateProgress(
            phase=self.phase,
            received_bytes=self.receiver.received_bytes,
            forwarded_bytes=self._forwarded_bytes + forwarded,
            next_bucket=self.receiver.next_bucket,
            digest=self.digest if self.phase is UpdatePhase.STAGED else 0,
            detail=self._detail,
            epoch=self._phase_epoch,
            peer=peer,
            timed_out=self._timed_out,
        )

    def enter(self, phase: UpdatePhase, cause: Exception | None = None) -> None:
        """Enters a phase, STALLED for a cause. In all but RECEIVING a lease bounds the wait for the
        publisher.
        """
        self.end_lease()
        detail = "" if cause is None else str(cause)
        self._lost_peer = getattr(cause, "peer", None)
        self._timed_out = isinstance(cause, transport.TransportTimeout)
        self.phase, self._detail, self._phase_epoch = phase, detail, self._epoch
        if phase is not UpdatePhase.RECEIVING:  # of which its trainer knows
            self._begin_lease()
            self.changed.set()
        log.info(
            "update",
            **self.log_fields,
            phase=phase.value,
            detail=detail,
            next_bucket=self.receiver.next_bucket,
        )

    def begin(self) -> None:
        """READY; and RECEIVING at once if trainer and server have kept the same group."""
        self.enter(UpdatePhase.READY)
        epoch, transfers = self.announcement.kept_epoch, self.announcement.kept_transfers
        if (link := self._group.take(epoch, transfers)) is not None:
            self._epoch, self._link = epoch, link
            self._forwarded_bytes -= link.forwarded_bytes
            self._begin_receiving(link, 0)

    def fail(self, failure: ServiceError) -> None:
        """Tells whoever waits for this update that it is discarded; the first failure counts."""
        self.end_lease()
        if self.failure is None:
            self.failure = failure
        self.changed.set()

    def _begin_lease(self) -> None:
        if self.failure is None:
            lease = self.announcement.stage_lease
            why = (
                f"its publisher did nothing for its lease of {lease:g} s while it was "
                f"{self.phase.value}"
            )
            self.lease = Timer(lease, self._abandon, self, why)

    def renew_lease(self) -> None:
        """Its publisher is there: a lease that runs begins anew."""
        if self.lease is not None:
            self.end_lease()
            self._begin_lease()

    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
        self.lease = None

    async def close(self) -> None:
        """Leaves the group and releases the staged memory."""
        await self._leave(self._take_link())
        self._opening = None  # whose result is the link
        self.release()

    def release(self) -> None:
        """Releases the staged memory, whoever still refers to this update."""
        self.staged = {}
        self.delta = None
        self.receiver.release()

    # Receiving.

    async def join(self, request: JoinRequest, timeout: float) -> bytes:
        """One step of joining a transport group; returns what the trainer needs for the next one.

        Idempotent for one epoch. Does nothing once everything has been received.
        """
        if self.phase is UpdatePhase.STAGED:
            return b""
        if request.step is JoinStep.PREPARE:
            return await self._prepare(request)
        if request.first_bucket > self.receiver.next_bucket:
            raise bad_request(
                "first_bucket",
                f"a group that begins with bucket {request.first_bucket} leaves a gap: bucket "
                f"{self.receiver.next_bucket} has not been received yet",
            )
        await self._connect(request, timeout)
        return b""

    async def _prepare(self, request: JoinRequest) -> bytes:
        """Leaves the former group, and opens this end of a new one."""
        self._check_place(request)
        if self._epoch != request.epoch or self._opening is None:
            self._epoch = request.epoch
            # At once: a failure of the former group must not look as one of this group.
            former = self._take_link()
            self._opening = spawn(
                self._tasks, self._open(request, former), f"open {self.announcement.update_id}"
            )
        link = await result_of(self._opening)
        return b"" if link is None else link.answer

    def _check_place(self, request: JoinRequest) -> None:
        backends = transport.available_backends(self._listen)
        backend = backends.get(request.backend)
        if backend is None or not backend.ok:
            usable = ", ".join(name for name, backend in backends.items() if backend.ok) or "none"
            why = f" ({backend.reason})" if backend is not None else ""
            raise bad_request(
                "backend",
                f"this server cannot use backend {request.backend!r}{why}, only {usable}",
            )
        if not 0 < request.rank < request.world_size:
            raise bad_request(
                "ranks",
                f"rank {request.rank} is not a receiver in a group of {request.world_size}: "
                "the trainer has rank 0",
            )

    async def _open(
        self, request: JoinRequest, former: transport.Link | None
    ) -> transport.Link | None:
        await self._leave(former)
        await self._group.close()
        self._check_still_wanted(request)
        if self.phase is UpdatePhase.STAGED:  # the rest arrived while the former group was left
            return None
        try:
            link = await asyncio.to_thread(
                transport.open_link,
                request.backend,
                epoch=request.epoch,
                rank=request.rank,
                world_size=request.world_size,
                host=request.host,
                device=self._device,
                listen=self._listen,
            )
        except (transport.TransportError, OSError) as error:
            self._check_still_wanted(request)
            raise self._stalled(error) from error
        try:
            self._check_still_wanted(request)
        except ServiceError:
            await asyncio.to_thread(link.close)
            raise
        self._link = link
        if self.lease is None:
            self._begin_lease()
        return link

    async def _connect(self, request: JoinRequest, timeout: float) -> None:
        link = self._link
        if self._epoch != request.epoch or self._opening is None or link is None:
            raise ServiceError(
                Reason.TRANSPORT_FAILED, "this server has not prepared for that group, or left it"
            )
        if self._connecting is None:
            self.end_lease()
            self._connecting = spawn(
                self._tasks,
                self._connect_link(link, request, timeout),
                f"connect {self.announcement.update_id}",
            )
        await result_of(self._connecting)

    async def _connect_link(
        self, link: transport.Link, request: JoinRequest, timeout: float
    ) -> None:
        try:
            await asyncio.to_thread(link.connect, timeout, request.offer)
        except transport.TransportError as error:
            self._check_still_wanted(request)
            raise self._stalled(error) from error
        except Exception as error:
            log.exception("a bug: connecting failed")
            self._check_still_wanted(request)
            raise self._stalled(RuntimeError(f"{type(error).__name__}: {error}")) from error
        self._check_still_wanted(request)
        self._begin_receiving(link, request.first_bucket)

    def _begin_receiving(self, link: transport.Link, first_bucket: int) -> None:
        self.enter(UpdatePhase.RECEIVING)
        self.receiving = self._tasks.create_task(
            self._receive(link, first_bucket), name=f"receive {self.announcement.update_id}"
        )

    def _check_still_wanted(self, request: JoinRequest) -> None:
        if self.failure is not None:
            raise self.failure
        if self._epoch != request.epoch:
            raise ServiceError(
                Reason.NOT_STAGED, f"update {self.announcement.update_id} joins another group"
            )

    def _stalled(self, error: Exception) -> ServiceError:
        self.enter(UpdatePhase.STALLED, error)
        return ServiceError(
            Reason.TRANSPORT_TIMEOUT if self._timed_out else Reason.TRANSPORT_FAILED,
            str(error),
            metadata={"peer": "" if self._lost_peer is None else f"rank {self._lost_peer}"},
        )

    def _take_link(self) -> transport.Link | None:
        link, self._link = self._link, None
        return link

    async def _leave(self, link: transport.Link | None) -> None:
        if link is not None:
            link.abort()
            self._forwarded_bytes += link.forwarded_bytes
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            await asyncio.wait([connecting])
        if self.receiving is not None:
            await self.receiving
        if link is not None:
            await asyncio.to_thread(link.close)

    async def _receive(self, link: transport.Link, first_bucket: int) -> None:
        if await self._receive_buckets(link, first_bucket) and await self._prepare_if_delta():
            self.enter(UpdatePhase.STAGED)

    async def _receive_buckets(self, link: transport.Link, first_bucket: int) -> bool:
        began, received_before = time.monotonic_ns(), self.receiver.received_bytes
        forwarded_before = link.forwarded_bytes
        received = False
        try:
            await asyncio.to_thread(
                self.receiver.receive,
                link,
                first_bucket=first_bucket,
                bucket_timeout=self._bucket_timeout,
            )
        except transport.DigestMismatch as error:
            self._end(Reason.DIGEST_MISMATCH, error)
        except transport.TransportError as error:
            if self._link is link:  # else the group was left on purpose
                self.enter(UpdatePhase.STALLED, error)
        except Exception as error:
            log.exception("a bug: receiving failed")
            self.enter(UpdatePhase.STALLED, RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            if self._link is link:
                self._forwarded_bytes += link.forwarded_bytes
                self._link = None
                self._group.put(self._epoch, link)
            received = True
        finally:
            self.receive_ns += time.monotonic_ns() - began
            self._counters.received_bytes += self.receiver.received_bytes - received_before
            closed = True
            if not received:
                closed = await asyncio.to_thread(link.close)
            self._counters.forwarded_bytes += link.forwarded_bytes - forwarded_before
            if not (closed or self.receiver.complete):
                self._abandon(self, "its former group may still write into what is staged")
        return received

    async def _prepare_if_delta(self) -> bool:
        """Prepares a delta; false if the update is of no use."""
        if self._prepare_delta is None:
            return True
        if self.failure is not None:  # it was discarded as it was received
            return False
        try:
            self.delta = await self._prepare_delta(self.staged)
        except transport.ManifestError as error:
            self._end(Reason.MANIFEST_MISMATCH, error)
        except EngineError as error:
            ended = from_engine_error(error, no_memory=Reason.STAGING_FAILED)
            self._end(ended.reason, error)
        except Exception as error:
            log.exception("a bug: preparing a delta failed")
            self._end(Reason.INTERNAL, RuntimeError(f"{type(error).__name__}: {error}"))
        return self.delta is not None

    def _end(self, reason: Reason, error: Exception) -> None:
        if self.failure is None:
            self.failure = ServiceError(
                reason,
                f"{error}; the update is discarded, the server serves "
                f"{weights_text(self._serving)}",
            )
        self.enter(UpdatePhase.STALLED, error)

    # Committing.

    def check_can_commit(self, expected_digest: int) -> None:
        """Raises ServiceError when it is not staged, or not what the trainer sent."""
        update_id = self.announcement.update_id
        if self.phase is not UpdatePhase.STAGED:
            raise ServiceError(
                Reason.NOT_STAGED,
                f"update {update_id} is {self.phase.value}, not staged; the server serves "
                f"{weights_text(self._serving)}",
            )
        if (digest := self.digest) != expected_digest:
            advice = "discard it and publish again"
            if self.delta is not None:
                advice = (
                    "the memory may hold other bits than the delta builds on: discard it and "
                    "publish in full encoding"
                )
            raise ServiceError(
                Reason.DIGEST_MISMATCH,
                f"update {update_id} has digest {digest:016x} here and {expected_digest:016x} at "
                f"the trainer: {advice}; the server serves {weights_text(self._serving)}",
            )

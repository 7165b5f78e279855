"""One weight update: announced, received into staged memory, verified, committed or discarded.

UpdateWeights ─▶ READY ─JoinTransport─▶ RECEIVING ─▶ STAGED ─CommitWeights─▶ committed
                                            │  ▲
                                            ▼  │ JoinTransport
                                          STALLED

In any of these phases an update is discarded when its publisher asks for it, when a publisher with
a higher term takes over, when its UpdateWeights call ends before STAGED, when its lease runs out
while it waits for its publisher, and when the server goes to sleep or shuts down.
"""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog
from rollwire.deadlines import Timer
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase, weights_text

from rollwire_server.errors import ServiceError, bad_request, result_of, spawn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_server.counters import CommitResult, ServerCounters

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


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """A server's place in one transport group."""

    epoch: str
    backend: str
    rank: int
    world_size: int
    rendezvous: str
    first_bucket: int


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    phase: UpdatePhase
    received_bytes: int
    forwarded_bytes: int
    next_bucket: int
    digest: int
    detail: str
    epoch: str


class WeightUpdate:
    """An announced update with its staged memory, its transport group and its lease.

    Args:
        announcement: What the publisher asked for.
        staged: The engine's memory for it.
        receiver: Writes received buckets into ``staged``.
        serving: What the server serves until this update is committed.
        device: Where links receive.
        listen: Where transfers may listen.
        bucket_timeout: Seconds to wait for the next bucket.
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
        serving: WeightTag,
        device: torch.device,
        listen: transport.ListenOptions,
        bucket_timeout: float,
        tasks: asyncio.TaskGroup,
        counters: ServerCounters,
        abandon: Callable[[WeightUpdate, str], None],
    ) -> None:
        self.announcement = announcement
        self.staged = staged
        self.receiver = receiver
        self.phase = UpdatePhase.READY
        self.changed = asyncio.Event()
        self.failure: ServiceError | None = None  # once set, the update is of no use
        self.lease: Timer | None = None
        self.receive_ns = 0
        self.receiving: asyncio.Task[None] | None = None
        self.committing: asyncio.Task[CommitResult | ServiceError] | None = None
        self._serving = serving
        self._device = device
        self._listen = listen
        self._bucket_timeout = bucket_timeout
        self._tasks = tasks
        self._counters = counters
        self._abandon = abandon
        self._detail = ""
        self._epoch = ""  # of the current group
        self._phase_epoch = ""  # of the group in which the phase was entered
        self._joining: asyncio.Task[ServiceError | None] | None = None
        self._left = threading.Event()  # stops a rendezvous that is under way
        self._link: transport.Link | None = None
        self._forwarded_bytes = 0  # in former groups

    @property
    def log_fields(self) -> dict[str, object]:
        """What names this update in log lines."""
        return {"update_id": self.announcement.update_id, "version": self.announcement.version}

    def progress(self) -> UpdateProgress:
        forwarded = self._link.forwarded_bytes if self._link is not None else 0
        return UpdateProgress(
            phase=self.phase,
            received_bytes=self.receiver.received_bytes,
            forwarded_bytes=self._forwarded_bytes + forwarded,
            next_bucket=self.receiver.next_bucket,
            digest=self.receiver.digest if self.phase is UpdatePhase.STAGED else 0,
            detail=self._detail,
            epoch=self._phase_epoch,
        )

    def enter(self, phase: UpdatePhase, detail: str = "") -> None:
        """Enters a phase. In all but RECEIVING a lease bounds the wait for the publisher."""
        self.end_lease()
        if phase is not UpdatePhase.RECEIVING and self.failure is None:
            lease = self.announcement.stage_lease
            why = (
                f"its publisher did nothing for its lease of {lease:g} s while it was {phase.value}"
            )
            self.lease = Timer(lease, self._abandon, self, why)
        self.phase, self._detail, self._phase_epoch = phase, detail, self._epoch
        self.changed.set()
        log.info(
            "update",
            **self.log_fields,
            phase=phase.value,
            detail=detail,
            next_bucket=self.receiver.next_bucket,
        )

    def fail(self, failure: ServiceError) -> None:
        """Tells whoever waits for this update that it is discarded; the first failure counts."""
        self.end_lease()
        if self.failure is None:
            self.failure = failure
        self.changed.set()

    def end_lease(self) -> None:
        if self.lease is not None:
            self.lease.cancel()
        self.lease = None

    async def close(self) -> None:
        """Leaves the group and releases the staged memory."""
        await self._leave()
        self.release()

    def release(self) -> None:
        """Releases the staged memory, whoever still refers to this update."""
        self.staged = {}
        self.receiver.release()

    # Receiving.

    async def join(self, membership: GroupMembership, timeout: float) -> None:
        """Joins a transport group, after leaving the former one, and starts to receive.

        Idempotent for one epoch. Does nothing once everything has been received.
        """
        if self.phase is UpdatePhase.STAGED:
            return
        self._check_membership(membership)
        if self._epoch != membership.epoch:
            self.end_lease()
            self._epoch = membership.epoch
            self._joining = spawn(
                self._tasks,
                self._join(membership, timeout),
                f"join {self.announcement.update_id}",
            )
        if self._joining is not None:
            await result_of(self._joining)

    def _check_membership(self, membership: GroupMembership) -> None:
        backends = transport.available_backends(self._listen)
        backend = backends.get(membership.backend)
        if backend is None or not backend.ok:
            usable = ", ".join(name for name, backend in backends.items() if backend.ok) or "none"
            why = f" ({backend.reason})" if backend is not None else ""
            raise bad_request(
                "backend",
                f"this server cannot use backend {membership.backend!r}{why}, only {usable}",
            )
        if not 0 < membership.rank < membership.world_size:
            raise bad_request(
                "ranks",
                f"rank {membership.rank} is not a receiver in a group of {membership.world_size}: "
                "the trainer has rank 0",
            )
        if membership.first_bucket > self.receiver.next_bucket:
            raise bad_request(
                "first_bucket",
                f"a group that begins with bucket {membership.first_bucket} leaves a gap: bucket "
                f"{self.receiver.next_bucket} has not been received yet",
            )

    async def _join(self, membership: GroupMembership, timeout: float) -> None:
        await self._leave()
        self._check_still_wanted(membership)
        if self.phase is UpdatePhase.STAGED:  # the rest arrived while the former group was left
            return
        self._left = threading.Event()
        try:
            link = await asyncio.to_thread(
                transport.join_group,
                membership.backend,
                epoch=membership.epoch,
                rank=membership.rank,
                world_size=membership.world_size,
                rendezvous=membership.rendezvous,
                timeout=timeout,
                device=self._device,
                cancelled=self._left,
                listen=self._listen,
            )
        except transport.TransportError as error:
            self._check_still_wanted(membership)
            self.enter(UpdatePhase.STALLED, str(error))
            timed_out = isinstance(error, transport.TransportTimeout)
            raise ServiceError(
                Reason.TRANSPORT_TIMEOUT if timed_out else Reason.TRANSPORT_FAILED,
                str(error),
                metadata={"peer": error.peer or ""},
            ) from error
        try:
            self._check_still_wanted(membership)
        except ServiceError:
            await asyncio.to_thread(link.close)
            raise
        self._link = link
        self.enter(UpdatePhase.RECEIVING)
        self.receiving = self._tasks.create_task(
            self._receive(link, membership.first_bucket),
            name=f"receive {self.announcement.update_id}",
        )

    def _check_still_wanted(self, membership: GroupMembership) -> None:
        if self.failure is not None:
            raise self.failure
        if self._epoch != membership.epoch:
            raise ServiceError(
                Reason.NOT_STAGED, f"update {self.announcement.update_id} joins another group"
            )

    async def _leave(self) -> None:
        self._left.set()
        link, self._link = self._link, None
        if link is not None:
            link.abort()
            self._forwarded_bytes += link.forwarded_bytes
        if self.receiving is not None:
            await self.receiving

    async def _receive(self, link: transport.Link, first_bucket: int) -> None:
        began, received_before = time.monotonic_ns(), self.receiver.received_bytes
        try:
            await asyncio.to_thread(
                self.receiver.receive,
                link,
                first_bucket=first_bucket,
                bucket_timeout=self._bucket_timeout,
            )
        except transport.DigestMismatch as error:
            self.failure = ServiceError(
                Reason.DIGEST_MISMATCH,
                f"{error}; the update is discarded, the server serves "
                f"{weights_text(self._serving)}",
            )
            self.enter(UpdatePhase.STALLED, str(error))
        except transport.TransportError as error:
            if self._link is link:  # else the group was left on purpose
                self.enter(UpdatePhase.STALLED, str(error))
        except Exception as error:
            log.exception("a bug: receiving failed")
            self.enter(UpdatePhase.STALLED, f"{type(error).__name__}: {error}")
        else:
            self.enter(UpdatePhase.STAGED)
        finally:
            self.receive_ns += time.monotonic_ns() - began
            self._counters.received_bytes += self.receiver.received_bytes - received_before
            closed = await asyncio.to_thread(link.close)
            self._counters.forwarded_bytes += link.forwarded_bytes
            if not (closed or self.receiver.complete):
                self._abandon(self, "its former group may still write into what is staged")

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
        if (digest := self.receiver.digest) != expected_digest:
            raise ServiceError(
                Reason.DIGEST_MISMATCH,
                f"update {update_id} has digest {digest:016x} here and {expected_digest:016x} at "
                "the trainer: discard it and publish again; the server serves "
                f"{weights_text(self._serving)}",
            )

"""The weight updates of one server, one at a time. What serves is not touched before a commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import structlog
from rollwire.reasons import Reason
from rollwire.types import CommittedUpdate, ServerState, UpdatePhase, weights_text

from rollwire_server.counters import UpdateOutcome
from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, bad_request, from_engine_error, result_of, spawn
from rollwire_server.logs import bind
from rollwire_server.state import Rpc
from rollwire_server.weights.transport_group import KeptGroup
from rollwire_server.weights.update import WeightUpdate

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from torch import Tensor

    from rollwire_server.counters import CommitResult, ServerCounters
    from rollwire_server.engines.base import Engine, PreparedDelta
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.state import WeightState
    from rollwire_server.weights.transport_group import JoinRequest
    from rollwire_server.weights.update import (
        PublisherId,
        UpdateAnnouncement,
        UpdateProgress,
    )

log = structlog.get_logger()

MAX_REMEMBERED_COMMITS = 64
PROGRESS_SECONDS = 0.25  # the API promises a message every 500 ms


class UpdateManager:
    """Life: construct → RPCs, while ``tasks`` (the server's) is alive → ``discard_current``."""

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        weights: WeightState,
        counters: ServerCounters,
        tasks: asyncio.TaskGroup,
        *,
        frozen: bool,
        bucket_timeout: float,
        listen: transport.ListenOptions,
    ) -> None:
        self._engine = engine
        self._state = state
        self.weights = weights
        self._counters = counters
        self._tasks = tasks
        self._bucket_timeout = bucket_timeout
        self.frozen = frozen
        self.listen = listen
        backends = transport.available_backends(listen)
        self.transports = [name for name, backend in backends.items() if backend.ok]
        self.current: WeightUpdate | None = None
        self.publisher: PublisherId | None = None  # that announced last; lower terms are refused
        self.last_update: CommittedUpdate | None = None
        self.announced_version: int | None = None  # of the last update that had one
        self._announcing = asyncio.Lock()
        self._group = KeptGroup(tasks)
        self._commits: OrderedDict[str, CommitResult] = OrderedDict()
        self._verifying: asyncio.Task[bool | ServiceError] | None = None
        # Engines may have memory for one update at a time: none is staged before these are done.
        self._holding_memory: set[asyncio.Task[Any]] = set()

    async def discard_current(self, reason: Reason, why: str) -> None:
        """Or waits for its commit, if that has begun; returns when neither an update nor a
        transport group holds memory.
        """
        await self._discard_all(reason, why)
        await self._group.close()

    async def _discard_all(self, reason: Reason, why: str) -> None:
        while (update := self.current) is not None:
            if update.committing is not None:
                await asyncio.wait([update.committing])
            else:
                self._discard(update, reason, why)
        if self._holding_memory:
            await asyncio.wait(self._holding_memory)

    async def verify(self) -> bool:
        """Whether the memory still holds what was committed."""
        self._state.check(Rpc.VERIFY)
        # Reading all weights takes the engine's time, so callers at one time share one reading.
        if self._verifying is None or self._verifying.done():
            self._verifying = spawn(self._tasks, self.weights.verify(), "verify")
        return await result_of(self._verifying)

    # The steps of an update.

    def check_can_announce(self, publisher: PublisherId) -> None:
        self._check_allowed(Rpc.UPDATE_WEIGHTS)
        self._check_publisher(publisher)

    async def announce(
        self, announcement: UpdateAnnouncement
    ) -> AsyncGenerator[UpdateProgress, None]:
        """Reports on the update until it is staged; closing the iterator before discards it."""
        update = await self._admit(announcement)
        try:
            while True:
                update.changed.clear()
                progress = update.progress()
                yield progress
                if progress.phase is UpdatePhase.STAGED:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(PROGRESS_SECONDS):
                        await update.changed.wait()
                if update.failure is not None:
                    raise update.failure
        finally:
            if update.phase is not UpdatePhase.STAGED and self.current is update:
                self._abandon(update, "its UpdateWeights call ended before it was staged")

    async def join(
        self,
        publisher: PublisherId,
        update_id: str,
        request: JoinRequest,
        timeout: float,
    ) -> tuple[bytes, int]:
        """Returns the answer, and the first bucket that has not been received yet."""
        self._check_allowed(Rpc.JOIN_TRANSPORT)
        self._check_publisher(publisher)
        update = self._require(update_id)
        answer = await update.join(request, timeout)
        return answer, update.receiver.next_bucket

    async def commit(
        self, publisher: PublisherId, update_id: str, expected_digest: int, max_kv_lag: int | None
    ) -> CommitResult:
        """Idempotent. What has begun is completed, also when its caller goes away."""
        if (result := self._commits.get(update_id)) is not None:
            self._check_publisher(publisher)
            return result
        self._check_allowed(Rpc.COMMIT_WEIGHTS)
        self._check_publisher(publisher)
        update = self._require(update_id)
        if update.committing is None:
            update.check_can_commit(expected_digest)
            update.committing = spawn(
                self._tasks, self._commit(update, max_kv_lag), f"commit {update_id}"
            )
        return await result_of(update.committing)

    async def discard(self, publisher: PublisherId, update_id: str) -> None:
        """Idempotent."""
        self._check_allowed(Rpc.DISCARD_UPDATE)
        self._check_publisher(publisher)
        update = self.current
        if update is None or update.announcement.update_id != update_id:
            return
        if update.committing is not None:
            await asyncio.wait([update.committing])
        else:
            closing = self._discard(update, Reason.NOT_STAGED, f"update {update_id} was discarded")
            await asyncio.wait([closing])

    # Checks, which change nothing.

    def _check_allowed(self, rpc: Rpc) -> None:
        self._state.check(rpc)
        if self.frozen:
            raise ServiceError(
                Reason.FROZEN,
                f"{rpc.value} is refused: the server was started with --frozen and keeps "
                f"{weights_text(self.weights.current)}",
            )

    def _check_publisher(self, publisher: PublisherId) -> None:
        known = self.publisher
        if known is None or publisher == known or publisher.term > known.term:
            return
        raise ServiceError(
            Reason.STALE_PUBLISHER,
            f"publisher {publisher.id!r} with term {publisher.term} is refused, since "
            f"{known.id!r} with term {known.term} took over: to take the server back, make a new "
            "publisher, which has a higher term",
            metadata={"publisher_id": known.id, "term": str(known.term)},
        )

    def _check_announcement(self, announcement: UpdateAnnouncement) -> None:
        manifest, state = announcement.manifest, self._state.current
        is_delta = manifest.encoding is transport.Encoding.DELTA
        engine = self._engine.describe()
        if is_delta and not engine.deltas:
            raise ServiceError(
                Reason.UNSUPPORTED_ENCODING,
                f"the {engine.engine} engine takes no deltas here: send the update in full "
                "encoding",
                field="manifest.encoding",
            )
        incomplete = state in (ServerState.QUARANTINED, ServerState.AWAITING_WEIGHTS)
        if (is_delta or manifest.partial) and incomplete:
            what = "a delta" if is_delta else "a partial update"
            raise ServiceError(
                Reason.BASE_MISMATCH,
                f"{what} needs complete weights to build on, and the server is {state.value}: "
                "publish all tensors in full encoding",
            )
        self.weights.check_version(announcement)

    def _require(self, update_id: str) -> WeightUpdate:
        if self.current is None or self.current.announcement.update_id != update_id:
            raise ServiceError(
                Reason.NOT_STAGED,
                f"no update {update_id} is under way: it was discarded, its lease ended, or it was "
                f"never announced; the server serves {weights_text(self.weights.current)}",
            )
        bind(version=self.current.announcement.version)
        return self.current

    # Announcing.

    async def _admit(self, announcement: UpdateAnnouncement) -> WeightUpdate:
        async with self._announcing:
            self.check_can_announce(announcement.publisher)
            if announcement.update_id in self._commits:
                raise bad_request(
                    "update_id",
                    f"update {announcement.update_id} was committed: give each update a new id",
                )
            if (update := self.current) is not None:
                if announcement == update.announcement and update.phase is UpdatePhase.STAGED:
                    update.renew_lease()
                    return update  # announced again: the answer was lost, or others take longer
                if announcement.publisher == self.publisher or update.committing is not None:
                    raise _in_progress(update)
            self._check_announcement(announcement)
            if announcement.version is not None:
                self.announced_version = announcement.version
            schema = self._engine.schema()
            await asyncio.to_thread(_check_manifest, announcement.manifest, schema)
            self._check_allowed(Rpc.UPDATE_WEIGHTS)
            self.weights.check_base(announcement.manifest)
            self.publisher = announcement.publisher
            await self._discard_all(
                Reason.STALE_PUBLISHER, f"publisher {announcement.publisher.id!r} took over"
            )
            # The caller may go away meanwhile; an engine's command cannot be left half way.
            staging = spawn(
                self._tasks, self._stage(announcement), f"stage {announcement.update_id}"
            )
            self._track_memory(staging)
            update = await result_of(staging)
            try:
                # Everything may have changed while it was staged.
                self._check_allowed(Rpc.UPDATE_WEIGHTS)
                self._check_announcement(announcement)
                self.weights.check_base(announcement.manifest)
            except ServiceError:
                update.release()
                raise
            self.current = update
            update.begin()
            return update

    async def _stage(self, announcement: UpdateAnnouncement) -> WeightUpdate:
        serving = self.weights.current
        try:
            staged = await self._engine.stage(announcement.manifest)
        except EngineError as error:
            state = f"the server holds {weights_text(serving)}"
            raise from_engine_error(error, state, no_memory=Reason.STAGING_FAILED) from error
        # A worker thread may hold what it was given, and its result, for a moment longer than they
        # are waited for: memory that the next update may need. So both pass through a list.
        passed: list[Any] = [staged]
        await asyncio.to_thread(_make_receiver, announcement.manifest, passed)
        return WeightUpdate(
            announcement,
            staged,
            passed.pop(),
            prepare=self._preparing(announcement.manifest),
            serving=serving,
            device=self._engine.describe().device,
            listen=self.listen,
            bucket_timeout=self._bucket_timeout,
            group=self._group,
            tasks=self._tasks,
            counters=self._counters,
            abandon=self._abandon,
        )

    def _preparing(
        self, manifest: transport.Manifest
    ) -> Callable[[Mapping[str, Tensor]], Awaitable[PreparedDelta]] | None:
        if manifest.encoding is not transport.Encoding.DELTA:
            return None
        return lambda staged: self._engine.prepare_delta(manifest, staged, self.weights.digests)

    # Ending.

    async def _commit(self, update: WeightUpdate, max_kv_lag: int | None) -> CommitResult:
        update.end_lease()
        outcome = UpdateOutcome.FAILED
        try:
            result = await self.weights.commit(update, max_kv_lag)
            outcome = (
                UpdateOutcome.ALREADY_CURRENT if result.already_current else UpdateOutcome.COMMITTED
            )
        finally:
            self._counters.updates[outcome] += 1
            self.current = None
            update.release()
        encoding = update.announcement.manifest.encoding
        self._counters.committed[encoding] += 1
        self.last_update = CommittedUpdate(
            encoding.value, update.receiver.received_bytes, update.announcement.changed_share
        )
        self._commits[update.announcement.update_id] = result
        if len(self._commits) > MAX_REMEMBERED_COMMITS:
            self._commits.popitem(last=False)
        return result

    def _abandon(self, update: WeightUpdate, why: str) -> None:
        if update.committing is None:
            update_id = update.announcement.update_id
            self._discard(update, Reason.NOT_STAGED, f"update {update_id} was discarded: {why}")

    def _discard(self, update: WeightUpdate, reason: Reason, why: str) -> asyncio.Task[None]:
        """Discards an update at once; its memory is released when the returned task is done."""
        if self.current is update:
            self.current = None
            self._counters.updates[UpdateOutcome.DISCARDED] += 1
            log.info("update discarded", **update.log_fields, why=why)
        update.fail(ServiceError(reason, why))
        closing = self._tasks.create_task(
            update.close(), name=f"close {update.announcement.update_id}"
        )
        self._track_memory(closing)
        return closing

    def _track_memory(self, task: asyncio.Task[Any]) -> None:
        self._holding_memory.add(task)
        task.add_done_callback(self._holding_memory.discard)


def _check_manifest(manifest: transport.Manifest, schema: Sequence[transport.TensorSpec]) -> None:
    try:
        transport.validate(manifest)
        transport.compare(manifest, schema)
    except transport.ManifestError as error:
        raise ServiceError(Reason.MANIFEST_MISMATCH, str(error), field="manifest") from error


def _make_receiver(manifest: transport.Manifest, passed: list[Any]) -> None:
    if manifest.encoding is transport.Encoding.DELTA:
        manifest = transport.delta_layout(manifest)
    passed.append(transport.Receiver(manifest, passed.pop()))


def _in_progress(update: WeightUpdate) -> ServiceError:
    announcement = update.announcement
    return ServiceError(
        Reason.UPDATE_IN_PROGRESS,
        f"update {announcement.update_id} of publisher {announcement.publisher.id!r} is "
        f"{update.phase.value}: commit or discard it first",
        metadata={"update_id": announcement.update_id},
    )

"""What a server serves: its weights, what served before, and how a commit replaces them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog
from rollwire.reasons import Reason
from rollwire.types import KvPolicy, WeightTag, weights_text

from rollwire_server.counters import CommitResult
from rollwire_server.engines.base import (
    ChangedWeightsError,
    EngineError,
    StagedUpdate,
    TornWeightsError,
)
from rollwire_server.errors import ServiceError, from_engine_error
from rollwire_server.state import StateChange

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import CommitStats, Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.update import UpdateAnnouncement, WeightUpdate

log = structlog.get_logger()

MAX_HISTORY = 64


@dataclass(eq=False)
class WeightState:
    """Life: construct → ``loaded`` → commits, one at a time."""

    _engine: Engine
    _state: StateMachine
    _sequences: Sequences
    _counters: ServerCounters
    # What served, newest first.
    history: deque[WeightTag] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
    committed_update_id: str = ""  # of what serves; "" for a checkpoint
    committed_at: float | None = None  # in Unix time; None for a checkpoint
    highest_version: int | None = None  # ever committed here
    _digests: dict[str, int] = field(default_factory=dict)  # of each tensor that serves
    _last_versioned: WeightTag | None = None

    @property
    def current(self) -> WeightTag:
        return self.history[0]

    async def loaded(self, weights: WeightTag) -> None:
        """The engine has loaded its initial checkpoint."""
        self._serve(weights)
        self._digests = await self._engine.digests()

    async def reloaded(self) -> None:
        """The engine holds its initial checkpoint again: old content under a new revision."""
        digests = await self._engine.digests()
        weights = self._next_tag(None, transport.sum_digests(digests.values()))
        async with self._state.held_for_commit():
            await self._engine.commit(StagedUpdate({}, {}), weights, max_kv_lag=0)
            self._digests = digests
            self.committed_update_id, self.committed_at = "", None
            self._serve(weights)

    async def verify(self) -> bool:
        """Whether the memory still holds what was committed."""
        while True:
            committed = self._digests
            try:
                digests = await self._engine.digests()
            except ChangedWeightsError:
                return False
            except EngineError as error:
                raise from_engine_error(
                    error, "it is not known whether the serving weights are intact"
                ) from error
            if committed is self._digests:  # else there was a commit meanwhile
                return digests == committed

    @property
    def digests(self) -> Mapping[str, int]:
        """Of each tensor that serves, aliases left out."""
        return self._digests

    def check_base(self, manifest: transport.Manifest) -> None:
        """Raises ServiceError if a delta builds on other weights; it fits the schema."""
        if manifest.encoding is not transport.Encoding.DELTA:
            return
        names = (spec.name for spec in manifest.tensors if spec.alias_of is None)
        digest = transport.sum_digests(self._digests[name] for name in names)
        if digest != manifest.base_digest:
            raise ServiceError(
                Reason.BASE_MISMATCH,
                f"the delta builds on tensors of digest {manifest.base_digest:016x}, and here they "
                f"have {digest:016x}: publish in full encoding; the server serves "
                f"{weights_text(self.current)}",
                field="manifest.base_digest",
            )

    def check_version(self, announcement: UpdateAnnouncement) -> None:
        version, last = announcement.version, self._last_versioned
        if version is None or last is None or last.version is None:
            return
        if version < last.version and not announcement.allow_version_rollback:
            raise ServiceError(
                Reason.VERSION_NOT_NEWER,
                f"version {version} is below {last.version}, which was committed: publish a "
                "higher one, or allow_version_rollback",
                metadata={"version": str(last.version)},
            )

    async def commit(self, update: WeightUpdate, max_kv_lag: int | None) -> CommitResult:
        """A failure is logged before it is raised, since its caller may have gone away."""
        announcement, now = update.announcement, self.current
        digests = {**self._digests, **update.digests}
        digest = transport.sum_digests(digests.values())
        try:
            # Another update may have been committed meanwhile.
            self.check_base(announcement.manifest)
            self.check_version(announcement)
            self._check_conflict(announcement, digest)
        except ServiceError as error:
            _log_failure(update, error)
            raise
        same = announcement.version == now.version and digest == now.digest
        if same and self._state.current.ready:
            result = CommitResult(now, receive_ns=update.receive_ns, already_current=True)
            log.info(
                "already current",
                **update.log_fields,
                revision=now.revision,
                digest=f"{digest:016x}",
            )
        else:
            result = await self._replace(update, digests, max_kv_lag)
        self.committed_update_id, self.committed_at = announcement.update_id, time.time()
        return result

    def _check_conflict(self, announcement: UpdateAnnouncement, digest: int) -> None:
        last = self._last_versioned
        if last is None or announcement.version != last.version or digest == last.digest:
            return
        if announcement.allow_version_rollback:  # the trainer went back and reached it again
            return
        raise ServiceError(
            Reason.VERSION_CONFLICT,
            f"version {last.version} was committed with other content (digest "
            f"{last.digest:016x}, this update has {digest:016x}): publish a higher one, or "
            "allow_version_rollback",
        )

    async def _replace(
        self, update: WeightUpdate, digests: dict[str, int], max_kv_lag: int | None
    ) -> CommitResult:
        version = update.announcement.version
        weights = self._next_tag(version, transport.sum_digests(digests.values()))
        async with self._state.held_for_commit():
            held_at = time.monotonic_ns()
            held = self._sequences.live
            await self._sequences.interrupt_out_of_bounds(version)
            stats = await self._commit_engine(update, weights, max_kv_lag)
            self._digests = digests
            if version is not None:
                self._last_versioned = weights
                self.highest_version = max(version, self.highest_version or 0)
            self._state.apply(StateChange.COMMITTED)
            self._serve(weights)
            await self._sequences.interrupt_out_of_bounds(version)
        result = CommitResult(
            weights=weights,
            receive_ns=update.receive_ns,
            apply_ns=stats.apply_ns,
            paused_ns=time.monotonic_ns() - held_at,
            held_sequences=held,
            kv_tokens_to_recompute=stats.kv_tokens_to_recompute,
        )
        log.info(
            "committed",
            **update.log_fields,
            revision=weights.revision,
            digest=f"{weights.digest:016x}",
            encoding=update.announcement.manifest.encoding.value,
            received_bytes=update.receiver.received_bytes,
            held_sequences=held,
            kv_policy=(KvPolicy.RECOMPUTE if max_kv_lag == 0 else KvPolicy.KEEP).value,
            max_kv_lag=max_kv_lag,
            kv_tokens_to_recompute=result.kv_tokens_to_recompute,
            apply_ms=round(result.apply_ns / 1e6, 1),
            paused_ms=round(result.paused_ns / 1e6, 1),
        )
        for on_commit in self._counters.on_commit:
            on_commit(result)
        return result

    async def _commit_engine(
        self, update: WeightUpdate, weights: WeightTag, max_kv_lag: int | None
    ) -> CommitStats:
        staged = StagedUpdate(update.staged, update.digests, update.delta)
        try:
            return await self._engine.commit(staged, weights, max_kv_lag)
        except TornWeightsError as error:
            raise await self._quarantine(update, error) from error
        except EngineError as error:
            failure = ServiceError(
                Reason.COMMIT_FAILED,
                f"{error}; nothing was changed, the server holds {weights_text(self.current)}",
            )
            _log_failure(update, failure)
            raise failure from error
        except Exception as error:
            # Nothing is known of how far it came, so the weights count as torn.
            log.exception("a bug: the commit failed")
            raise await self._quarantine(update, error) from error

    async def _quarantine(self, update: WeightUpdate, error: Exception) -> ServiceError:
        failure = ServiceError(
            Reason.QUARANTINED,
            f"the commit failed half way ({error}): the server serves nothing until a full update "
            "is committed",
        )
        _log_failure(update, failure)
        self._state.apply(StateChange.COMMIT_TORN)
        await self._sequences.interrupt_all(f"a commit failed half way: {error}")
        return failure

    def _next_tag(self, version: int | None, digest: int) -> WeightTag:
        return WeightTag(version, self.current.revision + 1, self.current.server_id, digest)

    def _serve(self, weights: WeightTag) -> None:
        self.history.appendleft(weights)
        self._sequences.weights_committed(weights)


def _log_failure(update: WeightUpdate, failure: ServiceError) -> None:
    log.error("commit failed", **update.log_fields, reason=failure.reason.name, why=failure.message)

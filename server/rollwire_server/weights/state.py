"""The weights that serve: which they are, what came before, and how a commit changes them."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog
from rollwire.reasons import Reason
from rollwire.types import KvPolicy, ServerState, WeightTag

from rollwire_server.engines.base import (
    ChangedWeightsError,
    EngineError,
    StagedUpdate,
    TornWeightsError,
)
from rollwire_server.errors import ServiceError, from_engine_error
from rollwire_server.weights.update import Commit, named, told

if TYPE_CHECKING:
    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Applied, Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.update import Announcement, Update

log = structlog.get_logger()

TAGS_REMEMBERED = 64


class ServedWeights:
    """The weights of one server.

    Life: construct → ``loaded`` → commits, one at a time.

    Args:
        engine: Holds them.
        state: Holds for a commit.
        sequences: Learn of each.
        counters: Tells who watches.

    Attributes:
        history: What served, newest first.
        committed_update_id: What brought the ones that serve now; "" for a checkpoint.
        committed_at: When their publisher was last told so, in Unix time; None for a checkpoint.
        highest_version: Ever committed here, rolled back or not; None if no commit had a version.
    """

    def __init__(
        self, engine: Engine, state: StateMachine, sequences: Sequences, counters: ServerCounters
    ) -> None:
        self._engine = engine
        self._state = state
        self._sequences = sequences
        self._counters = counters
        self.history: deque[WeightTag] = deque(maxlen=TAGS_REMEMBERED)
        self.committed_update_id = ""
        self.committed_at: float | None = None
        self._digests: dict[str, int] = {}
        self._last: WeightTag | None = None  # of the commits with a version
        self.highest_version: int | None = None

    @property
    def weights(self) -> WeightTag:
        """What serves now."""
        return self.history[0]

    async def loaded(self, weights: WeightTag) -> None:
        """Learns the initial checkpoint."""
        self.history.appendleft(weights)
        self._digests = await self._engine.digests()
        self._sequences.weights_committed(weights)

    async def reloaded(self) -> None:
        """The engine holds its first checkpoint again: the same content under a new revision."""
        digests = await self._engine.digests()
        digest = transport.sum_digests(digests.values())
        weights = WeightTag(None, self.weights.revision + 1, self.weights.server_id, digest)
        async with self._state.held_for_commit():
            await self._engine.commit(StagedUpdate({}, {}), weights, KvPolicy.RECOMPUTE)
            self._digests = digests
            self.committed_update_id, self.committed_at = "", None
            self.history.appendleft(weights)
            self._sequences.weights_committed(weights)

    async def intact(self) -> bool:
        """Whether the memory still holds what was committed; raises ServiceError when the engine
        cannot tell.
        """
        while True:
            committed = self._digests
            try:
                digests = await self._engine.digests()
            except ChangedWeightsError:
                return False
            except EngineError as error:
                raise from_engine_error(error, "so nothing is known of what serves") from error
            if committed is self._digests:  # else a commit came between
                return digests == committed

    def check_version(self, announcement: Announcement) -> None:
        """Raises ServiceError when an update is below what was committed."""
        version, last = announcement.version, self._last
        if version is None or last is None or last.version is None:
            return
        if version < last.version and not announcement.allow_version_rollback:
            raise ServiceError(
                Reason.VERSION_NOT_NEWER,
                f"version {version} is below {last.version}, which was committed: publish a "
                "higher one, or allow_version_rollback",
                metadata={"version": str(last.version)},
            )

    async def commit(self, update: Update, policy: KvPolicy) -> Commit:
        """Makes a staged update the weights that serve.

        Raises ServiceError when that fails; the log says so first, as nobody may wait for it.
        """
        announcement, now = update.announcement, self.weights
        digests = {**self._digests, **update.receiver.digests}
        digest = transport.sum_digests(digests.values())
        try:
            self.check_version(announcement)  # another may have been committed meanwhile
            self._check_conflict(announcement, digest)
        except ServiceError as error:
            _say_failed(update, error)
            raise
        same = announcement.version == now.version and digest == now.digest
        if same and self._state.current in (ServerState.SERVING, ServerState.PAUSED):
            commit = Commit(now, receive_ns=update.receive_ns, already_current=True)
            log.info(
                "already current", **named(update), revision=now.revision, digest=f"{digest:016x}"
            )
        else:
            commit = await self._apply(update, digests, policy)
        self.committed_update_id, self.committed_at = announcement.update_id, time.time()
        return commit

    def _check_conflict(self, announcement: Announcement, digest: int) -> None:
        last = self._last
        if last is None or announcement.version != last.version or digest == last.digest:
            return
        if announcement.allow_version_rollback:  # the trainer went back, and comes to it again
            return
        raise ServiceError(
            Reason.VERSION_CONFLICT,
            f"version {last.version} was committed with other content (digest "
            f"{last.digest:016x}, this update has {digest:016x}): publish a higher one, or "
            "allow_version_rollback",
        )

    async def _apply(self, update: Update, digests: dict[str, int], policy: KvPolicy) -> Commit:
        version, digest = update.announcement.version, transport.sum_digests(digests.values())
        weights = WeightTag(version, self.weights.revision + 1, self.weights.server_id, digest)
        async with self._state.held_for_commit():
            held_at = time.monotonic_ns()
            held = self._sequences.live
            await self._sequences.interrupt_out_of_bounds(version)
            applied = await self._put_in_place(update, weights, policy)
            self._digests = digests
            if version is not None:
                self._last = weights
                self.highest_version = max(version, self.highest_version or 0)
            self.history.appendleft(weights)
            self._state.enter(ServerState.SERVING, "commit")
            self._sequences.weights_committed(weights)
            await self._sequences.interrupt_out_of_bounds(version)
        paused_ns = time.monotonic_ns() - held_at
        log.info(
            "committed",
            **named(update),
            revision=weights.revision,
            digest=f"{digest:016x}",
            held_sequences=held,
            kv_policy=policy.value,
            kv_tokens_to_recompute=applied.kv_tokens_to_recompute,
            apply_ms=round(applied.apply_ns / 1e6, 1),
            paused_ms=round(paused_ns / 1e6, 1),
        )
        commit = Commit(
            weights=weights,
            receive_ns=update.receive_ns,
            apply_ns=applied.apply_ns,
            paused_ns=paused_ns,
            held_sequences=held,
            kv_tokens_to_recompute=applied.kv_tokens_to_recompute,
        )
        for told_of in self._counters.on_commit:
            told_of(commit)
        return commit

    async def _put_in_place(self, update: Update, weights: WeightTag, policy: KvPolicy) -> Applied:
        try:
            staged = StagedUpdate(update.staged, update.receiver.digests)
            return await self._engine.commit(staged, weights, policy)
        except TornWeightsError as error:
            raise await self._quarantine(update, error) from error
        except EngineError as error:
            failure = ServiceError(
                Reason.COMMIT_FAILED,
                f"{error}; nothing was changed, the server holds {told(self.weights)}",
            )
            _say_failed(update, failure)
            raise failure from error
        except Exception as error:
            log.exception("a bug: the commit failed")
            raise await self._quarantine(update, error) from error

    async def _quarantine(self, update: Update, error: Exception) -> ServiceError:
        failure = ServiceError(
            Reason.QUARANTINED,
            f"the commit failed half way ({error}): the server serves nothing until a full update "
            "is committed",
        )
        _say_failed(update, failure)
        self._state.enter(ServerState.QUARANTINED, "commit failed half way")
        await self._sequences.interrupt_all(f"a commit failed half way: {error}")
        return failure


def _say_failed(update: Update, failure: ServiceError) -> None:
    log.error("commit failed", **named(update), reason=failure.reason.name, why=failure.message)

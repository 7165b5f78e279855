"""The weight state of one server: updates announced, received, verified, committed or discarded.

One update at a time. Nothing that serves is touched before its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import rollwire_transport as transport
import structlog

from rollwire_server.engines.base import EngineError, KvPolicy, TornWeightsError, WeightTag
from rollwire_server.errors import Reason, ServiceError
from rollwire_server.lifecycle import Event, Rpc, State
from rollwire_server.outcomes import outcome, result
from rollwire_server.update import (
    WAITING,
    Commit,
    Phase,
    Update,
    check_membership,
    in_progress,
    picks_up,
    told,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire_server.counts import Counts
    from rollwire_server.engines.base import Applied, Engine
    from rollwire_server.lifecycle import Lifecycle
    from rollwire_server.rollouts import Rollouts
    from rollwire_server.update import Announcement, Membership, Progress, Publisher

log = structlog.get_logger()

COMMITS_REMEMBERED = 64
REPORT_SECONDS = 0.25  # the API promises a message every 500 ms


class Updates:
    """The weight state of one server.

    Life: construct → ``loaded`` → RPCs, with ``tasks`` (owned by the server) alive → ``drop``.

    Args:
        engine: Holds the weights.
        lifecycle: Is asked before each step, holds for the commit.
        rollouts: Learn of each commit.
        counts: Are kept up to date.
        tasks: Owns receiving and committing.
        frozen: Takes no updates.
        bucket_timeout: Seconds that a member waits for the next bucket.
    """

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        rollouts: Rollouts,
        counts: Counts,
        tasks: asyncio.TaskGroup,
        *,
        frozen: bool,
        bucket_timeout: float,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._rollouts = rollouts
        self._counts = counts
        self._tasks = tasks
        self._bucket_timeout = bucket_timeout
        self._admission = asyncio.Lock()
        self.frozen = frozen
        self.update: Update | None = None
        self.publisher: Publisher | None = None
        self.committed_update_id = ""
        self.history: deque[WeightTag] = deque(maxlen=COMMITS_REMEMBERED)
        self._commits: OrderedDict[str, Commit] = OrderedDict()
        self._digests: dict[str, int] = {}
        self._highest: WeightTag | None = None  # of the versions; after a rollback: since then

    @property
    def weights(self) -> WeightTag:
        """What serves now."""
        return self.history[0]

    async def loaded(self, weights: WeightTag) -> None:
        """Learns the initial checkpoint."""
        self.history.appendleft(weights)
        self._digests = await self._engine.digests()
        self._rollouts.committed(weights)

    async def reloaded(self) -> None:
        """The engine holds its first checkpoint again: the same content under a new revision."""
        digests = await self._engine.digests()
        digest = transport.sum_digests(digests.values())
        weights = WeightTag(None, self.weights.revision + 1, self.weights.server_id, digest)
        async with self._lifecycle.committing():
            await self._engine.commit({}, weights, KvPolicy.RECOMPUTE)
            self._digests = digests
            self.committed_update_id = ""
            self.history.appendleft(weights)
            self._rollouts.committed(weights)

    async def drop(self, reason: Reason, why: str) -> None:
        """Drops what is under way; a commit that has begun goes through first."""
        while (update := self.update) is not None:
            if update.committing is not None:
                await asyncio.wait([update.committing])
            else:
                await self._drop(update, reason, why)

    # The steps of an update.

    def check_announcer(self, publisher: Publisher) -> None:
        """Raises ServiceError when whatever ``publisher`` announces is refused."""
        self._check(Rpc.UPDATE_WEIGHTS)
        self._check_publisher(publisher)

    async def announce(self, announcement: Announcement) -> AsyncGenerator[Progress, None]:
        """Announces an update and reports on it until it is staged, at least every 500 ms.

        Closing the iterator before that discards the update.
        """
        update = await self._admit(announcement)
        try:
            while True:
                update.changed.clear()
                progress = update.progress()
                yield progress
                if progress.phase is Phase.STAGED:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        await update.changed.wait()
                if update.failure is not None:
                    raise update.failure
        finally:
            if update.phase is not Phase.STAGED and self.update is update:
                self._drop_later(update, "its UpdateWeights call ended before it was staged")

    async def join(self, publisher: Publisher, update_id: str, membership: Membership,
                   timeout: float) -> None:  # fmt: skip
        """Joins the transport group of an announced update and starts to receive."""
        self._check(Rpc.JOIN_TRANSPORT)
        self._check_publisher(publisher)
        update = self._expect(update_id)
        if update.phase is Phase.STAGED:
            return
        check_membership(update, membership)
        if update.epoch != membership.epoch:
            update.end_lease()
            update.epoch = membership.epoch
            update.joining = self._tasks.create_task(
                outcome(self._join(update, membership, timeout)), name=f"join {update_id}"
            )
        if update.joining is not None:
            await result(update.joining)

    async def commit(
        self, publisher: Publisher, update_id: str, expected_digest: int, policy: KvPolicy
    ) -> Commit:
        """Makes a staged update the weights that serve; the same answer when asked again.

        Goes through once begun, whether or not the caller waits for it.
        """
        if (done := self._commits.get(update_id)) is not None:
            self._check_publisher(publisher)
            return done
        self._check(Rpc.COMMIT_WEIGHTS)
        self._check_publisher(publisher)
        update = self._expect(update_id)
        if update.committing is None:
            self._check_commit(update, expected_digest)
            update.committing = self._tasks.create_task(
                outcome(self._commit(update, policy)), name=f"commit {update_id}"
            )
        return await result(update.committing)

    async def discard(self, publisher: Publisher, update_id: str) -> None:
        """Drops an announced or staged update; what serves stays. Idempotent."""
        self._check(Rpc.DISCARD_UPDATE)
        self._check_publisher(publisher)
        update = self.update
        if update is None or update.announcement.update_id != update_id:
            return
        if update.committing is not None:
            await asyncio.wait([update.committing])
        else:
            await self._drop(update, Reason.NOT_STAGED, f"update {update_id} was discarded")

    async def intact(self) -> bool:
        """Whether the memory still holds what was committed."""
        while True:
            committed = self._digests
            try:
                digests = await self._engine.digests()
            except EngineError:  # the memory was given back
                return False
            if committed is self._digests:  # else a commit came between
                return digests == committed

    # Checks: nothing is touched by them.

    def _check(self, rpc: Rpc) -> None:
        self._lifecycle.check(rpc)
        if self.frozen:
            raise ServiceError(
                Reason.FROZEN,
                f"{rpc.value} is refused: the server was started with --frozen and keeps "
                f"{told(self.weights)}",
            )

    def _check_publisher(self, publisher: Publisher) -> None:
        known = self.publisher
        if known is None or publisher == known or publisher.term > known.term:
            return
        raise ServiceError(
            Reason.STALE_PUBLISHER,
            f"publisher {publisher.id!r} with term {publisher.term} is refused: "
            f"{known.id!r} with term {known.term} took over; a trainer that is to take over "
            "needs a higher term",
            metadata={"publisher_id": known.id, "term": str(known.term)},
        )

    def _check_announcement(self, announcement: Announcement) -> None:
        manifest = announcement.manifest
        if manifest.encoding is not transport.Encoding.FULL:
            raise ServiceError(
                Reason.UNSUPPORTED_ENCODING,
                "deltas are not supported: publish a full update",
                field="manifest.encoding",
            )
        self._check_version(announcement)
        if manifest.partial and self._lifecycle.state in (
            State.QUARANTINED,
            State.AWAITING_WEIGHTS,
        ):
            raise ServiceError(
                Reason.BASE_MISMATCH,
                f"a partial update cannot stand on what a server holds that is "
                f"{self._lifecycle.state.value}: publish a full one",
            )

    def _check_version(self, announcement: Announcement) -> None:
        version, highest = announcement.version, self._highest
        if version is None or highest is None or highest.version is None:
            return
        if version < highest.version and not announcement.allow_version_rollback:
            raise ServiceError(
                Reason.VERSION_NOT_NEWER,
                f"version {version} is below {highest.version}, which was committed: publish a "
                "higher one, or allow_version_rollback",
                metadata={"version": str(highest.version)},
            )

    def _check_manifest(self, manifest: transport.Manifest) -> None:
        try:
            transport.validate(manifest)
            transport.compare(manifest, self._engine.schema())
        except transport.ManifestError as error:
            raise ServiceError(Reason.MANIFEST_MISMATCH, str(error), field="manifest") from error

    def _check_commit(self, update: Update, expected_digest: int) -> None:
        update_id = update.announcement.update_id
        if update.phase is not Phase.STAGED:
            raise ServiceError(
                Reason.NOT_STAGED,
                f"update {update_id} is {update.phase.value}, not staged; the server serves "
                f"{told(self.weights)}",
            )
        if (digest := update.receiver.digest) != expected_digest:
            raise ServiceError(
                Reason.DIGEST_MISMATCH,
                f"update {update_id} has digest {digest:016x} here and {expected_digest:016x} at "
                f"the trainer: discard it and publish again; the server serves "
                f"{told(self.weights)}",
            )

    def _check_conflict(self, announcement: Announcement, digest: int) -> None:
        highest = self._highest
        if highest is None or announcement.version != highest.version or digest == highest.digest:
            return
        raise ServiceError(
            Reason.VERSION_CONFLICT,
            f"version {highest.version} was committed with other content (digest "
            f"{highest.digest:016x}, this update has {digest:016x}): publish a higher one",
        )

    def _expect(self, update_id: str) -> Update:
        if self.update is None or self.update.announcement.update_id != update_id:
            raise ServiceError(
                Reason.NOT_STAGED,
                f"no update {update_id} is under way (discarded, its lease over, or never "
                f"announced); the server serves {told(self.weights)}",
            )
        return self.update

    # What happens inside.

    async def _admit(self, announcement: Announcement) -> Update:
        async with self._admission:
            self.check_announcer(announcement.publisher)
            if announcement.update_id in self._commits:
                raise ServiceError(
                    Reason.BAD_REQUEST,
                    f"update {announcement.update_id} was committed: name each update anew",
                    field="update_id",
                )
            current = self.update
            if current is not None:
                if picks_up(announcement, current):
                    return current
                if announcement.publisher == self.publisher or current.committing is not None:
                    raise in_progress(current)
            self._check_announcement(announcement)
            await asyncio.to_thread(self._check_manifest, announcement.manifest)
            self._check(Rpc.UPDATE_WEIGHTS)
            self.publisher = announcement.publisher
            await self.drop(
                Reason.STALE_PUBLISHER, f"publisher {announcement.publisher.id!r} took over"
            )
            try:
                staged = await self._engine.stage(announcement.manifest)
            except EngineError as error:
                raise ServiceError(Reason.STAGING_FAILED, str(error)) from error
            self._check(Rpc.UPDATE_WEIGHTS)  # much may have happened meanwhile
            self._check_announcement(announcement)
            receiver = transport.Receiver(announcement.manifest, staged)
            update = self.update = Update(announcement, staged, receiver)
            self._move(update, Phase.READY)
            return update

    async def _join(self, update: Update, membership: Membership, timeout: float) -> None:
        await self._leave_group(update)
        _check_still_wanted(update, membership)
        update.left = threading.Event()
        try:
            link = await asyncio.to_thread(
                transport.join,
                membership.backend,
                epoch=membership.epoch,
                rank=membership.rank,
                world_size=membership.world_size,
                rendezvous=membership.rendezvous,
                timeout=timeout,
                device=self._engine.describe().device,
                closed=update.left,
            )
        except transport.TransportError as error:
            _check_still_wanted(update, membership)
            self._move(update, Phase.STALLED, str(error))
            late = isinstance(error, transport.TransportTimeout)
            raise ServiceError(
                Reason.TRANSPORT_TIMEOUT if late else Reason.TRANSPORT_FAILED,
                str(error),
                metadata={"peer": error.peer or ""},
            ) from error
        try:
            _check_still_wanted(update, membership)
        except ServiceError:
            await asyncio.to_thread(link.close)
            raise
        update.link = link
        self._move(update, Phase.RECEIVING)
        update.receiving = self._tasks.create_task(
            self._receive(update, link, membership.first_bucket),
            name=f"receive {update.announcement.update_id}",
        )

    async def _receive(self, update: Update, link: transport.Link, first_bucket: int) -> None:
        began, had = time.monotonic_ns(), update.receiver.received_bytes
        try:
            await asyncio.to_thread(
                update.receiver.receive,
                link,
                first_bucket=first_bucket,
                bucket_timeout=self._bucket_timeout,
            )
        except transport.DigestMismatch as error:
            update.failure = ServiceError(
                Reason.DIGEST_MISMATCH,
                f"{error}; the update is discarded, the server serves {told(self.weights)}",
            )
            self._move(update, Phase.STALLED, str(error))
        except transport.TransportError as error:
            if update.link is link:
                self._move(update, Phase.STALLED, str(error))
        except Exception as error:
            log.exception("a bug: receiving failed")
            self._move(update, Phase.STALLED, f"{type(error).__name__}: {error}")
        else:
            self._move(update, Phase.STAGED)
        finally:
            update.receive_ns += time.monotonic_ns() - began
            self._counts.received_bytes += update.receiver.received_bytes - had
            await asyncio.to_thread(link.close)

    def _move(self, update: Update, phase: Phase, detail: str = "") -> None:
        """Enters a phase; where it waits for its publisher, its lease begins."""
        update.end_lease()
        if phase in WAITING and update.failure is None:
            lease = update.announcement.stage_lease
            update.lease_ends = time.monotonic() + lease
            why = f"its publisher let its lease of {lease:g} s run out while it was {phase.value}"
            update.lease_timer = asyncio.get_running_loop().call_later(
                lease, self._drop_later, update, why
            )
        update.move(phase, detail)

    async def _commit(self, update: Update, policy: KvPolicy) -> Commit:
        update.end_lease()
        announcement, now = update.announcement, self.weights
        digests = {**self._digests, **update.receiver.digests}
        digest = transport.sum_digests(digests.values())
        try:
            self._check_version(announcement)  # another may have been committed meanwhile
            self._check_conflict(announcement, digest)
            same = announcement.version == now.version and digest == now.digest
            if same and self._lifecycle.state in (State.SERVING, State.PAUSED):
                commit = Commit(now, receive_ns=update.receive_ns, already_current=True)
            else:
                commit = await self._apply(update, digests, policy)
        finally:
            self.update = None
        self._counts.updates["already_current" if commit.already_current else "committed"] += 1
        self.committed_update_id = announcement.update_id
        self._commits[announcement.update_id] = commit
        if len(self._commits) > COMMITS_REMEMBERED:
            self._commits.popitem(last=False)
        return commit

    async def _apply(self, update: Update, digests: dict[str, int], policy: KvPolicy) -> Commit:
        version, digest = update.announcement.version, transport.sum_digests(digests.values())
        weights = WeightTag(version, self.weights.revision + 1, self.weights.server_id, digest)
        async with self._lifecycle.committing():
            held_at = time.monotonic_ns()
            held = self._rollouts.live
            await self._rollouts.keep_bounds(version)
            applied = await self._put_in_place(update, weights, policy)
            self._digests = digests
            if version is not None:
                self._highest = weights
            self.history.appendleft(weights)
            self._lifecycle.happened(Event.COMMITTED)
            self._rollouts.committed(weights)
            await self._rollouts.keep_bounds(version)
        paused_ns = time.monotonic_ns() - held_at
        log.info(
            "committed",
            version=version,
            revision=weights.revision,
            digest=f"{digest:016x}",
            held_sequences=held,
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
        for told_of in self._counts.on_commit:
            told_of(commit)
        return commit

    async def _put_in_place(self, update: Update, weights: WeightTag, policy: KvPolicy) -> Applied:
        try:
            return await self._engine.commit(update.staged, weights, policy)
        except EngineError as error:
            if isinstance(error, TornWeightsError):
                raise await self._quarantine(error) from error
            raise ServiceError(
                Reason.COMMIT_FAILED,
                f"{error}; nothing was changed, the server serves {told(self.weights)}",
            ) from error
        except Exception as error:
            log.exception("a bug: the commit failed")
            raise await self._quarantine(error) from error

    async def _quarantine(self, error: Exception) -> ServiceError:
        self._lifecycle.happened(Event.TORN)
        await self._rollouts.interrupt_all(f"a commit failed half way: {error}")
        return ServiceError(
            Reason.QUARANTINED,
            f"the commit failed half way ({error}): the server serves nothing until a full update "
            "is committed",
        )

    async def _leave_group(self, update: Update) -> None:
        """Ends the update's former group, if it had one."""
        update.left.set()
        link, receiving = update.link, update.receiving
        update.link = update.receiving = None
        if link is not None:
            link.abort()
            update.forwarded_bytes += link.forwarded_bytes
        if receiving is not None:
            await receiving

    def _drop_later(self, update: Update, why: str) -> None:
        if update.committing is None:
            update_id = update.announcement.update_id
            self._tasks.create_task(
                self._drop(update, Reason.NOT_STAGED, f"update {update_id} was discarded: {why}"),
                name=f"discard {update_id}",
            )

    async def _drop(self, update: Update, reason: Reason, why: str) -> None:
        if self.update is update:
            self.update = None
            self._counts.updates["discarded"] += 1
            log.info("update discarded", update_id=update.announcement.update_id, why=why)
        update.end_lease()
        if update.failure is None:
            update.failure = ServiceError(reason, why)
        update.changed.set()
        await self._leave_group(update)


def _check_still_wanted(update: Update, membership: Membership) -> None:
    """Raises ServiceError if an update was dropped, or joins another group by now."""
    if update.failure is not None:
        raise update.failure
    if update.epoch != membership.epoch:
        update_id = update.announcement.update_id
        raise ServiceError(Reason.NOT_STAGED, f"update {update_id} joins another group")

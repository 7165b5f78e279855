"""Weight updates of one server: announced, received, verified, committed or discarded.

One update at a time. Nothing that serves is touched before its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import structlog

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import Reason, ServiceError, of_engine
from rollwire_server.lifecycle import Rpc, State
from rollwire_server.logs import bind
from rollwire_server.outcomes import outcome, result
from rollwire_server.update import (
    WAITING,
    Commit,
    Outcome,
    Phase,
    Update,
    check_membership,
    in_progress,
    named,
    picks_up,
    told,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire_server.counts import Counts
    from rollwire_server.engines.base import Engine, KvPolicy, WeightTag
    from rollwire_server.lifecycle import Lifecycle
    from rollwire_server.served import ServedWeights
    from rollwire_server.update import Announcement, Membership, Progress, Publisher

log = structlog.get_logger()

COMMITS_REMEMBERED = 64
REPORT_SECONDS = 0.25  # the API promises a message every 500 ms


class Updates:
    """The weight updates of one server.

    Life: construct → RPCs, with ``tasks`` (owned by the server) alive → ``drop``.

    Args:
        engine: Gives the memory for an update.
        lifecycle: Is asked before each step.
        served: What a commit changes.
        counts: Are kept up to date.
        tasks: Owns receiving and committing.
        frozen: Takes no updates.
        bucket_timeout: Seconds that a member waits for the next bucket.
        listening: Where transfers may listen.
    """

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        served: ServedWeights,
        counts: Counts,
        tasks: asyncio.TaskGroup,
        *,
        frozen: bool,
        bucket_timeout: float,
        listening: transport.Listening,
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self.served = served
        self._counts = counts
        self._tasks = tasks
        self._bucket_timeout = bucket_timeout
        self.listening = listening
        self._admission = asyncio.Lock()
        self.frozen = frozen
        self.update: Update | None = None
        self.publisher: Publisher | None = None
        self.announced_version: int | None = None  # by the last update that was tagged
        self._commits: OrderedDict[str, Commit] = OrderedDict()
        self._verifying: asyncio.Task[bool | ServiceError] | None = None
        self._ending: set[asyncio.Task[Any]] = set()  # hold memory of updates that are no more

    @property
    def weights(self) -> WeightTag:
        """What serves now."""
        return self.served.weights

    async def drop(self, reason: Reason, why: str) -> None:
        """Drops what is under way; a commit that has begun goes through first. Returns when no
        memory of any update is held here.
        """
        while (update := self.update) is not None:
            if update.committing is not None:
                await asyncio.wait([update.committing])
            else:
                self._drop(update, reason, why)
        if self._ending:
            await asyncio.wait(self._ending)

    async def intact(self) -> bool:
        """Whether the memory still holds what was committed. Read once for all who ask meanwhile:
        it takes the engine's time.

        Raises ServiceError when the server sleeps, or the engine cannot tell.
        """
        self._lifecycle.check(Rpc.VERIFY)
        if self._verifying is None or self._verifying.done():
            self._verifying = self._tasks.create_task(outcome(self.served.intact()), name="verify")
        return await result(self._verifying)

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
                self._give_up(update, "its UpdateWeights call ended before it was staged")

    async def join(self, publisher: Publisher, update_id: str, membership: Membership,
                   timeout: float) -> None:  # fmt: skip
        """Joins the transport group of an announced update and starts to receive."""
        self._check(Rpc.JOIN_TRANSPORT)
        self._check_publisher(publisher)
        update = self._expect(update_id)
        if update.phase is Phase.STAGED:
            return
        check_membership(update, membership, self.listening)
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
            ending = self._drop(update, Reason.NOT_STAGED, f"update {update_id} was discarded")
            await asyncio.wait([ending])

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
        self.served.check_version(announcement)
        if manifest.partial and self._lifecycle.state in (
            State.QUARANTINED,
            State.AWAITING_WEIGHTS,
        ):
            raise ServiceError(
                Reason.BASE_MISMATCH,
                f"a partial update cannot stand on what a server holds that is "
                f"{self._lifecycle.state.value}: publish a full one",
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

    def _expect(self, update_id: str) -> Update:
        if self.update is None or self.update.announcement.update_id != update_id:
            raise ServiceError(
                Reason.NOT_STAGED,
                f"no update {update_id} is under way (discarded, its lease over, or never "
                f"announced); the server serves {told(self.weights)}",
            )
        bind(version=self.update.announcement.version)
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
            if announcement.version is not None:
                self.announced_version = announcement.version
            await asyncio.to_thread(self._check_manifest, announcement.manifest)
            self._check(Rpc.UPDATE_WEIGHTS)
            self.publisher = announcement.publisher
            await self.drop(
                Reason.STALE_PUBLISHER, f"publisher {announcement.publisher.id!r} took over"
            )
            # Whoever asked may go meanwhile; an engine's command is not left half way.
            staging = self._tasks.create_task(
                outcome(self._stage(announcement)), name=f"stage {announcement.update_id}"
            )
            self._ends(staging)
            update = await result(staging)
            try:
                self._check(Rpc.UPDATE_WEIGHTS)  # much may have happened meanwhile
                self._check_announcement(announcement)
            except ServiceError:
                update.let_go()
                raise
            self.update = update
            self._move(update, Phase.READY)
            return update

    async def _stage(self, announcement: Announcement) -> Update:
        manifest = announcement.manifest
        try:
            staged = await self._engine.stage(manifest)
        except EngineError as error:
            state = f"the server serves {told(self.weights)}"
            raise of_engine(error, state, no_memory=Reason.STAGING_FAILED) from error
        receiver = await asyncio.to_thread(transport.Receiver, manifest, staged)
        return Update(announcement, staged, receiver)

    async def _join(self, update: Update, membership: Membership, timeout: float) -> None:
        await self._leave_group(update)
        _check_still_wanted(update, membership)
        if update.phase is Phase.STAGED:  # by what was still under way in the former group
            return
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
                listening=self.listening,
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
            let_go = await asyncio.to_thread(link.close)
            self._counts.forwarded_bytes += link.forwarded_bytes
            if not (let_go or update.receiver.complete):
                self._give_up(update, "its former group may still write into what is staged")

    def _move(self, update: Update, phase: Phase, detail: str = "") -> None:
        """Enters a phase; where it waits for its publisher, its lease begins."""
        update.end_lease()
        if phase in WAITING and update.failure is None:
            lease = update.announcement.stage_lease
            update.lease_ends = time.monotonic() + lease
            why = f"its publisher let its lease of {lease:g} s run out while it was {phase.value}"
            update.lease_timer = asyncio.get_running_loop().call_later(
                lease, self._give_up, update, why
            )
        update.move(phase, detail)
        log.info(
            "update", **named(update), phase=phase.value, detail=detail,
            next_bucket=update.receiver.next_bucket,
        )  # fmt: skip

    async def _commit(self, update: Update, policy: KvPolicy) -> Commit:
        update.end_lease()
        ended = Outcome.FAILED
        try:
            commit = await self.served.commit(update, policy)
            ended = Outcome.ALREADY_CURRENT if commit.already_current else Outcome.COMMITTED
        finally:
            self._counts.updates[ended] += 1
            self.update = None
            update.let_go()
        self._commits[update.announcement.update_id] = commit
        if len(self._commits) > COMMITS_REMEMBERED:
            self._commits.popitem(last=False)
        return commit

    async def _leave_group(self, update: Update) -> None:
        """Ends the update's former group, if it had one."""
        update.left.set()
        link, update.link = update.link, None
        if link is not None:
            link.abort()
            update.forwarded_bytes += link.forwarded_bytes
        if update.receiving is not None:
            await update.receiving

    def _give_up(self, update: Update, why: str) -> None:
        if update.committing is None:
            update_id = update.announcement.update_id
            self._drop(update, Reason.NOT_STAGED, f"update {update_id} was discarded: {why}")

    def _drop(self, update: Update, reason: Reason, why: str) -> asyncio.Task[None]:
        """Whoever watches an update learns of its end at once; its memory is let go of when the
        task is done, which goes on when its waiter goes away.
        """
        if self.update is update:
            self.update = None
            self._counts.updates[Outcome.DISCARDED] += 1
            log.info("update discarded", **named(update), why=why)
        update.end_lease()
        if update.failure is None:
            update.failure = ServiceError(reason, why)
        update.changed.set()
        ending = self._tasks.create_task(
            self._end(update), name=f"end {update.announcement.update_id}"
        )
        self._ends(ending)
        return ending

    async def _end(self, update: Update) -> None:
        await self._leave_group(update)
        update.let_go()

    def _ends(self, task: asyncio.Task[Any]) -> None:
        """No update is staged before this is done: engines may have memory for one at a time."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _check_still_wanted(update: Update, membership: Membership) -> None:
    """Raises ServiceError if an update was dropped, or joins another group by now."""
    if update.failure is not None:
        raise update.failure
    if update.epoch != membership.epoch:
        update_id = update.announcement.update_id
        raise ServiceError(Reason.NOT_STAGED, f"update {update_id} joins another group")

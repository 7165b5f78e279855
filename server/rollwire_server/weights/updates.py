"""Weight updates of one server: announced, received, verified, committed or discarded.

One update at a time. Nothing that serves is touched before its commit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import structlog
from rollwire.patience import Timer
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase

from rollwire_server.background import outcome, result
from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, from_engine_error
from rollwire_server.logs import bind
from rollwire_server.state import Rpc
from rollwire_server.weights.receiving import Receiving
from rollwire_server.weights.update import WAITING, Commit, Outcome, Update, named, told
from rollwire_server.weights.validation import (
    check_commit,
    check_kind,
    check_manifest,
    check_membership,
    check_publisher,
    in_progress,
    picks_up,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire.types import KvPolicy, WeightTag

    from rollwire_server.counters import ServerCounters
    from rollwire_server.engines.base import Engine
    from rollwire_server.state import StateMachine
    from rollwire_server.weights.state import ServedWeights
    from rollwire_server.weights.update import Announcement, Membership, Progress, Publisher

log = structlog.get_logger()

COMMITS_REMEMBERED = 64
REPORT_SECONDS = 0.25  # the API promises a message every 500 ms


class Updates:
    """The weight updates of one server.

    Life: construct → RPCs, with ``tasks`` (owned by the server) alive → ``drop``.

    Args:
        engine: Gives the memory for an update.
        state: Is asked before each step.
        served: What a commit changes.
        counters: Are kept up to date.
        tasks: Owns receiving and committing.
        frozen: Takes no updates.
        bucket_timeout: Seconds that a member waits for the next bucket.
        listening: Where transfers may listen.
    """

    def __init__(
        self,
        engine: Engine,
        state: StateMachine,
        served: ServedWeights,
        counters: ServerCounters,
        tasks: asyncio.TaskGroup,
        *,
        frozen: bool,
        bucket_timeout: float,
        listening: transport.ListenOptions,
    ) -> None:
        self._engine = engine
        self._state = state
        self.served = served
        self._counters = counters
        self._tasks = tasks
        self.listening = listening
        self._receiving = Receiving(
            engine, served, counters, tasks,
            bucket_timeout=bucket_timeout, listening=listening,
            move=self._move, give_up=self._give_up,
        )  # fmt: skip
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
        self._state.check(Rpc.VERIFY)
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
                if progress.phase is UpdatePhase.STAGED:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(REPORT_SECONDS):
                        await update.changed.wait()
                if update.failure is not None:
                    raise update.failure
        finally:
            if update.phase is not UpdatePhase.STAGED and self.update is update:
                self._give_up(update, "its UpdateWeights call ended before it was staged")

    async def join(self, publisher: Publisher, update_id: str, membership: Membership,
                   timeout: float) -> None:  # fmt: skip
        """Joins the transport group of an announced update and starts to receive."""
        self._check(Rpc.JOIN_TRANSPORT)
        self._check_publisher(publisher)
        update = self._expect(update_id)
        if update.phase is UpdatePhase.STAGED:
            return
        check_membership(update, membership, self.listening)
        if update.epoch != membership.epoch:
            update.end_lease()
            update.epoch = membership.epoch
            update.joining = self._tasks.create_task(
                outcome(self._receiving.join(update, membership, timeout)), name=f"join {update_id}"
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
            check_commit(update, expected_digest, self.weights)
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
        self._state.check(rpc)
        if self.frozen:
            raise ServiceError(
                Reason.FROZEN,
                f"{rpc.value} is refused: the server was started with --frozen and keeps "
                f"{told(self.weights)}",
            )

    def _check_publisher(self, publisher: Publisher) -> None:
        check_publisher(publisher, self.publisher)

    def _check_announcement(self, announcement: Announcement) -> None:
        check_kind(announcement.manifest, self._state.current)
        self.served.check_version(announcement)

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
            schema = self._engine.schema()
            await asyncio.to_thread(check_manifest, announcement.manifest, schema)
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
            self._move(update, UpdatePhase.READY)
            return update

    async def _stage(self, announcement: Announcement) -> Update:
        manifest = announcement.manifest
        try:
            staged = await self._engine.stage(manifest)
        except EngineError as error:
            state = f"the server holds {told(self.weights)}"
            raise from_engine_error(error, state, no_memory=Reason.STAGING_FAILED) from error
        receiver = await asyncio.to_thread(transport.Receiver, manifest, staged)
        return Update(announcement, staged, receiver)

    def _move(self, update: Update, phase: UpdatePhase, detail: str = "") -> None:
        """Enters a phase; where it waits for its publisher, its lease begins."""
        update.end_lease()
        if phase in WAITING and update.failure is None:
            lease = update.announcement.stage_lease
            why = f"its publisher let its lease of {lease:g} s run out while it was {phase.value}"
            update.lease = Timer(lease, self._give_up, update, why)
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
            self._counters.updates[ended] += 1
            self.update = None
            update.let_go()
        self._commits[update.announcement.update_id] = commit
        if len(self._commits) > COMMITS_REMEMBERED:
            self._commits.popitem(last=False)
        return commit

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
            self._counters.updates[Outcome.DISCARDED] += 1
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
        await self._receiving.leave(update)
        update.let_go()

    def _ends(self, task: asyncio.Task[Any]) -> None:
        """No update is staged before this is done: engines may have memory for one at a time."""
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

"""One server of a fleet: whether it can serve, and how busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rollwire.types import ServerState, SleepingWeights, WeightTag, version_text

from rollwire_client._errors import RollwireError, ServerNotReadyError, ServerUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rollwire.v1 import rollout_pb2

    from rollwire_client._data import Asleep, Pause, Resumed, ServerInfo
    from rollwire_client._fleet.policy import Policy
    from rollwire_client._rpc.client import RolloutClient
    from rollwire_client._rpc.rollout_stream import Attempt
    from rollwire_client._trajectory import TrajectoryBuilder

logger = logging.getLogger(__name__)

_CURABLE = {ServerState.AWAITING_WEIGHTS, ServerState.QUARANTINED}  # by a full update


class ServerStatus(enum.Enum):
    """Where a server is in its life with a fleet. Only a ready server gets sequences."""

    JOINING = "joining"  # its address is in the list; it has not answered yet
    READY = "ready"
    BEHIND = "behind"  # serves other weights than the fleet's policy: it missed a publish
    NOT_SERVING = "not serving"  # answers: it starts, awaits weights, sleeps, drains, …
    SUSPECT = "suspect"  # a sequence failed there, or it did not answer: it is probed again
    LEAVING = "leaving"  # its address is not in the list any more; it keeps its sequences
    GONE = "gone"  # its channel is closed; the same address gets a new handle


class ServerHandle:
    """A server of a fleet, probed every so often. It takes sequences while ``problem`` is None."""

    def __init__(
        self,
        client: RolloutClient,
        *,
        on_change: Callable[[], None],
        on_identity: Callable[[], None],
        policy: Policy,
        fresh_seconds: float,
    ) -> None:
        self.client = client
        self.address = client.address
        self.status = ServerStatus.JOINING
        self.info: ServerInfo | None = None  # what it said last
        self.problem: RollwireError | None = self._not_ready("has not answered yet")
        self.full_until = 0.0  # its queue was full: when to try again, on the event loop's clock
        self.answers = False  # the last probe
        self.attempts = 0  # sequences of this fleet that it has
        self._idle = asyncio.Event()  # it has none
        self._idle.set()
        self._asleep = False  # at this fleet's request, as far as is known
        self._falling_asleep = False  # it gets no sequences, whatever a probe says
        self._sleep_lock = asyncio.Lock()  # one sleep or wake-up at a time
        self._sleep_changes = 0  # how many sleeps and wake-ups have ended
        self._on_change = on_change  # called whenever it is ready, and when what it says changes
        self._on_identity = on_identity  # called when another process answers, or none
        self._policy = policy
        # What it said when a sequence failed there, since it was ready.
        self._last_message = ""
        # The weights that it was known to have, and the version below which it refused a sequence.
        self._refused: tuple[WeightTag | None, int] | None = None
        self._fresh_seconds = fresh_seconds  # a start after more silence has it probed
        self._clock = asyncio.get_running_loop().time
        self._probed_at = -math.inf  # inf while a probe is under way
        self._starting_tokens = 0
        self._tasks: list[asyncio.Task[Any]] = []  # while it leaves: these still need it
        self._probe_now = asyncio.Event()

    @property
    def server_id(self) -> str:
        """Of the process that answered last; "" before that."""
        return self.info.server_id if self.info is not None else ""

    @property
    def weights(self) -> WeightTag | None:
        """Those that it is known to serve."""
        return self.info.weights if self.info is not None else None

    @property
    def version(self) -> int | None:
        return self.info.weights.version if self.info is not None else None

    @property
    def outstanding_tokens(self) -> int:
        return self.client.outstanding_tokens + self._starting_tokens

    @property
    def paused(self) -> bool:
        """Whether the sequences that it has wait for a resume, also while it drains."""
        if self.info is None:
            return False
        draining = self.info.state is ServerState.DRAINING
        return self.info.state is ServerState.PAUSED or (draining and bool(self.info.pauses))

    @property
    def asleep(self) -> bool:
        """Whether it sleeps, or is about to, because this fleet has asked it to."""
        return self._asleep and self.status is ServerStatus.NOT_SERVING

    def pause_text(self) -> str:
        pauses = self.info.pauses if self.info is not None else ()
        return "is paused" + (f" by {', '.join(map(str, pauses))}" if pauses else "")

    def is_newer_than(self, version: int) -> bool:
        if self._refused is not None:
            weights, refused = self._refused
            if refused >= version and weights == self.weights:
                return True
        return self.version is not None and self.version > version

    def can_serve(self, max_version: int) -> bool:
        """Whether it can ever serve ``max_version`` or an older one. Its version never decreases,
        and a server that recovers is updated to the fleet's policy.
        """
        if self.info is None:
            return self.status is ServerStatus.JOINING
        if (policy := self._policy.current) is not None:
            return policy.version is None or policy.version <= max_version
        return not self.is_newer_than(max_version) and self.info.state not in _CURABLE

    def min_version(self, after: WeightTag | None) -> int | None:
        """The oldest version under which a sequence may continue here whose last token ``after``
        sampled: none that was committed before that. None: any.
        """
        if after is None or self._policy.current is not None:
            return self._policy.min_version(after) if after is not None else None
        if (info := self.info) is None or after.version is None:
            return after.version
        serves, highest = info.weights.version, info.highest_version
        if serves is None or highest is None or not serves < after.version <= highest:
            return after.version
        return serves  # it was rolled back from there

    def is_behind(self, info: ServerInfo) -> bool:
        """Whether a server with this info needs the fleet's policy to serve."""
        if self._policy.current is None or not info.accepts_updates:
            return False
        if info.state in _CURABLE:
            return True
        return info.state.ready and not self._policy.accepts(info.weights)

    async def start(
        self, request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder
    ) -> Attempt:
        """Starts an attempt at a sequence, which appends to ``output``; ``end`` ends it."""
        if self._clock() - max(self._probed_at, self.client.last_message_at) > self._fresh_seconds:
            self._probe_now.set()
        context = self.info.context_length if self.info is not None else 0
        tokens = request.sampling.max_new_tokens or context
        self._starting_tokens += tokens
        self.attempts += 1
        self._idle.clear()
        try:
            return await self.client.start(request, output)
        except BaseException:
            self.end(None)
            raise
        finally:
            self._starting_tokens -= tokens

    def end(self, attempt: Attempt | None) -> None:
        if attempt is not None:
            attempt.close()
        self.attempts -= 1
        if not self.attempts:
            self._idle.set()
        self._look_whether_unused()

    async def sleep(
        self, weights: SleepingWeights, *, finish_within: float, timeout: float
    ) -> Asleep:
        """See ``Fleet.sleep``. It gets no sequences from now on, unless the server stays awake."""
        async with self._sleep_lock:
            self._asleep = self._falling_asleep = True
            self._set_status(ServerStatus.NOT_SERVING, self._not_ready("is about to sleep"))
            try:
                await self._finish(finish_within)
                return await self.client.sleep(weights, timeout=timeout)
            finally:
                self._falling_asleep = False
                self._sleep_changes += 1
                self._probe_now.set()  # what it says counts, also where no answer came

    async def _finish(self, seconds: float) -> None:
        if not (seconds and self.attempts):
            return
        logger.info(
            "%s: sleeps once its sequences (%d) have ended, in %g s at the latest",
            self.address, self.attempts, seconds,
        )  # fmt: skip
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    async def wake_up(self, *, reload_checkpoint: bool, timeout: float) -> ServerInfo:
        """See ``Fleet.wake_up``. If the server serves then, it gets sequences at once."""
        async with self._sleep_lock:
            try:
                info = await self.client.wake_up(
                    reload_checkpoint=reload_checkpoint, timeout=timeout
                )
            except BaseException:
                self._probe_now.set()
                raise
            self._sleep_changes += 1
            await self.probe()
            return info

    async def pause(self, pause_id: str, lease: float | None) -> Pause:
        try:
            return await self.client.pause(pause_id, lease=lease)
        finally:
            self._probe_now.set()

    async def resume(self, pause_id: str) -> Resumed:
        try:
            return await self.client.resume(pause_id)
        finally:
            self._probe_now.set()

    def suspect(self, error: RollwireError) -> None:
        """A sequence failed here: the server gets none until it has answered a probe."""
        if not (self._last_message or isinstance(error, ServerUnreachableError)):
            self._last_message = str(error).removeprefix(f"{self.address}: ")
        self._set_status(ServerStatus.SUSPECT, error)
        self._probe_now.set()

    def refused_as_too_new(self, max_version: int) -> None:
        """Its weights are newer, or will be, than those that it is known to serve."""
        self._refused = (self.weights, max_version)

    def committed(self, weights: WeightTag) -> None:
        if self.info is not None and self.info.server_id == weights.server_id:
            self.info = replace(self.info, weights=weights)
        else:
            self._probe_now.set()

    def policy_changed(self) -> None:
        if self.info is not None and self.status in {ServerStatus.READY, ServerStatus.BEHIND}:
            self._set_status(*self._assess(self.info))
        if self.problem is not None:  # else it is known what it serves: it has committed it
            self._probe_now.set()

    def rejoin(self) -> None:
        self._set_status(ServerStatus.JOINING, self._not_ready("has not answered yet"))
        self._tasks = []
        self._probe_now.set()

    def leave(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """It goes once its sequences and ``tasks`` have ended."""
        self._set_status(ServerStatus.LEAVING, self._not_ready("left the fleet"))
        self._tasks = list(tasks)
        for task in self._tasks:
            task.add_done_callback(lambda _: self._look_whether_unused())
        self._probe_now.set()

    async def run(self, interval: Callable[[], float]) -> None:
        """Probes the server every ``interval()`` seconds, and at once where there is a reason,
        until it has left.
        """
        while True:
            self._probe_now.clear()
            if self.status is not ServerStatus.LEAVING:
                await self.probe()
            elif not self.attempts and all(task.done() for task in self._tasks):
                self._set_status(ServerStatus.GONE, self._not_ready("left the fleet"))
                await self.client.close()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval()):
                    await self._probe_now.wait()

    async def probe(self) -> ServerInfo | None:
        """Asks the server for its info; None if it does not answer."""
        self._probe_now.clear()
        self._probed_at = math.inf
        changes = self._sleep_changes
        try:
            info = await self.client.info(timeout=self.client.timeouts.probe)
        except RollwireError as error:
            if self.answers:
                self.answers = False
                self._on_identity()
            self._set_status(ServerStatus.SUSPECT, error)
            return None
        finally:
            self._probed_at = self._clock()
        before = self.info
        if (
            before is not None
            and before.weights.server_id == info.weights.server_id
            and before.weights.revision > info.weights.revision
        ):  # a commit overtook the answer
            info = replace(info, weights=before.weights)
        self.info = info
        restarted = before is not None and before.server_id != info.server_id
        if not self.answers or before is None or restarted:
            self.answers = True
            self._on_identity()
        self._policy.observed(info.weights)
        if before is None or (before.state, before.weights) != (info.state, info.weights):
            self._on_change()
        # Else it is probed again at once, or the answer is older than a sleep or wake-up.
        if (
            not self._probe_now.is_set()
            and not self._falling_asleep
            and changes == self._sleep_changes
        ):
            if info.state is not ServerState.SLEEPING or restarted:
                self._asleep = False
            self._set_status(*self._assess(self.info))
        return info

    def _look_whether_unused(self) -> None:
        if self.status is ServerStatus.LEAVING:
            self._probe_now.set()

    def _set_status(self, status: ServerStatus, problem: RollwireError | None) -> None:
        before, slept = self.status, self.asleep
        if before is ServerStatus.GONE or (
            # Only the list of addresses brings it back, whatever it answers meanwhile.
            before is ServerStatus.LEAVING
            and status not in {ServerStatus.JOINING, ServerStatus.GONE}
        ):
            return
        if status is not before:
            # A server that is lost to rollouts is news, and so is its return.
            is_news = {status, before} == {ServerStatus.READY, ServerStatus.SUSPECT}
            logger.log(
                logging.WARNING if is_news else logging.INFO,
                "%s: %s, was %s%s",
                self.address, status.value, before.value, f": {problem}" if problem else "",
            )  # fmt: skip
        self.status = status
        if status in {ServerStatus.READY, ServerStatus.BEHIND}:
            self._last_message = ""
        elif problem is not None and self._last_message not in str(problem):
            message = f"{problem}; it had said: {self._last_message}"
            problem = type(problem)(message, server=self.address)
        self.problem = problem
        if problem is None or self.asleep is not slept:
            self._on_change()

    def _assess(self, info: ServerInfo) -> tuple[ServerStatus, RollwireError | None]:
        if not info.state.ready:
            return ServerStatus.NOT_SERVING, self._not_ready(f"is {info.state.value}")
        policy = self._policy.current
        if policy is None or self._policy.accepts(info.weights):
            return ServerStatus.READY, None
        serves, published = version_text(info.weights.version), version_text(policy.version)
        if serves == published:
            serves, published = (
                f"{serves} of digest {tag.digest:016x}" for tag in (info.weights, policy)
            )
        cure = "the next publish or catch_up() updates it"
        if self._policy.next_publish_is_refused_by(info.weights):
            cure = f"catch_up() or a publish above version {self.version} updates it"
        return ServerStatus.BEHIND, self._not_ready(
            f"serves {serves}, not {published}, which was published last here: {cure}"
        )

    def _not_ready(self, why: str) -> ServerNotReadyError:
        return ServerNotReadyError(f"{self.address}: {why}", server=self.address)

"""Which server gets a sequence, and what the log says while none can take it."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_client._errors import QueueFullError, UnavailableError, WeightVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire.v1 import rollout_pb2

    from rollwire_client._fleet.policy import Policy
    from rollwire_client._fleet.server_handle import ServerHandle
    from rollwire_client._trajectory import TrajectoryBuilder

logger = logging.getLogger(__name__)

# A session leaves its server once that has more outstanding tokens than twice those of the least
# busy one, and this many more. Leaving costs the prefix cache: the next server reads the
# conversation again, which takes about as long as a few thousand tokens of the others' decoding.
# Twice: else it would leave for a difference that its own next turn reverses.
STICK_TOKENS = 4096

_MAX_SESSIONS = 100_000  # remembered, the latest

LOG_INTERVAL = 0.25  # seconds
_MAX_REASONS = 100  # in a line
_LINGER = 2.0  # seconds; a rollout that is refused again within this has waited all the time


class WaitReason(enum.Enum):
    """What a rollout waits for: the seconds after which the log says so, and its two lines."""

    def __init__(self, grace: float, begun: str, over: str) -> None:
        self.grace = grace
        self.begun = begun
        self.over = over

    SERVER = (
        1.0,  # a publish may keep every server from being ready for a moment
        "rollouts wait (%d), as no server is ready: %s",
        "no rollout waits for a server any more, after %.0f s",
    )
    QUEUE = (
        5.0,
        "rollouts wait (%d), as no server has room for them: %s",
        "no rollout waits for room any more, after %.0f s",
    )
    WEIGHTS = (
        5.0,
        "rollouts wait (%d) for newer weights: %s",
        "no rollout waits for newer weights any more, after %.0f s",
    )
    RESUME = (
        5.0,
        "rollouts wait at paused servers (%d): %s; they continue once these are resumed",
        "no rollout waits at a paused server any more, after %.0f s",
    )
    WAKE_UP = (
        5.0,
        "rollouts wait (%d), as this fleet put its servers to sleep: %s; they continue after "
        "wake_up()",
        "no rollout waits for a server to wake up any more, after %.0f s",
    )


@dataclass(slots=True)
class _Wait:
    reason: WaitReason
    since: float  # on the event loop's clock, as the next ones
    give_up: float
    describe: Callable[[], str]
    ended: float = math.inf


class WaitLog:
    """Rollouts that wait. For each reason, the log warns when the first has waited for long and
    when the last waits no more, and says nothing in between.
    """

    def __init__(self) -> None:
        self._waits: dict[object, _Wait] = {}  # the oldest first
        self._warned: dict[WaitReason, float] = {}  # since when they wait

    def begin(
        self,
        key: object,
        reason: WaitReason,
        *,
        give_up: float = math.inf,
        describe: Callable[[], str],
    ) -> None:
        """A sequence, or a server, waits, or still does, until ``give_up`` on the event loop's
        clock; ``describe`` says what is in the way.
        """
        wait = self._waits.get(key)
        if wait is not None and wait.reason is reason:
            wait.ended, wait.give_up, wait.describe = math.inf, give_up, describe
            return
        self._waits.pop(key, None)
        self._waits[key] = _Wait(reason, asyncio.get_running_loop().time(), give_up, describe)

    def end(self, key: object) -> None:
        if (wait := self._waits.get(key)) is None:
            return
        if wait.reason is WaitReason.QUEUE:  # perhaps: the queue that it tries may be full again
            wait.ended = min(wait.ended, asyncio.get_running_loop().time())
        else:
            del self._waits[key]

    def log(self) -> None:
        now = asyncio.get_running_loop().time()
        for key in [key for key, wait in self._waits.items() if now - wait.ended > _LINGER]:
            del self._waits[key]
        for reason in WaitReason:
            waits = [wait for wait in self._waits.values() if wait.reason is reason]
            if not waits and reason in self._warned:
                logger.warning(reason.over, now - self._warned.pop(reason))
            elif waits and reason not in self._warned and now - waits[0].since >= reason.grace:
                self._warned[reason] = waits[0].since
                logger.warning("%s", _wait_text(reason, waits, now))


def _wait_text(reason: WaitReason, waits: list[_Wait], now: float) -> str:
    obstacles = "; ".join(dict.fromkeys(wait.describe() for wait in waits[:_MAX_REASONS]))
    text = reason.begun % (len(waits), obstacles)
    if (give_up := min(wait.give_up for wait in waits)) < math.inf:
        text += f"; the first is given up in {give_up - now:.0f} s if that stays so"
    return text


class Patience:
    """The seconds that a sequence still waits for a place on a server."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.left = seconds

    def spend(self, seconds: float) -> None:
        self.left = max(self.left - seconds, 0.0)

    def renew(self) -> None:
        self.left = self._seconds


class Router:
    """Sends a sequence to the server with the fewest outstanding tokens, and a session's sequences
    to the server that has their prefix, unless that is clearly busier.
    """

    def __init__(self, policy: Policy, check_open: Callable[[], None]) -> None:
        self.servers: tuple[ServerHandle, ...] = ()  # set by the pool
        self.wait_log = WaitLog()
        self._policy = policy
        self._check_open = check_open
        self._change = asyncio.Event()
        self._sessions: OrderedDict[str, tuple[ServerHandle, str]] = OrderedDict()

    def notify(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    async def route(
        self,
        request: rollout_pb2.GenerateRequest,
        output: TrajectoryBuilder,
        *,
        patience: Patience,
        deadline: float,
        avoid: ServerHandle | None,
        serves_now: Callable[[ServerHandle], bool],
    ) -> ServerHandle:
        """Waits for a server that takes the sequence, preferably one whose weights it need not
        wait for (``serves_now``); ``avoid`` gets it only if no other is ready. It waits as long as
        the patience lasts, and until the deadline on the event loop's clock. Time in which servers
        sleep at this fleet's request takes no patience.

        Raises:
            WeightVersionError: All servers have newer weights than the request takes.
            QueueFullError: None had room for it in time.
            UnavailableError: None was ready.
        """
        if output.newest is not None:
            self._policy.observed(output.newest)
        max_version = request.max_weight_version if request.HasField("max_weight_version") else None
        clock = asyncio.get_running_loop().time
        try:
            while True:
                self._check_open()
                now = clock()
                ready = [
                    server
                    for server in self.servers
                    if server.problem is None
                    and (max_version is None or not server.is_newer_than(max_version))
                ]
                if free := [server for server in ready if server.full_until <= now]:
                    others = [server for server in free if server is not avoid] or free
                    current = [server for server in others if serves_now(server)]
                    return self._choose(current or others, request.session_id)
                if max_version is not None and not ready:
                    self._check_bound(max_version)
                asleep = not ready and any(server.asleep for server in self.servers)
                give_up = deadline if asleep else min(deadline, now + patience.left)
                waits = WaitReason.WAKE_UP if asleep else WaitReason.SERVER
                self.wait_log.begin(
                    output,
                    WaitReason.QUEUE if ready else waits,
                    give_up=give_up,
                    describe=functools.partial(self.problems, max_version),
                )
                if now >= give_up:
                    if ready:
                        raise QueueFullError(f"no server has room: {self.problems(max_version)}")
                    raise UnavailableError(f"no server is ready: {self.problems(max_version)}")
                until = min([give_up, *(server.full_until for server in ready)])
                change = self._change
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until - now if until < math.inf else None):
                        await change.wait()
                if not asleep:
                    patience.spend(clock() - now)
        finally:
            self.wait_log.end(output)

    def share(self, session: str, other: str) -> None:
        """Sends ``other`` to the server of ``session``, as they have the same prefix."""
        ready = [server for server in self.servers if server.problem is None]
        if session not in self._sessions and ready:
            self._choose(ready, session)
        if session in self._sessions:
            self._remember(other, *self._sessions[session])

    def unavailable_reason(self) -> str | None:
        now = asyncio.get_running_loop().time()
        if any(s.problem is None and not s.paused and s.full_until <= now for s in self.servers):
            return None
        return self.problems() or None

    def problems(self, max_version: int | None = None) -> str:
        return "; ".join(_problem(server, max_version) for server in self.servers)

    def _choose(self, servers: Sequence[ServerHandle], session: str) -> ServerHandle:
        least_busy = min(servers, key=lambda server: server.outstanding_tokens)
        if not session:
            return least_busy
        last, server_id = self._sessions.pop(session, (least_busy, least_busy.server_id))
        stays = (
            last in servers
            and last.server_id == server_id  # a process that was restarted has no prefix
            and last.outstanding_tokens <= 2 * least_busy.outstanding_tokens + STICK_TOKENS
        )
        chosen = last if stays else least_busy
        self._remember(session, chosen, chosen.server_id)
        return chosen

    def _remember(self, session: str, server: ServerHandle, server_id: str) -> None:
        self._sessions[session] = server, server_id
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)

    def _check_bound(self, max_version: int) -> None:
        if any(server.can_serve(max_version) for server in self.servers):
            return
        policy = self._policy.current
        newest = policy.version if policy is not None else None
        if (newest is not None and newest > max_version) or any(
            server.is_newer_than(max_version) for server in self.servers
        ):
            raise WeightVersionError(
                f"no server serves version {max_version} or an older one, and none will unless the "
                f"policy is rolled back: {self.problems(max_version)}",
                reason="WEIGHTS_TOO_NEW",
            )


def _problem(server: ServerHandle, max_version: int | None) -> str:
    if max_version is not None and server.is_newer_than(max_version):
        version = server.version
        newer = f"version {version}" if version is not None and version > max_version else None
        return f"{server.address}: serves {newer or 'a newer one'}"
    if server.problem is not None:
        return str(server.problem)
    reasons = [server.pause_text()] if server.paused else []
    if not reasons or server.full_until > asyncio.get_running_loop().time():
        reasons.append("its queue is full")
    return f"{server.address}: {', and '.join(reasons)}"

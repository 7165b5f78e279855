"""What the server is doing, what holds it, and which RPCs it accepts.

The state says what the server can do at all. Pauses and a commit hold it: it samples while there
are none. A server that is SERVING and has a pause shows as PAUSED. In every other state the state
matters more than the pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
import uuid
from typing import TYPE_CHECKING

import structlog
from rollwire.deadlines import Deadline
from rollwire.reasons import Reason
from rollwire.types import ServerState

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, bad_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollwire_server.engines.base import Engine

log = structlog.get_logger()

MAX_PAUSES = 1000


class Rpc(enum.Enum):
    """The calls that are refused in some states."""

    GENERATE = "Generate"
    ABORT = "Abort"
    PAUSE = "Pause"
    RESUME = "Resume"
    SLEEP = "Sleep"
    WAKE_UP = "WakeUp"
    GET_SERVER_INFO = "GetServerInfo"
    GET_WEIGHT_SCHEMA = "GetWeightSchema"
    UPDATE_WEIGHTS = "UpdateWeights"
    JOIN_TRANSPORT = "JoinTransport"
    COMMIT_WEIGHTS = "CommitWeights"
    DISCARD_UPDATE = "DiscardUpdate"
    GET_WEIGHT_STATUS = "GetWeightStatus"
    VERIFY = "GetWeightStatus with verify"


_COMMITTABLE = {ServerState.AWAITING_WEIGHTS, ServerState.SERVING, ServerState.QUARANTINED}


class StateChange(enum.Enum):
    def __init__(self, reason: str, possible_in: set[ServerState], to: ServerState) -> None:
        self.reason = reason  # in the log
        self.possible_in = possible_in
        self.to = to

    LOADED = "loaded", {ServerState.STARTING}, ServerState.SERVING
    LOADED_EMPTY = "loaded, awaiting weights", {ServerState.STARTING}, ServerState.AWAITING_WEIGHTS
    COMMITTED = "commit", _COMMITTABLE, ServerState.SERVING
    COMMIT_TORN = "commit failed half way", _COMMITTABLE, ServerState.QUARANTINED
    SLEPT = "sleep", {ServerState.SERVING}, ServerState.SLEEPING
    SLEEP_FAILED = "sleep failed", {ServerState.SLEEPING}, ServerState.SERVING
    WOKE = "wake up", {ServerState.SLEEPING}, ServerState.SERVING
    WOKE_EMPTY = "wake up, awaiting weights", {ServerState.SLEEPING}, ServerState.AWAITING_WEIGHTS
    DRAIN = "drain", set(ServerState), ServerState.DRAINING


_UPDATE_RPCS = {Rpc.UPDATE_WEIGHTS, Rpc.JOIN_TRANSPORT, Rpc.COMMIT_WEIGHTS}

# What each state refuses, with the state's own name as the reason.
_REFUSED: dict[ServerState, set[Rpc]] = {
    ServerState.STARTING: set(Rpc) - {Rpc.GET_SERVER_INFO, Rpc.ABORT},
    ServerState.AWAITING_WEIGHTS: {Rpc.GENERATE, Rpc.SLEEP},
    ServerState.SERVING: set(),
    ServerState.SLEEPING: {Rpc.GENERATE, Rpc.SLEEP, Rpc.VERIFY, *_UPDATE_RPCS},
    ServerState.QUARANTINED: {Rpc.GENERATE, Rpc.SLEEP},
    ServerState.DRAINING: {Rpc.GENERATE, Rpc.PAUSE, Rpc.SLEEP, Rpc.WAKE_UP, *_UPDATE_RPCS},
}

_ADVICE = {
    ServerState.STARTING: "try again when it has loaded its model",
    ServerState.AWAITING_WEIGHTS: "publish an update to it, or use another server",
    ServerState.SLEEPING: "wake it up, or use another server",
    ServerState.QUARANTINED: "publish a full update to it, or use another server",
    ServerState.DRAINING: "use another server",
}


class StateMachine:
    """Life: construct → ``run`` as a task → ``attach`` the engine → RPCs → cancel ``run``."""

    def __init__(self, *, default_pause_lease: float) -> None:
        self._state = ServerState.STARTING  # never PAUSED: see ``current``
        self._pauses: dict[str, Deadline | None] = {}  # by id, with the lease that lifts each
        self._committing = False
        self._default_pause_lease = default_pause_lease
        self._engine: Engine | None = None
        self._engine_held: bool | None = False  # None while it is being held or released
        self._held_since = 0.0
        self._held_before = 0.0
        self.pauses_started = 0  # without renewals
        self._change = asyncio.Event()  # set and replaced when a hold or the engine changes
        self._observers: list[Callable[[ServerState], None]] = []

    @property
    def current(self) -> ServerState:
        paused = self._state is ServerState.SERVING and self._pauses
        return ServerState.PAUSED if paused else self._state

    @property
    def held(self) -> bool:
        return self._committing or bool(self._pauses)

    @property
    def held_seconds(self) -> float:
        now = time.monotonic()
        return self._held_before + (now - self._held_since if self._held_since else 0.0)

    @property
    def pauses(self) -> dict[str, float | None]:
        """By id, with the seconds left of each lease; None: until it is resumed."""
        return {name: None if lease is None else lease.left for name, lease in self._pauses.items()}

    def observe(self, observer: Callable[[ServerState], None]) -> None:
        """Calls ``observer`` with the state, now and after every change."""
        self._observers.append(observer)
        observer(self.current)

    def check(self, rpc: Rpc) -> None:
        if rpc in _REFUSED[self._state]:
            raise ServiceError(
                Reason[self._state.name],
                f"{rpc.value} is refused while the server is {self._state.value}: "
                f"{_ADVICE[self._state]}",
                metadata={"state": self._state.name},
            )

    def check_started(self, rpc: Rpc) -> None:
        """For calls that ``check`` may refuse only later: a Generate that picks up a sequence is
        served in every state but STARTING.
        """
        if self._state is ServerState.STARTING:
            self.check(rpc)

    def attach(self, engine: Engine) -> None:
        self._engine = engine
        self._notify_waiters()

    def apply(self, change: StateChange) -> None:
        if self._state is ServerState.DRAINING:  # a commit or sleep may end meanwhile
            return
        if self._state not in change.possible_in:
            raise RuntimeError(f"a bug: {change.name} is impossible in {self._state.name}")
        before = self.current
        self._state = change.to
        self._notify_observers(before, change.reason)

    async def pause(self, pause_id: str, lease: float | None) -> str:
        """Holds until resumed, or until the lease (seconds; None: the default; 0: never) ends.

        The same id again renews its lease. Returns the id once no step is in flight.
        """
        pause_id = pause_id or uuid.uuid4().hex
        if len(self._pauses) >= MAX_PAUSES and pause_id not in self._pauses:
            raise bad_request(
                "pause_id", f"{len(self._pauses)} pauses hold this server, the limit: resume some"
            )
        self.pauses_started += pause_id not in self._pauses
        seconds = self._default_pause_lease if lease is None else lease
        before = self.current
        self._pauses[pause_id] = Deadline(seconds) if seconds else None
        self._notify_observers(before, f"hold {pause_id}")
        self._notify_waiters()
        await self._wait_until(lambda: self._engine_held is True or pause_id not in self._pauses)
        return pause_id

    async def resume(self, pause_id: str) -> None:
        """Lifts one pause, or all (empty id)."""
        self._lift([pause_id] if pause_id else list(self._pauses))
        await self._wait_until_released()

    @contextlib.asynccontextmanager
    async def held_for_commit(self) -> AsyncIterator[None]:
        """Holds the engine inside, and lets it sample again whatever came of the commit."""
        try:
            self._committing = True
            self._notify_waiters()
            await self._wait_until(lambda: self._engine_held is True)
            yield
        finally:
            self._committing = False
            self._notify_waiters()
            await self._wait_until_released()

    async def run(self) -> None:
        """Holds and releases the engine, and lifts pauses whose lease has ended.

        Only this task calls the engine's hold and release, so that a caller who is cancelled half
        way leaves nothing undone.
        """
        try:
            while True:
                change = self._change
                expired = [n for n, lease in self._pauses.items() if lease and lease.left == 0]
                if expired:
                    log.warning("pauses lifted: their leases are over", pause_ids=expired)
                    self._lift(expired)
                if self._engine is not None and self._engine_held is not self.held:
                    await self._hold_or_release(self._engine)
                elif change is self._change:
                    leases = [lease.left for lease in self._pauses.values() if lease is not None]
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(min(leases, default=None)):
                            await change.wait()
        finally:
            self._engine = None  # it stops: nobody waits for it any more
            self._notify_waiters()

    async def _hold_or_release(self, engine: Engine) -> None:
        hold = self.held
        self._engine_held = None
        with contextlib.suppress(EngineError):  # a dead engine samples nothing either
            await (engine.hold() if hold else engine.release())
        now = time.monotonic()
        if hold:
            self._held_since = now
        elif self._held_since:
            self._held_before += now - self._held_since
            self._held_since = 0.0
        self._engine_held = hold
        self._notify_waiters()

    def _lift(self, pause_ids: list[str]) -> None:
        before = self.current
        for pause_id in pause_ids:
            self._pauses.pop(pause_id, None)
        self._notify_observers(before, f"lift {', '.join(pause_ids)}")
        self._notify_waiters()

    async def _wait_until_released(self) -> None:
        """Or something else holds the engine."""
        await self._wait_until(lambda: self._engine_held is False or self.held)

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while self._engine is not None and not condition():
            await self._change.wait()

    def _notify_waiters(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _notify_observers(self, before: ServerState, reason: str) -> None:
        if (after := self.current) is before:
            return
        log.info("state", state=after.value, before=before.value, why=reason)
        for observer in self._observers:
            observer(after)

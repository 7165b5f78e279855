"""The server's one state machine: what state it is in, what holds it, what each RPC may do.

A *mode* says what the server can do at all; *holds* (each pause by its id, the commit) say why it
does not sample right now. Sampling goes on when no hold is left. A pause shows as PAUSED while the
mode is SERVING; in every other mode the mode matters more.

    STARTING ──loaded──▶ SERVING or AWAITING_WEIGHTS (--await-weights)
    AWAITING_WEIGHTS, QUARANTINED ──commit──▶ SERVING
    SERVING ──sleep──▶ SLEEPING ──wake──▶ SERVING or AWAITING_WEIGHTS (weights discarded)
                               ──sleep failed──▶ SERVING
    SERVING, AWAITING_WEIGHTS ──torn commit──▶ QUARANTINED
    any ──drain──▶ DRAINING
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from rollwire.patience import Deadline

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import Reason, ServiceError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollwire_server.engines.base import Engine

log = structlog.get_logger()

COMMIT = "commit"
MOST_HOLDS = 1000


class State(enum.Enum):
    """What the server is doing, as GetServerInfo tells it."""

    STARTING = "starting"
    AWAITING_WEIGHTS = "awaiting_weights"
    SERVING = "serving"
    PAUSED = "paused"
    SLEEPING = "sleeping"
    QUARANTINED = "quarantined"
    DRAINING = "draining"


class Event(enum.Enum):
    """What moves the server from one mode to another."""

    LOADED = "loaded"
    LOADED_AWAITING = "loaded, awaiting weights"
    COMMITTED = "committed"
    TORN = "torn"
    SLEPT = "slept"
    SLEEP_FAILED = "sleep failed"
    WOKE = "woke"
    WOKE_EMPTY = "woke, awaiting weights"
    DRAIN = "drain"


class Rpc(enum.Enum):
    """The calls that ask before they act."""

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


MODES: dict[tuple[State, Event], State] = {
    (State.STARTING, Event.LOADED): State.SERVING,
    (State.STARTING, Event.LOADED_AWAITING): State.AWAITING_WEIGHTS,
    (State.AWAITING_WEIGHTS, Event.COMMITTED): State.SERVING,
    (State.SERVING, Event.COMMITTED): State.SERVING,
    (State.QUARANTINED, Event.COMMITTED): State.SERVING,
    (State.AWAITING_WEIGHTS, Event.TORN): State.QUARANTINED,
    (State.SERVING, Event.TORN): State.QUARANTINED,
    (State.QUARANTINED, Event.TORN): State.QUARANTINED,
    (State.SERVING, Event.SLEPT): State.SLEEPING,
    (State.SLEEPING, Event.SLEEP_FAILED): State.SERVING,
    (State.SLEEPING, Event.WOKE): State.SERVING,
    (State.SLEEPING, Event.WOKE_EMPTY): State.AWAITING_WEIGHTS,
    **{(state, Event.DRAIN): State.DRAINING for state in State},
    # A commit or sleep that was under way when the drain began changes nothing of it.
    (State.DRAINING, Event.COMMITTED): State.DRAINING,
    (State.DRAINING, Event.TORN): State.DRAINING,
    (State.DRAINING, Event.SLEPT): State.DRAINING,
    (State.DRAINING, Event.SLEEP_FAILED): State.DRAINING,
    (State.DRAINING, Event.WOKE): State.DRAINING,
    (State.DRAINING, Event.WOKE_EMPTY): State.DRAINING,
}

_UPDATES = {Rpc.UPDATE_WEIGHTS, Rpc.JOIN_TRANSPORT, Rpc.COMMIT_WEIGHTS}

# What is refused in each mode, with the mode's own name as the reason; all else is done.
REFUSED: dict[State, set[Rpc]] = {
    State.STARTING: set(Rpc) - {Rpc.GET_SERVER_INFO, Rpc.ABORT},
    State.AWAITING_WEIGHTS: {Rpc.GENERATE, Rpc.SLEEP},
    State.SERVING: set(),
    State.SLEEPING: {Rpc.GENERATE, Rpc.SLEEP, Rpc.VERIFY, *_UPDATES},
    State.QUARANTINED: {Rpc.GENERATE, Rpc.SLEEP},
    State.DRAINING: {Rpc.GENERATE, Rpc.PAUSE, Rpc.SLEEP, Rpc.WAKE_UP, *_UPDATES},
}

ADVICE: dict[State, str] = {
    State.STARTING: "try again when it has loaded its model",
    State.AWAITING_WEIGHTS: "publish an update to it, or use another server",
    State.SLEEPING: "wake it up, or use another server",
    State.QUARANTINED: "publish a full update to it, or use another server",
    State.DRAINING: "use another server",
}


@dataclass(slots=True)
class Hold:
    """One reason not to sample; the end of its lease lifts it by itself."""

    name: str
    lease: Deadline | None = None


class Lifecycle:
    """The mode and the holds of one server, and the engine kept in step with them.

    Life: construct → ``run`` as a task → ``attach`` the engine → RPCs → cancel ``run``.
    """

    def __init__(self, *, default_pause_lease: float) -> None:
        self._mode = State.STARTING
        self._holds: dict[str, Hold] = {}
        self._default_pause_lease = default_pause_lease
        self._engine: Engine | None = None
        self._engine_held: bool | None = False  # None: it is being told
        self._held_since = 0.0
        self._held_before = 0.0
        self.begun_pauses = 0  # renewals are none
        self._change = asyncio.Event()  # set, and replaced, at every change of holds or engine
        self._observers: list[Callable[[State], None]] = []

    @property
    def state(self) -> State:
        """The state that callers see."""
        if self._mode is State.SERVING and self.pauses:
            return State.PAUSED
        return self._mode

    @property
    def held(self) -> bool:
        """Whether something keeps the engine from sampling."""
        return bool(self._holds)

    @property
    def held_seconds(self) -> float:
        """For how long the engine was held, in sum."""
        now = time.monotonic()
        return self._held_before + (now - self._held_since if self._held_since else 0.0)

    @property
    def pauses(self) -> list[str]:
        """The ids of the pauses that hold."""
        return [name for name in self._holds if name != COMMIT]

    @property
    def leases(self) -> dict[str, float | None]:
        """For how many seconds each pause still holds, by its id; None: until it is resumed."""
        return {
            hold.name: None if hold.lease is None else hold.lease.left
            for hold in self._holds.values()
            if hold.name != COMMIT
        }

    def observe(self, observer: Callable[[State], None]) -> None:
        """Calls ``observer`` with the state, now and after every change."""
        self._observers.append(observer)
        observer(self.state)

    def check(self, rpc: Rpc) -> None:
        """Raises ServiceError when ``rpc`` is refused in this state."""
        if rpc in REFUSED[self._mode]:
            raise ServiceError(
                Reason[self._mode.name],
                f"{rpc.value} is refused while the server is {self._mode.value}: "
                f"{ADVICE[self._mode]}",
                metadata={"state": self._mode.name},
            )

    def check_started(self, rpc: Rpc) -> None:
        """Raises ServiceError while the engine loads, and nothing can be asked of it. (What
        ``check`` refuses in other states may be a pick-up, which is served.)
        """
        if self._mode is State.STARTING:
            self.check(rpc)

    def attach(self, engine: Engine) -> None:
        """Names the engine that holds act on, once it is started."""
        self._engine = engine
        self._changed()

    def happened(self, event: Event) -> None:
        """Moves to the mode that an event leads to."""
        before = self.state
        self._mode = MODES[self._mode, event]
        self._tell(before, event.value)

    async def pause(self, pause_id: str, lease: float | None) -> str:
        """Holds until resumed, or until the lease (seconds; None: the default; 0: never) ends.

        The same id again renews its lease. Returns the id once no step is in flight.
        """
        pause_id = pause_id or uuid.uuid4().hex
        if pause_id == COMMIT:
            raise ServiceError(Reason.BAD_REQUEST, f"{COMMIT!r} names the server's own hold: "
                               "choose another pause_id", field="pause_id")  # fmt: skip
        if len(self._holds) >= MOST_HOLDS and pause_id not in self._holds:
            raise ServiceError(
                Reason.BAD_REQUEST,
                f"{len(self.pauses)} pauses hold this server, the most there may be: resume some",
                field="pause_id",
            )
        self.begun_pauses += pause_id not in self._holds
        seconds = self._default_pause_lease if lease is None else lease
        await self._hold(Hold(pause_id, Deadline(seconds) if seconds else None))
        return pause_id

    async def resume(self, pause_id: str) -> None:
        """Lifts one pause, or all (empty id). An unknown id is no error."""
        lifted = [pause_id] if pause_id else self.pauses
        await self._lift([name for name in lifted if name != COMMIT])

    @contextlib.asynccontextmanager
    async def committing(self) -> AsyncIterator[None]:
        """Holds for a commit; goes on sampling afterwards whatever came of it."""
        try:
            await self._hold(Hold(COMMIT))
            yield
        finally:
            await self._lift([COMMIT])

    async def run(self) -> None:
        """Keeps the engine in step with the holds and lifts pauses whose lease is over.

        The one place that holds and releases the engine: a caller that is cancelled half way leaves
        nothing undone.
        """
        try:
            await self._keep_in_step()
        finally:
            self._engine = None  # it goes down: nobody waits for it any more
            self._changed()

    async def _keep_in_step(self) -> None:
        while True:
            change = self._change
            self._expire()
            if self._engine is not None and self._engine_held is not self.held:
                await self._tell_engine(self._engine)
                continue
            if change is not self._change:
                continue
            leases = [hold.lease.left for hold in self._holds.values() if hold.lease is not None]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(leases, default=None)):
                    await change.wait()

    async def _tell_engine(self, engine: Engine) -> None:
        held = self.held
        self._engine_held = None
        with contextlib.suppress(EngineError):  # a dead one samples nothing either
            await (engine.hold() if held else engine.release())
        now = time.monotonic()
        if held:
            self._held_since = now
        elif self._held_since:
            self._held_before += now - self._held_since
            self._held_since = 0.0
        self._engine_held = held
        self._changed()

    def _expire(self) -> None:
        leases = [(hold.name, hold.lease) for hold in self._holds.values()]
        over = [name for name, lease in leases if lease is not None and lease.left == 0]
        if over:
            log.warning("pauses lifted: their leases are over", pause_ids=over)
            self._drop(over)

    async def _hold(self, hold: Hold) -> None:
        """Returns once no step is in flight, or the hold is lifted again."""
        before = self.state
        self._holds[hold.name] = hold
        self._tell(before, f"hold {hold.name}")
        self._changed()
        await self._until(lambda: self._engine_held is True or hold.name not in self._holds)

    async def _lift(self, names: list[str]) -> None:
        """Returns once the engine goes on, or something else holds it."""
        self._drop(names)
        await self._until(lambda: self._engine_held is False or self.held)

    def _drop(self, names: list[str]) -> None:
        before = self.state
        for name in names:
            self._holds.pop(name, None)
        self._tell(before, f"lift {', '.join(names)}")
        self._changed()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while self._engine is not None and not is_so():
            await self._change.wait()

    def _changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _tell(self, before: State, why: str) -> None:
        if (after := self.state) is before:
            return
        log.info("state", state=after.value, before=before.value, why=why)
        for observer in self._observers:
            observer(after)

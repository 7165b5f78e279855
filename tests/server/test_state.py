from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from rollwire.types import ServerState
from rollwire_server.errors import ServiceError
from rollwire_server.state import Rpc, StateChange, StateMachine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# What each state refuses, written down a second time and the other way round: a row an RPC, a
# column a mode, "x" where it is refused.
GRID = """
                   starting awaiting_weights serving sleeping quarantined draining
Generate              x            x            .       x          x          x
Abort                 .            .            .       .          .          .
Pause                 x            .            .       .          .          x
Resume                x            .            .       .          .          .
Sleep                 x            x            .       x          x          x
WakeUp                x            .            .       .          .          x
GetServerInfo         .            .            .       .          .          .
GetWeightSchema       x            .            .       .          .          .
UpdateWeights         x            .            .       x          .          x
JoinTransport         x            .            .       x          .          x
CommitWeights         x            .            .       x          .          x
DiscardUpdate         x            .            .       .          .          .
GetWeightStatus       x            .            .       .          .          .
GetWeightStatus_with_verify  x     .            .       x          .          .
"""
PATHS: dict[ServerState, list[StateChange]] = {
    ServerState.STARTING: [],
    ServerState.AWAITING_WEIGHTS: [StateChange.LOADED_EMPTY],
    ServerState.SERVING: [StateChange.LOADED],
    ServerState.SLEEPING: [StateChange.LOADED, StateChange.SLEPT],
    ServerState.QUARANTINED: [StateChange.LOADED, StateChange.COMMIT_TORN],
    ServerState.DRAINING: [StateChange.LOADED, StateChange.DRAIN],
}
# And where each change leads from each state: the new state's initial, L for SLEEPING; "." where
# the change is a bug. Draining is the last state, whatever comes late.
CHANGES = """
             starting awaiting_weights serving sleeping quarantined draining
LOADED          S            .            .       .          .          D
LOADED_EMPTY    A            .            .       .          .          D
COMMITTED       .            S            S       .          S          D
COMMIT_TORN     .            Q            Q       .          Q          D
SLEPT           .            .            L       .          .          D
SLEEP_FAILED    .            .            .       S          .          D
WOKE            .            .            .       S          .          D
WOKE_EMPTY      .            .            .       A          .          D
DRAIN           D            D            D       D          D          D
"""
INITIALS = {
    "A": ServerState.AWAITING_WEIGHTS,
    "S": ServerState.SERVING,
    "L": ServerState.SLEEPING,
    "Q": ServerState.QUARANTINED,
    "D": ServerState.DRAINING,
}


class Gate:
    """An engine as far as holds go; ``blocked`` keeps hold and release from returning."""

    def __init__(self) -> None:
        self.held = False
        self.calls: list[str] = []
        self.called = asyncio.Event()
        self.released = asyncio.Event()
        self.blocked = asyncio.Event()
        self.blocked.set()

    async def hold(self) -> None:
        self.calls.append("hold")
        self.called.set()
        await self.blocked.wait()
        self.held = True

    async def release(self) -> None:
        self.calls.append("release")
        await self.blocked.wait()
        self.held = False
        self.released.set()


@contextlib.asynccontextmanager
async def serving(lease: float = 0.0) -> AsyncIterator[tuple[StateMachine, Gate]]:
    gate, state = Gate(), StateMachine(default_pause_lease=lease)
    task = asyncio.create_task(state.run())
    state.attach(gate)  # type: ignore[arg-type]
    state.apply(StateChange.LOADED)
    try:
        yield state, gate
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _cells(grid: str) -> list[tuple[str, str, str]]:
    header, *rows = grid.strip().splitlines()
    states = header.split()
    return [
        (row.split()[0], state, cell)
        for row in rows
        for state, cell in zip(states, row.split()[1:], strict=True)
    ]


def _machine_in(name: str) -> StateMachine:
    state = StateMachine(default_pause_lease=1)
    for change in PATHS[ServerState(name)]:
        state.apply(change)
    assert state.current.value == name
    return state


@pytest.mark.parametrize(("row", "name", "cell"), _cells(GRID))
def test_every_rpc_in_every_state(row: str, name: str, cell: str) -> None:
    state, rpc = _machine_in(name), row.replace("_", " ")
    if cell != "x":
        state.check(Rpc(rpc))
        return
    with pytest.raises(ServiceError) as caught:
        state.check(Rpc(rpc))
    assert caught.value.reason.name == name.upper()
    assert rpc in caught.value.message


def test_grid_covers_every_rpc() -> None:
    assert {row.replace("_", " ") for row, _, _ in _cells(GRID)} == {rpc.value for rpc in Rpc}


@pytest.mark.parametrize(("row", "name", "cell"), _cells(CHANGES))
def test_every_change_in_every_state(row: str, name: str, cell: str) -> None:
    """A commit that ends while the server sleeps, for one, does not wake it up."""
    state, change = _machine_in(name), StateChange[row]
    if cell != ".":
        state.apply(change)
        assert state.current is INITIALS[cell]
        return
    with pytest.raises(RuntimeError, match=f"{row} is impossible in {name.upper()}"):
        state.apply(change)
    assert state.current.value == name


def test_changes_are_all_there_are() -> None:
    assert {row for row, _, _ in _cells(CHANGES)} == {change.name for change in StateChange}


async def test_pause_holds_until_its_own_resume() -> None:
    async with serving() as (state, gate):
        await state.pause("a", None)
        await state.pause("b", None)
        assert gate.held
        assert state.current is ServerState.PAUSED
        await state.resume("a")
        assert gate.held
        await state.resume("unknown")
        assert gate.held
        await state.resume("b")
        assert not gate.held
        assert state.current is ServerState.SERVING
        assert gate.calls == ["hold", "release"]


async def test_resume_without_an_id_lifts_every_pause_but_not_a_commit() -> None:
    async with serving() as (state, gate):
        await state.pause("a", None)
        async with state.held_for_commit():
            await state.resume("")
            assert gate.held
            assert state.current is ServerState.SERVING
        assert not gate.held


async def test_a_commit_inside_a_pause_stays_paused() -> None:
    async with serving() as (state, gate):
        await state.pause("a", None)
        async with state.held_for_commit():
            pass
        assert gate.held
        assert list(state.pauses) == ["a"]


async def test_a_failed_commit_goes_on() -> None:
    async with serving() as (state, gate):
        with pytest.raises(RuntimeError):
            async with state.held_for_commit():
                raise RuntimeError
        assert not gate.held


async def test_lease_lifts_a_forgotten_pause() -> None:
    async with serving() as (state, gate):
        await state.pause("a", 0.01)
        resumed = asyncio.Event()
        state.observe(lambda state: resumed.set() if state is ServerState.SERVING else None)
        async with asyncio.timeout(60):
            await resumed.wait()
            await gate.released.wait()
        assert not gate.held


async def test_pausing_again_renews_the_lease() -> None:
    async with serving() as (state, gate):
        await state.pause("a", 0.01)
        await state.pause("a", 0)
        await asyncio.sleep(0.03)
        assert gate.held


async def test_a_cancelled_pause_leaves_nothing_half_done() -> None:
    async with serving() as (state, gate):
        gate.blocked.clear()
        pausing = asyncio.create_task(state.pause("a", None))
        await gate.called.wait()
        pausing.cancel()
        gate.blocked.set()
        await state.resume("a")
        assert not gate.held


async def test_a_lease_that_is_over_at_once() -> None:
    async with serving() as (state, gate), asyncio.timeout(60):
        assert await state.pause("a", 1e-9) == "a"
        await state.pause("b", None)
        assert gate.held
        assert list(state.pauses) == ["b"]


async def test_a_resume_beside_another_pause_returns() -> None:
    async with serving() as (state, gate), asyncio.timeout(60):
        await state.pause("a", None)
        resuming = asyncio.create_task(state.resume("a"))
        pausing = asyncio.create_task(state.pause("b", None))
        await asyncio.gather(resuming, pausing)
        assert gate.held


async def test_a_commit_ends_though_a_pause_comes_as_it_lifts_its_hold() -> None:
    async with serving() as (state, gate), asyncio.timeout(60):

        async def commit() -> None:
            async with state.held_for_commit():
                asyncio.get_running_loop().call_soon(pause)

        pausing: list[asyncio.Task[str]] = []

        def pause() -> None:
            pausing.append(asyncio.create_task(state.pause("a", None)))

        await commit()
        await asyncio.gather(*pausing)
        assert gate.held


async def test_a_hold_during_a_release_waits_for_the_engine() -> None:
    async with serving() as (state, gate), asyncio.timeout(60):
        await state.pause("a", None)
        gate.blocked.clear()
        resuming = asyncio.create_task(state.resume("a"))
        while gate.calls[-1] != "release":  # noqa: ASYNC110  tells nobody
            await asyncio.sleep(0)
        pausing = asyncio.create_task(state.pause("b", None))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not pausing.done(), "the engine may be sampling"
        gate.blocked.set()
        await asyncio.gather(resuming, pausing)
        assert gate.held
        assert gate.calls == ["hold", "release", "hold"]


@pytest.mark.parametrize("seed", range(20))
async def test_holds_in_any_interleaving_all_return(seed: int) -> None:
    choose = random.Random(seed)
    async with serving() as (state, gate), asyncio.timeout(60):

        async def pause() -> None:
            await state.pause(choose.choice("abc"), choose.choice([None, 1e-9, 0.002]))

        async def resume() -> None:
            await state.resume(choose.choice(["a", "b", "c", ""]))

        async def commit() -> None:
            async with state.held_for_commit():
                assert gate.held
                for _ in range(choose.randrange(4)):
                    await asyncio.sleep(0)
                assert gate.held

        committing = asyncio.Lock()  # one at a time, as updates are

        async def one() -> None:
            for _ in range(choose.randrange(6)):
                await asyncio.sleep(0)
            kind = choose.choice([pause, resume, resume, commit])
            async with committing if kind is commit else contextlib.nullcontext():
                await kind()

        await asyncio.gather(*(one() for _ in range(200)))
        await state.resume("")
        assert not gate.held


async def test_who_waits_when_it_all_ends_is_let_go() -> None:
    async with serving() as (state, gate), asyncio.timeout(60):
        gate.blocked.clear()
        pausing = asyncio.create_task(state.pause("a", None))
        await gate.called.wait()
    await asyncio.wait_for(pausing, 60)


async def test_pauses_have_a_limit() -> None:
    async with serving() as (state, _), asyncio.timeout(60):
        for number in range(1000):
            await state.pause(str(number), None)
        with pytest.raises(ServiceError, match="1000 pauses"):
            await state.pause("one more", None)
        await state.pause("7", None)


async def test_a_pause_may_have_any_name() -> None:
    async with serving() as (state, gate):
        await state.pause("commit", None)
        async with state.held_for_commit():
            await state.resume("commit")
            assert gate.held
        assert not gate.held


def test_what_is_refused_while_the_engine_loads_is_called_what_it_is() -> None:
    state = StateMachine(default_pause_lease=0.0)
    with pytest.raises(ServiceError, match=r"^Generate is refused while the server is starting"):
        state.check_started(Rpc.GENERATE)
    state.apply(StateChange.LOADED_EMPTY)
    state.check_started(Rpc.GENERATE)  # else nothing could be picked up

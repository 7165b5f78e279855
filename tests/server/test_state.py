from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from rollwire.types import ServerState
from rollwire_server.errors import ServiceError
from rollwire_server.state import COMMIT, Rpc, StateMachine

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
PATHS: dict[ServerState, list[ServerState]] = {
    ServerState.STARTING: [],
    ServerState.AWAITING_WEIGHTS: [ServerState.AWAITING_WEIGHTS],
    ServerState.SERVING: [ServerState.SERVING],
    ServerState.SLEEPING: [ServerState.SERVING, ServerState.SLEEPING],
    ServerState.QUARANTINED: [ServerState.SERVING, ServerState.QUARANTINED],
    ServerState.DRAINING: [ServerState.SERVING, ServerState.DRAINING],
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
    state.enter(ServerState.SERVING, "loaded")
    try:
        yield state, gate
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _cells() -> list[tuple[str, str, bool]]:
    header, *rows = GRID.strip().splitlines()
    states = header.split()
    return [
        (row.split()[0].replace("_", " "), state, cell == "x")
        for row in rows
        for state, cell in zip(states, row.split()[1:], strict=True)
    ]


@pytest.mark.parametrize(("rpc", "name", "refused"), _cells())
def test_every_rpc_in_every_state(rpc: str, name: str, refused: bool) -> None:
    state = StateMachine(default_pause_lease=1)
    for step in PATHS[ServerState(name)]:
        state.enter(step, "the test")
    assert state.current.value == name
    if not refused:
        state.check(Rpc(rpc))
        return
    with pytest.raises(ServiceError) as caught:
        state.check(Rpc(rpc))
    assert caught.value.reason.name == name.upper()
    assert rpc in caught.value.message


def test_grid_covers_every_rpc() -> None:
    assert {rpc for rpc, _, _ in _cells()} == {rpc.value for rpc in Rpc}


def test_nothing_leaves_draining() -> None:
    state = StateMachine(default_pause_lease=1)
    state.enter(ServerState.DRAINING, "drain")
    for other in ServerState:
        state.enter(other, "late")
        assert state.current is ServerState.DRAINING


def test_a_step_that_the_diagram_does_not_have_is_a_bug() -> None:
    state = StateMachine(default_pause_lease=1)
    with pytest.raises(RuntimeError, match="SLEEPING cannot follow STARTING"):
        state.enter(ServerState.SLEEPING, "sleep")
    assert state.current is ServerState.STARTING


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


async def test_a_pause_may_not_be_named_as_the_commit() -> None:
    async with serving() as (state, _):
        with pytest.raises(ServiceError, match="pause_id"):
            await state.pause(COMMIT, None)


def test_what_is_refused_while_the_engine_loads_is_called_what_it_is() -> None:
    state = StateMachine(default_pause_lease=0.0)
    with pytest.raises(ServiceError, match=r"^Generate is refused while the server is starting"):
        state.check_started(Rpc.GENERATE)
    state.enter(ServerState.AWAITING_WEIGHTS, "loaded")
    state.check_started(Rpc.GENERATE)  # else nothing could be picked up

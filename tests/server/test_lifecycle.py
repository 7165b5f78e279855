from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING

import pytest
from rollwire_server.errors import ServiceError
from rollwire_server.state import COMMIT, MODES, Event, Lifecycle, Rpc, State

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
PATHS: dict[State, list[Event]] = {
    State.STARTING: [],
    State.AWAITING_WEIGHTS: [Event.LOADED_AWAITING],
    State.SERVING: [Event.LOADED],
    State.SLEEPING: [Event.LOADED, Event.SLEPT],
    State.QUARANTINED: [Event.LOADED, Event.TORN],
    State.DRAINING: [Event.LOADED, Event.DRAIN],
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
async def serving(lease: float = 0.0) -> AsyncIterator[tuple[Lifecycle, Gate]]:
    gate, lifecycle = Gate(), Lifecycle(default_pause_lease=lease)
    task = asyncio.create_task(lifecycle.run())
    lifecycle.attach(gate)  # type: ignore[arg-type]
    lifecycle.happened(Event.LOADED)
    try:
        yield lifecycle, gate
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


@pytest.mark.parametrize(("rpc", "state", "refused"), _cells())
def test_every_rpc_in_every_state(rpc: str, state: str, refused: bool) -> None:
    lifecycle = Lifecycle(default_pause_lease=1)
    for event in PATHS[State(state)]:
        lifecycle.happened(event)
    assert lifecycle.state.value == state
    if not refused:
        lifecycle.check(Rpc(rpc))
        return
    with pytest.raises(ServiceError) as caught:
        lifecycle.check(Rpc(rpc))
    assert caught.value.reason.name == state.upper()
    assert rpc in caught.value.message


def test_grid_covers_every_rpc() -> None:
    assert {rpc for rpc, _, _ in _cells()} == {rpc.value for rpc in Rpc}


def test_nothing_leaves_draining() -> None:
    leaving = {after for (before, _), after in MODES.items() if before is State.DRAINING}
    assert leaving == {State.DRAINING}


async def test_pause_holds_until_its_own_resume() -> None:
    async with serving() as (lifecycle, gate):
        await lifecycle.pause("a", None)
        await lifecycle.pause("b", None)
        assert gate.held
        assert lifecycle.state is State.PAUSED
        await lifecycle.resume("a")
        assert gate.held
        await lifecycle.resume("unknown")
        assert gate.held
        await lifecycle.resume("b")
        assert not gate.held
        assert lifecycle.state is State.SERVING
        assert gate.calls == ["hold", "release"]


async def test_resume_without_an_id_lifts_every_pause_but_not_a_commit() -> None:
    async with serving() as (lifecycle, gate):
        await lifecycle.pause("a", None)
        async with lifecycle.committing():
            await lifecycle.resume("")
            assert gate.held
            assert lifecycle.state is State.SERVING
        assert not gate.held


async def test_a_commit_inside_a_pause_stays_paused() -> None:
    async with serving() as (lifecycle, gate):
        await lifecycle.pause("a", None)
        async with lifecycle.committing():
            pass
        assert gate.held
        assert lifecycle.pauses == ["a"]


async def test_a_failed_commit_goes_on() -> None:
    async with serving() as (lifecycle, gate):
        with pytest.raises(RuntimeError):
            async with lifecycle.committing():
                raise RuntimeError
        assert not gate.held


async def test_lease_lifts_a_forgotten_pause() -> None:
    async with serving() as (lifecycle, gate):
        await lifecycle.pause("a", 0.01)
        resumed = asyncio.Event()
        lifecycle.observe(lambda state: resumed.set() if state is State.SERVING else None)
        async with asyncio.timeout(20):
            await resumed.wait()
            await gate.released.wait()
        assert not gate.held


async def test_pausing_again_renews_the_lease() -> None:
    async with serving() as (lifecycle, gate):
        await lifecycle.pause("a", 0.01)
        await lifecycle.pause("a", 0)
        await asyncio.sleep(0.03)
        assert gate.held


async def test_a_cancelled_pause_leaves_nothing_half_done() -> None:
    async with serving() as (lifecycle, gate):
        gate.blocked.clear()
        pausing = asyncio.create_task(lifecycle.pause("a", None))
        await gate.called.wait()
        pausing.cancel()
        gate.blocked.set()
        await lifecycle.resume("a")
        assert not gate.held


async def test_a_lease_that_is_over_at_once() -> None:
    async with serving() as (lifecycle, gate), asyncio.timeout(20):
        assert await lifecycle.pause("a", 1e-9) == "a"
        await lifecycle.pause("b", None)
        assert gate.held
        assert lifecycle.pauses == ["b"]


async def test_a_resume_beside_another_pause_returns() -> None:
    async with serving() as (lifecycle, gate), asyncio.timeout(20):
        await lifecycle.pause("a", None)
        resuming = asyncio.create_task(lifecycle.resume("a"))
        pausing = asyncio.create_task(lifecycle.pause("b", None))
        await asyncio.gather(resuming, pausing)
        assert gate.held


async def test_a_commit_ends_though_a_pause_comes_as_it_lifts_its_hold() -> None:
    async with serving() as (lifecycle, gate), asyncio.timeout(20):

        async def commit() -> None:
            async with lifecycle.committing():
                asyncio.get_running_loop().call_soon(pause)

        pausing: list[asyncio.Task[str]] = []

        def pause() -> None:
            pausing.append(asyncio.create_task(lifecycle.pause("a", None)))

        await commit()
        await asyncio.gather(*pausing)
        assert gate.held


async def test_a_hold_during_a_release_waits_for_the_engine() -> None:
    async with serving() as (lifecycle, gate), asyncio.timeout(20):
        await lifecycle.pause("a", None)
        gate.blocked.clear()
        resuming = asyncio.create_task(lifecycle.resume("a"))
        while gate.calls[-1] != "release":  # noqa: ASYNC110  tells nobody
            await asyncio.sleep(0)
        pausing = asyncio.create_task(lifecycle.pause("b", None))
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
    async with serving() as (lifecycle, gate), asyncio.timeout(20):

        async def pause() -> None:
            await lifecycle.pause(choose.choice("abc"), choose.choice([None, 1e-9, 0.002]))

        async def resume() -> None:
            await lifecycle.resume(choose.choice(["a", "b", "c", ""]))

        async def commit() -> None:
            async with lifecycle.committing():
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
        await lifecycle.resume("")
        assert not gate.held


async def test_who_waits_when_it_all_ends_is_let_go() -> None:
    async with serving() as (lifecycle, gate), asyncio.timeout(20):
        gate.blocked.clear()
        pausing = asyncio.create_task(lifecycle.pause("a", None))
        await gate.called.wait()
    await asyncio.wait_for(pausing, 20)


async def test_pauses_have_a_limit() -> None:
    async with serving() as (lifecycle, _), asyncio.timeout(20):
        for number in range(1000):
            await lifecycle.pause(str(number), None)
        with pytest.raises(ServiceError, match="1000 pauses"):
            await lifecycle.pause("one more", None)
        await lifecycle.pause("7", None)


async def test_a_pause_may_not_be_named_as_the_commit() -> None:
    async with serving() as (lifecycle, _):
        with pytest.raises(ServiceError, match="pause_id"):
            await lifecycle.pause(COMMIT, None)


def test_what_is_refused_while_the_engine_loads_is_called_what_it_is() -> None:
    lifecycle = Lifecycle(default_pause_lease=0.0)
    with pytest.raises(ServiceError, match=r"^Generate is refused while the server is starting"):
        lifecycle.check_started(Rpc.GENERATE)
    lifecycle.happened(Event.LOADED_AWAITING)
    lifecycle.check_started(Rpc.GENERATE)  # else nothing could be picked up

"""What the caller gives to be called: bounded, named, and beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import re
import threading
import time
from typing import TYPE_CHECKING

import pytest
from client.batches.support import HeldServer, batcher_of, fleet_of, ids, prompts
from client.scripted import until
from rollwire_client import (
    Batcher,
    CallbackError,
    Decision,
    DropReason,
    Group,
    Progress,
    Prompt,
    Sampling,
    Trajectory,
)
from rollwire_client._batches import callbacks
from rollwire_client._batches.callbacks import CallbackRunner
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

SHORT = {"group_size": 1, "sampling": Sampling(max_new_tokens=3)}
QUICK = 0.2  # seconds that a call may take, for tests that wait for it


@contextlib.asynccontextmanager
async def batching(**options: object) -> AsyncIterator[Batcher]:
    async with (
        FakeServer() as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, **{**SHORT, **options}) as batcher,
    ):
        yield batcher


@pytest.fixture
def for_ever() -> Iterator[threading.Event]:
    """What a function waits for that does not return, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_plain_reward_does_not_block_the_event_loop() -> None:
    begun, go_on = threading.Event(), threading.Event()
    asked: list[tuple[str, int]] = []
    under_way = 0

    def reward(prompt: Prompt, _: Trajectory) -> float:
        nonlocal under_way
        under_way += 1
        begun.set()
        assert go_on.wait(60)
        asked.append((threading.current_thread().name, under_way))
        under_way -= 1
        return 1.0

    async with batching(reward=reward) as batcher:
        collecting = asyncio.create_task(batcher.collect(prompts(), 4))
        await until(begun.is_set)
        await batcher._pool.listed[0].client.info()  # it answers meanwhile
        go_on.set()
        batch = await collecting
    assert batch.finished.rewards == (1.0,) * 4
    assert asked == [("rollwire-reward", 1)] * 4  # one at a time


async def test_plain_functions_do_not_wait_for_a_busy_event_loop() -> None:
    runner = CallbackRunner("test", None)
    made = [threading.Event() for _ in range(3)]
    calls = [
        asyncio.create_task(runner.call("reward", event.set, subject="a sample")) for event in made
    ]
    await asyncio.sleep(0)
    assert made[-1].wait(20)  # the event loop does nothing meanwhile
    await asyncio.gather(*calls)
    runner.close()


async def test_a_coroutine_function_runs_in_the_event_loop_and_many_at_once() -> None:
    inside = asyncio.Semaphore(0)
    everybody = asyncio.Event()

    class Judge:
        async def __call__(self, prompt: Prompt, _: Trajectory) -> float:
            inside.release()
            await everybody.wait()
            return float(prompt.id)

    async with batching(reward=Judge()) as batcher:
        collecting = asyncio.create_task(batcher.collect(prompts(), 3))
        for _ in range(3):
            await inside.acquire()
        everybody.set()
        assert (await collecting).finished.rewards == (1.0, 2.0, 3.0)


async def test_what_a_plain_function_returns_is_awaited_where_it_can_be() -> None:
    async def judge() -> float:
        await asyncio.sleep(0)
        return 0.5

    async with batching(reward=lambda *_: judge()) as batcher:
        assert (await batcher.collect(prompts(), 1)).finished.rewards == (0.5,)


async def test_a_call_that_takes_long_is_told_by_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_LOG_AFTER", 0.01)

    def told() -> bool:
        line = (
            r"reward has taken \d+ s for prompt '1', and has not returned; it is abandoned after 6"
        )
        return any(re.search(line, record.getMessage()) for record in caplog.records)

    def reward(*_: object) -> float:
        while not told():
            time.sleep(0.001)
        return 1.0

    async def async_reward(*_: object) -> float:
        await until(told)
        return 1.0

    for function in (reward, async_reward):
        caplog.clear()
        async with batching(reward=function) as batcher:
            assert len((await batcher.collect(prompts(), 1)).groups) == 1


async def test_a_reward_that_never_returns_drops_its_group(
    for_ever: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "2":
            for_ever.wait()
        return 1.0

    async def async_reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "2":
            await asyncio.Event().wait()
        return 1.0

    async with FakeServer() as server, fleet_of(server) as fleet:
        for function in (reward, async_reward):
            caplog.clear()
            named = {**SHORT, "group_size": 2, "reward": function, "callback_timeout": QUICK}
            async with batcher_of(fleet, **named) as batcher:
                batch = await batcher.collect(prompts(), 3)
            assert ids(batch.finished) == ["1", "3", "4"]
            (dropped,) = batch.dropped.of(DropReason.UNSCORED).groups
            assert str(dropped.error) == (
                "reward took longer than 0.2 s for prompt '2': it was abandoned"
            )
            told = [r.getMessage() for r in caplog.records]
            assert any("prompt '2' (epoch 0) is dropped as unscored" in t for t in told)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("of_loop", [False, True])
async def test_a_reward_that_exits_drops_its_group_and_not_the_trainer(
    of_loop: bool, error: type[BaseException]
) -> None:
    """As graders do that run what the model wrote."""

    def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "2":
            raise error("done")
        return 1.0

    async def async_reward(prompt: Prompt, trajectory: Trajectory) -> float:
        return reward(prompt, trajectory)

    async with batching(reward=async_reward if of_loop else reward, refills=0) as batcher:
        batch = await batcher.collect(prompts(), 3)
    assert ids(batch.finished) == ["1", "3", "4"]
    (dropped,) = batch.dropped.of(DropReason.UNSCORED).groups
    assert f"{error.__name__}('done')" in str(dropped.error)


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, asyncio.CancelledError])
@pytest.mark.parametrize("of_loop", [False, True])
async def test_hooks_and_prompts_that_exit_do_not_end_the_trainer(
    of_loop: bool, error: type[BaseException]
) -> None:
    """Nor is what they await, and somebody cancelled, taken for an end of the trainer's task."""

    def hook(told: Group | Progress) -> Decision:
        if isinstance(told, Progress) or told.prompt.id == "1":
            raise error("done")
        return Decision.TAKE

    async def async_hook(told: Group | Progress) -> Decision:
        return hook(told)

    def exits() -> Iterator[Prompt]:
        raise error("done")
        yield

    given, told = async_hook if of_loop else hook, rf"{error.__name__}\('done'\)"
    async with batching() as batcher:
        source = prompts()
        batch = await batcher.collect(source, 1, decide=given)
        assert ids(batch.finished) == ["2"]
        (dropped,) = batch.dropped.of(DropReason.FAILED).groups
        assert f"{error.__name__}('done')" in str(dropped.error)
        with pytest.raises(RuntimeError, match=told):
            await batcher.collect(source, 1, stop=given)
        assert ids((await batcher.collect(source, 1)).finished) == ["3"]
        with pytest.raises(RuntimeError, match=told):
            await batcher.collect(exits(), 1)


async def test_a_call_whose_group_is_gone_does_not_hold_the_others_for_ever(
    for_ever: threading.Event,
) -> None:
    begun = threading.Event()

    def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "1":
            begun.set()
            for_ever.wait()
        return 1.0

    async with HeldServer({1}) as server, fleet_of(server) as fleet:
        named = {"group_size": 1, "reward": reward, "callback_timeout": QUICK}
        async with batcher_of(fleet, **named) as batcher:
            collecting = asyncio.create_task(batcher.collect(prompts(), 2))
            await until(begun.is_set)
            batcher._buffer.groups[1].task.cancel()  # as a tail that is dropped
            server.let_go |= {2}
            await until(lambda: batcher._buffer.groups[2].samples[0].reward == 1.0)
            collecting.cancel()
            await asyncio.wait([collecting])


async def test_rewards_that_never_return_are_told_in_the_end(for_ever: threading.Event) -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        named = {**SHORT, "reward": lambda *_: for_ever.wait(), "callback_timeout": 0.02}
        async with batcher_of(fleet, **named) as batcher:
            with pytest.raises(CallbackError, match=r"reward took longer than 0\.02 s"):
                await batcher.collect(prompts(), 1)
            assert batcher.taken == 8


@pytest.mark.parametrize("name", ["decide", "stop"])
async def test_a_hook_that_never_returns_is_given_up(name: str, for_ever: threading.Event) -> None:
    def hook(told: Group | Progress) -> Decision | bool:
        if isinstance(told, Progress) or told.prompt.id == "1":
            for_ever.wait()
        return Decision.TAKE

    async with batching(callback_timeout=QUICK) as batcher:
        source = prompts()
        if name == "stop":  # it would never end any batch: the groups are kept
            with pytest.raises(CallbackError, match=r"stop took longer than 0\.2 s for the ba"):
                await batcher.collect(source, 1, stop=hook)
            assert ids((await batcher.collect(source, 1)).finished) == ["1"]
            return
        batch = await batcher.collect(source, 1, decide=hook)
    assert ids(batch.finished) == ["2"]
    (dropped,) = batch.dropped.of(DropReason.FAILED).groups
    assert "decide took longer than 0.2 s for the group of prompt '1'" in str(dropped.error)


async def test_hooks_may_be_coroutine_functions() -> None:
    async def decide(group: Group) -> Decision:
        await asyncio.sleep(0)
        return Decision.DROP if group.prompt.id == "1" else Decision.TAKE

    async def stop(progress: Progress) -> bool:
        await asyncio.sleep(0)
        return progress.chosen == 2

    async with batching() as batcher:
        batch = await batcher.collect(prompts(), 3, decide=decide, stop=stop)
    assert len(batch.groups) == 2
    assert ids(batch.dropped.of(DropReason.FILTERED)) == ["1"]


async def test_what_a_reward_raises_as_it_is_cancelled_is_of_no_interest() -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    begun, ended = asyncio.Event(), asyncio.Event()

    async def judge(*_: object) -> float:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
            raise LookupError("the session is closed")

    calling = asyncio.create_task(
        CallbackRunner("test", None).call("reward", judge, subject="a sample")
    )
    await begun.wait()
    calling.cancel()
    await asyncio.wait([calling])
    assert (calling.cancelled(), ended.is_set()) == (True, True)
    del calling
    gc.collect()
    assert not told


def slow_source(*gates: threading.Event) -> Iterator[Prompt]:
    """A prompt at once, and one more after each of the gates."""
    yield Prompt("1", [1])
    for number, gate in enumerate(gates, 2):
        gate.wait()
        yield Prompt(str(number), [number])


async def test_a_source_that_blocks_holds_no_batch_that_has_enough(tmp_path: Path) -> None:
    gate = threading.Event()
    async with HeldServer({1, 2}) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet, group_size=1) as batcher:
            source = slow_source(gate)
            batch = await batcher.collect(source, 1, prefetch=1)
            assert (ids(batch.finished), ids(batch.carried)) == (["1"], [])
            assert batcher.taken == 1
            gate.set()  # what it was asked for comes between two batches, and is not lost
            await until(lambda: batcher.taken == 2)
            batcher.save(tmp_path / "buffer")
            assert ids((await batcher.collect(source, 1)).finished) == ["2"]
        async with batcher_of(fleet, group_size=1) as batcher:
            batcher.load(tmp_path / "buffer")
            assert ids((await batcher.collect([], 1)).finished) == ["2"]


async def test_a_source_that_never_goes_on_is_told(for_ever: threading.Event) -> None:
    async with batching(callback_timeout=QUICK) as batcher:
        with pytest.raises(CallbackError, match=r"prompts took longer than 0\.2 s for its next"):
            await batcher.collect(slow_source(for_ever), 2)
        assert ids((await batcher.collect([], 1)).finished) == ["1"]  # which it had given
        with pytest.raises(CallbackError, match="prompts took longer"):
            await batcher.evaluate(slow_source(for_ever))


async def test_a_source_may_take_long_for_all_of_them(tmp_path: Path) -> None:
    """The time is for each of them, not for what a batch asks for at once."""

    def slow() -> Iterator[Prompt]:
        for prompt in prompts():
            time.sleep(0.15)
            yield prompt

    async with batching(callback_timeout=2) as batcher:
        assert len((await batcher.collect(slow(), 16)).groups) == 16


async def test_what_is_called_sees_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="none")
    variable.set("the caller's")
    seen: set[str] = set()

    def reward(*_: object) -> float:
        seen.add(variable.get())
        return 1.0

    async with batching(reward=reward) as batcher:
        await batcher.collect(prompts(), 2)
    assert seen == {"the caller's"}


async def test_a_batcher_that_is_closed_leaves_no_thread() -> None:
    async with batching(reward=lambda *_: 1.0) as batcher:
        await batcher.collect(prompts(), 2, decide=lambda _: Decision.TAKE)
        names = {"rollwire-reward", "rollwire-hooks", "rollwire-prompts"}
        assert names <= {thread.name for thread in threading.enumerate()}
    await until(lambda: not names & {thread.name for thread in threading.enumerate()})

"""Batches from a fake server whose sequences end when the test lets them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest
from client.batches.support import (
    QUICK,
    HeldServer,
    batcher_of,
    begun,
    fates,
    fleet_of,
    held,
    ids,
    prompts,
)
from client.scripted import until
from rollwire_client import (
    Batcher,
    Carry,
    ClosedError,
    Drop,
    DropReason,
    Fleet,
    Part,
    Progress,
    Prompt,
    RolloutClient,
    Sampling,
    Trajectory,
)
from rollwire_client._batches import batch_collector
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


async def test_a_fixed_batch_is_all_of_so_many_prompts() -> None:
    async with FakeServer(version=3) as server, fleet_of(server) as fleet:
        batcher = Batcher(
            fleet,
            seed=1,
            group_size=4,
            sampling=Sampling(max_new_tokens=6),
            reward=lambda prompt, trajectory: prompt.info["answer"] + len(trajectory.token_ids),
        )
        source = prompts()
        batch = await batcher.collect(source, 3)
        assert next(source).id == "4"  # no more was taken than was needed
    assert ids(batch.finished) == ["1", "2", "3"]
    assert (batch.carried, batch.dropped) == (Part(), Part())
    assert [group.rewards for group in batch.groups] == [(7.0,) * 4, (8.0,) * 4, (9.0,) * 4]
    assert all(group.complete and group.versions == {3} for group in batch.groups)
    outputs = {sample.trajectory.token_ids for group in batch.groups for sample in group.samples}
    assert len(outputs) == 12  # each has draws of its own
    assert batch.finished.lengths == (6,) * 12
    assert (batch.finished.mean_length, batch.finished.mean_reward) == (6.0, 8.0)
    assert (batcher.handed_out, batcher.dropped) == (3, 0)


async def test_the_same_seed_gives_the_same_samples() -> None:
    async def sampled(seed: int, epoch: int) -> list[tuple[int, ...]]:
        async with FakeServer() as server, fleet_of(server) as fleet:
            batcher = Batcher(fleet, seed=seed, group_size=2, sampling=Sampling(max_new_tokens=4))
            batch = await batcher.collect([Prompt("a", [1], epoch)], 1)
        return [sample.trajectory.token_ids for sample in batch.groups[0].samples]

    first = await sampled(1, 0)
    assert first == await sampled(1, 0)
    others = [*await sampled(2, 0), *await sampled(1, 1)]
    assert not set(first) & set(others)


async def test_rewards_may_be_awaited_and_are_asked_for_once() -> None:
    asked: list[str] = []

    async def reward(prompt: Prompt, trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        asked.append(trajectory.request_id)
        return 0.5

    async with held(1, 2, reward=reward) as (_, batcher):
        batch = await batcher.collect(prompts(), 2)
    assert batch.finished.rewards == (0.5,) * 4
    assert len(set(asked)) == len(asked) == 4


async def test_over_sampling_ends_with_the_first_and_aborts_the_rest() -> None:
    async with held() as (server, batcher):
        collecting = asyncio.create_task(batcher.collect(prompts(), 2, over_sample=2.0))
        await begun(batcher, "1", "2", "3", "4")
        server.let_go |= {2, 3}
        batch = await collecting
        assert ids(batch.finished) == ["2", "3"]
        assert fates(batch.dropped) == [("1", DropReason.TAIL), ("4", DropReason.TAIL)]
        assert not batch.carried.groups
        assert min(batch.dropped.lengths) > 0  # what was sampled is told
        await until(lambda: server.running == 0)
        assert batcher.dropped == 2


async def test_what_is_carried_goes_on_and_comes_first() -> None:
    async with held(2, version=1) as (server, batcher):
        source = prompts()
        batch = await batcher.collect(source, 1, over_sample=2.0, tail=Carry())
        assert (ids(batch.finished), ids(batch.carried)) == (["2"], ["1"])
        assert not batch.dropped.groups
        so_far = batch.carried.lengths
        await begun(batcher, "1")
        server.commit(2)
        await until(lambda: len(server.requests) == 4)
        server.let_go.add(1)
        batch = await batcher.collect(source, 1, over_sample=2.0, tail=Carry())
        assert (ids(batch.finished), ids(batch.carried)) == (["1"], ["3"])
        (group,) = batch.groups
        assert group.versions == {1, 2}
        for sample, before in zip(group.samples, so_far, strict=True):
            tokens = sample.trajectory.token_ids
            assert len(tokens) > before
            assert tokens[:-1] == tuple(range(100, 99 + len(tokens)))  # each once, in order
            assert len(sample.trajectory.logprobs) == len(tokens)


async def test_groups_begun_ahead_go_on_between_batches() -> None:
    async with held(1) as (server, batcher):
        source = prompts()
        batch = await batcher.collect(source, 1, prefetch=2)
        assert (ids(batch.finished), ids(batch.carried)) == (["1"], ["2", "3"])
        server.let_go |= {2, 3}
        await until(lambda: server.running == 0)  # nobody collects
        batch = await batcher.collect(source, 2)
        assert ids(batch.finished) == ["2", "3"]
        assert next(source).id == "4"


async def test_groups_begun_ahead_wait_while_the_fleet_sleeps() -> None:
    async with (
        HeldServer({1}) as server,
        fleet_of(server, retries=QUICK) as fleet,
        batcher_of(fleet) as batcher,
    ):
        source = prompts()
        await batcher.collect(source, 1, prefetch=2)
        await begun(batcher, "2", "3")
        await fleet.sleep()
        await until(lambda: server.running == 0)
        server.let_go |= {2, 3}
        await fleet.wake_up()
        batch = await batcher.collect(source, 2)
    assert ids(batch.finished) == ["2", "3"]
    for group in batch.finished.groups:
        for sample in group.samples:
            tokens = sample.trajectory.token_ids
            assert tokens[:-1] == tuple(range(100, 99 + len(tokens)))  # each once, in order


async def test_patience_waits_for_the_tail() -> None:
    async with held(1, 2) as (server, batcher):
        loop = asyncio.get_running_loop()
        collecting = asyncio.create_task(
            batcher.collect(prompts(), 2, over_sample=2.0, tail=Drop(patience=1e6))
        )
        await until(lambda: server.running == 4)
        assert not collecting.done()
        loop.call_soon(server.let_go.update, {3, 4})
        batch = await collecting
    assert ids(batch.finished) == ["1", "2", "3", "4"]


async def test_a_tail_whose_time_is_up_is_not_waited_for() -> None:
    """The others' time runs out while the event loop has something else to do."""
    async with held(1, 2) as (_, batcher):

        def stop(progress: Progress) -> bool:
            if progress.chosen == 2:
                time.sleep(2 * progress.seconds)
            return False

        async with asyncio.timeout(60):
            batch = await batcher.collect(
                prompts(), 2, over_sample=2.0, tail=Drop(patience=1.5), stop=stop
            )
    assert ids(batch.finished) == ["1", "2"]


async def test_a_batch_that_is_cancelled_loses_nothing() -> None:
    async with held(1) as (server, batcher):
        source = prompts()
        collecting = asyncio.create_task(batcher.collect(source, 2, over_sample=1.5))
        await until(lambda: server.running == 4)  # the first is complete
        collecting.cancel()
        await asyncio.wait([collecting])
        server.let_go |= {2}
        batch = await batcher.collect(source, 2)
        assert ids(batch.finished) == ["1", "2"]
        assert len(server.requests) == 6  # nothing was sampled twice
        assert ids(batch.carried) == ["3"]  # more than this batch asked for


async def test_a_batch_that_is_cancelled_as_it_ends_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it waits for a prompt that the iterator may be about to give."""
    monkeypatch.setattr(batch_collector, "_STOP_TIMEOUT", 60)
    gate = threading.Event()

    def slow() -> Iterator[Prompt]:
        yield Prompt("1", [1])
        gate.wait()
        yield Prompt("2", [2])

    async with held(1, 2) as (server, batcher):
        source = slow()
        collecting = asyncio.create_task(batcher.collect(source, 1, prefetch=1))
        await until(lambda: len(batcher._buffer.chosen) == 1)
        collecting.cancel()
        await asyncio.wait([collecting])
        gate.set()
        batch = await batcher.collect(source, 2)
        assert ids(batch.finished) == ["1", "2"]
        assert len(server.requests) == 4


async def test_one_batch_at_a_time() -> None:
    async with held() as (server, batcher):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await until(lambda: server.running == 2)
        with pytest.raises(RuntimeError, match="one at a time"):
            await batcher.collect(prompts(), 1)
        collecting.cancel()
        await asyncio.wait([collecting])


async def test_a_batcher_that_is_closed_ends_its_batch() -> None:
    async with held() as (server, batcher):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await until(lambda: server.running == 2)
        await batcher.close()
        with pytest.raises(ClosedError):
            await collecting
        with pytest.raises(ClosedError):
            await batcher.collect(prompts(), 1)


async def test_a_fleet_that_is_not_open_is_told_at_once() -> None:
    batcher = batcher_of(Fleet(["127.0.0.1:9"]), max_lag=1)
    with pytest.raises(ClosedError):
        await batcher.collect(prompts(), 1, version=1)
    with pytest.raises(ClosedError):
        await batcher.evaluate([])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"sampling": Sampling(seed=1)}, "all samples would share"),
        ({"group_size": 0}, "group_size is 0"),
        ({"refills": -1}, "refills is -1"),
        ({"max_lag": -1}, "max_lag is -1"),
        ({"seed": 2**63}, "seed is"),
        ({"callback_timeout": float("nan")}, "callback_timeout is nan"),
        ({"callback_timeout": 0}, "callback_timeout is 0"),
        ({"options": {"request_id": "a"}}, "request_id: the batcher's own"),
        ({"options": {"session_id": "a", "max_weight_version": 1}}, "session_id, max_weight"),
    ],
)
def test_a_batcher_that_cannot_be(wrong: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        batcher_of(Fleet(["127.0.0.1:1"]), **wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"target": 0}, "target is 0"),
        ({"target": 1, "prefetch": -1}, "prefetch is -1"),
        ({"target": 1, "version": -1}, "version is -1"),
        ({"target": 1, "version": 2**63}, "version is"),
    ],
)
async def test_a_batch_that_cannot_be(wrong: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        await batcher_of(Fleet(["127.0.0.1:1"])).collect([], **wrong)


async def test_a_batcher_that_is_left_ends_its_sequences() -> None:
    async with HeldServer(set()) as server, fleet_of(server) as fleet:
        async with batcher_of(fleet) as batcher:
            collecting = asyncio.create_task(batcher.collect(prompts(), 2))
            await until(lambda: server.running == 4)
            collecting.cancel()
            await asyncio.wait([collecting])
            assert server.running == 4
        await until(lambda: server.running == 0)


async def test_somebody_else_s_abort_costs_no_token() -> None:
    async with held() as (server, batcher):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await until(lambda: server.running == 2)
        async with RolloutClient(server.address) as client:
            await client.abort(request_ids=[server.requests[0].request_id])
        await until(lambda: len(server.requests) == 3)
        server.let_go.add(1)
        (group,) = (await collecting).groups
    for sample in group.samples:
        tokens = sample.trajectory.token_ids
        assert tokens[:-1] == tuple(range(100, 99 + len(tokens)))

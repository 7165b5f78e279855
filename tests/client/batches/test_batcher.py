"""Batches from a fake server whose sequences end when the test lets them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from typing import TYPE_CHECKING

import pytest
from client.batches.support import HeldServer, batcher_of, begun, fleet_of, prompts
from client.scripted import until, was_published
from rollwire_client import (
    Batcher,
    CallbackError,
    Carry,
    ClosedError,
    Decision,
    Drop,
    DropReason,
    Fleet,
    Group,
    InvalidRequestError,
    Part,
    Progress,
    Prompt,
    Retries,
    RolloutClient,
    RolloutFailedError,
    Sampling,
    ServerState,
    StalenessError,
    Trajectory,
    WeightTag,
)
from rollwire_client._batches import prompt_source
from rollwire_client._batches.group import GroupState
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Iterator


def ids(part: Part) -> list[str]:
    return [group.prompt.id for group in part.groups]


def fates(part: Part) -> list[tuple[str, DropReason | None]]:
    return [(group.prompt.id, group.dropped) for group in part.groups]


@contextlib.asynccontextmanager
async def held(*let_go: int, version: int | None = None, **options: object):
    async with (
        HeldServer(set(let_go), version=version) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, **options) as batcher,
    ):
        yield server, batcher


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
    monkeypatch.setattr(prompt_source, "_STOP_TIMEOUT", 60)
    gate = threading.Event()

    def slow() -> Iterator[Prompt]:
        yield Prompt("1", [1])
        gate.wait()
        yield Prompt("2", [2])

    async with held(1, 2) as (server, batcher):
        source = slow()
        collecting = asyncio.create_task(batcher.collect(source, 1, prefetch=1))
        await until(lambda: batcher._buffer.count(GroupState.CHOSEN) == 1)
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


async def test_decisions() -> None:
    """Postponed groups are asked about again; dropped ones are replaced."""
    asked: list[str] = []

    def decide(group: Group) -> Decision:
        asked.append(group.prompt.id)
        if group.prompt.id == "1" and asked.count("1") == 1:
            return Decision.POSTPONE
        return Decision.DROP if group.prompt.id == "2" else Decision.TAKE

    async with held(1, 2, 3, 4, 5) as (_, batcher):
        source = prompts()
        batch = await batcher.collect(source, 2, decide=decide)
        assert len(batch.groups) == 2
        assert not {"1", "2"} & set(ids(batch.finished))
        assert ids(batch.carried) == ["1"]
        assert fates(batch.dropped) == [("2", DropReason.FILTERED)]
        batch = await batcher.collect(source, 2, decide=decide)
        assert ids(batch.finished)[0] == "1"
        assert asked.count("1") == 2


async def test_a_group_that_decide_fails_at_is_dropped_and_the_run_goes_on() -> None:
    def decide(group: Group) -> Decision:
        if group.prompt.id == "1":
            raise LookupError("no such answer")
        return None if group.prompt.id == "2" else Decision.TAKE

    async with held(1, 2, 3) as (_, batcher):
        batch = await batcher.collect(prompts(), 1, decide=decide)
        assert ids(batch.finished) == ["3"]
        assert fates(batch.dropped) == [("1", DropReason.FAILED), ("2", DropReason.FAILED)]
        first, second = (str(group.error) for group in batch.dropped.groups)
        assert first == "decide failed at the group of prompt '1': LookupError('no such answer')"
        assert second == "decide returned None, not a Decision, of prompt '2'"


async def test_a_decide_that_fails_at_every_group_is_told() -> None:
    async with held(*range(1, 9)) as (_, batcher):
        with pytest.raises(CallbackError, match="decide returned True, not a Decision"):
            await batcher.collect(prompts(), 1, decide=lambda _: True)
        assert batcher.taken == 8


async def test_a_stop_that_is_not_yes_or_no() -> None:
    async with held(1) as (_, batcher):
        with pytest.raises(TypeError, match="stop returned 'no'"):
            await batcher.collect(prompts(), 1, stop=lambda _: "no")


async def test_a_batch_can_be_stopped_early() -> None:
    async with held(1, 2) as (_, batcher):
        batch = await batcher.collect(
            prompts(), 4, tail=Carry(), stop=lambda progress: progress.chosen == 2
        )
    assert (ids(batch.finished), ids(batch.carried)) == (["1", "2"], ["3", "4"])


async def test_prompts_that_run_out_make_a_smaller_batch() -> None:
    async with held(1, 2) as (_, batcher):
        source = itertools.islice(prompts(), 2)
        assert ids((await batcher.collect(source, 5)).finished) == ["1", "2"]
        assert not (await batcher.collect(source, 5)).groups


async def test_the_same_prompt_twice_is_refused() -> None:
    async with held() as (_, batcher):
        twice = [Prompt("a", [1]), Prompt("a", [2], epoch=1), Prompt("a", [3])]
        with pytest.raises(ValueError, match="'a' of epoch 0 is under way already"):
            await batcher.collect(twice, 3)


async def test_a_prompt_may_say_how_it_is_sampled() -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        batcher = batcher_of(fleet, sampling=Sampling(max_new_tokens=5))
        own = Prompt("b", [1], sampling=Sampling(max_new_tokens=9, temperature=0.5))
        batch = await batcher.collect([Prompt("a", [1]), own], 2)
        assert batch.finished.lengths == (5, 5, 9, 9)
        asked = sorted((r.sampling.max_new_tokens, r.sampling.temperature) for r in server.requests)
        assert asked == [(5, 1.0), (5, 1.0), (9, 0.5), (9, 0.5)]
        seeded = Prompt("c", [1], sampling=Sampling(seed=1))
        with pytest.raises(ValueError, match="the sampling of prompt 'c' has a seed"):
            await batcher.collect([seeded], 1)


async def test_a_prompt_that_is_none_is_refused_before_anything_is_sampled() -> None:
    async with held() as (server, batcher):
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            await batcher.collect([Prompt("a", [-1])], 1)
        assert not server.requests
        assert batcher.taken == 1
        batch = await batcher.collect([], 1)
        assert fates(batch.dropped) == [("a", DropReason.FAILED)]


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        (Prompt(5, [1]), TypeError),
        (Prompt("\ud800", [1]), ValueError),
        (Prompt("a", [1], epoch=2**63), ValueError),
        (Prompt("a", [1], epoch=0.5), TypeError),
    ],
)
async def test_what_no_buffer_could_hold_is_refused(prompt: Prompt, error: type) -> None:
    async with held() as (server, batcher):
        with pytest.raises(error):
            await batcher.collect([prompt], 1)
        assert not server.requests


async def test_what_is_no_prompt_is_told_and_counts_where_the_data_set_goes_on() -> None:
    async with held(2) as (server, batcher):
        with pytest.raises(TypeError, match=r"gave \[1, 2\], not a Prompt"):
            await batcher.collect([[1, 2]], 1)
        assert not server.requests
        assert batcher.taken == 1
        batch = await batcher.collect([Prompt("2", [2])], 1)
        assert ids(batch.finished) == ["2"]
        assert fates(batch.dropped) == [("[1, 2]", DropReason.FAILED)]


async def test_a_version_that_comes_to_nothing_is_told() -> None:
    """The weights that a sequence needs were there when it was begun, and are gone."""
    async with (
        HeldServer(set(), version=5) as server,
        fleet_of(server, retries=Retries(seconds=0.5), probe_interval=0.05) as fleet,
        batcher_of(fleet, max_lag=1, refills=0) as batcher,
    ):
        assert fleet._pool.servers[0].version == 5
        server.state = ServerState.PAUSED
        collecting = asyncio.create_task(batcher.collect(prompts(), 1, version=5))
        await until(lambda: server.running == 2)
        server.commit(3)
        server.state = ServerState.SERVING
        with pytest.raises(RolloutFailedError, match="did not reach version 4"):
            await collecting


async def test_a_group_that_is_too_old_is_dropped_and_aborted() -> None:
    async with held(2, version=1, max_lag=1) as (server, batcher):
        source = prompts()
        batch = await batcher.collect(source, 1, version=1, over_sample=2.0, tail=Carry())
        assert ids(batch.carried) == ["1"]
        server.commit(3)
        server.let_go |= {3}
        batch = await batcher.collect(source, 1, version=3)
        assert ids(batch.finished) == ["3"]
        assert fates(batch.dropped) == [("1", DropReason.STALE)]
        assert 1 in batch.dropped.groups[0].versions
        await until(lambda: server.running == 0)
        assert server.requests[-1].min_weight_version == 2


async def test_what_grows_too_old_while_a_batch_is_collected_is_replaced() -> None:
    """A group that was begun under version 1 ends in a batch for version 3."""
    async with held(version=1, max_lag=2) as (server, batcher):
        source = prompts()
        collecting = asyncio.create_task(batcher.collect(source, 1, version=2))
        await begun(batcher, "1")
        collecting.cancel()
        await asyncio.wait([collecting])
        server.commit(4)
        server.let_go |= {2}
        batch = await batcher.collect(source, 1, version=4)
        assert (ids(batch.finished), fates(batch.dropped)) == (["2"], [("1", DropReason.STALE)])


async def test_a_bound_that_no_server_meets_is_told() -> None:
    async with held(1, version=1, max_lag=1, weights_timeout=0.2) as (server, batcher):
        with pytest.raises(StalenessError, match="version 1, and none reached version 4"):
            await batcher.collect(prompts(), 1, version=5)
        assert not server.requests
        with pytest.raises(StalenessError):
            await batcher.collect(prompts(), 1, version=5)


async def test_weights_without_a_version_meet_no_bound() -> None:
    async with held(1, max_lag=100, weights_timeout=0.1) as (_, batcher):
        with pytest.raises(StalenessError, match="serve weights without a version"):
            await batcher.collect(prompts(), 1, version=0)


async def test_weights_that_are_still_coming_are_waited_for() -> None:
    async with (
        HeldServer({1}, version=1) as server,
        fleet_of(server, probe_interval=0.05) as fleet,
        batcher_of(fleet, max_lag=0) as batcher,
    ):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1, version=2))
        await asyncio.sleep(0.1)
        assert not server.requests
        server.commit(2)
        assert (await collecting).groups[0].versions == {2}


async def test_carried_groups_outlive_a_rollback_and_go_on_under_it() -> None:
    """They were begun when nothing below 9 was let in, which will not come again."""
    server = HeldServer(set(), version=10)
    async with (
        server,
        fleet_of(server, probe_interval=0.02) as fleet,
        batcher_of(fleet, max_lag=1) as batcher,
    ):
        was_published(fleet, WeightTag(10, 0, "any", 0))
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await begun(batcher, "1")
        collecting.cancel()
        await asyncio.wait([collecting])
        assert {r.min_weight_version for r in server.requests} == {9}
        server.interrupt()
        server.commit(5)
        was_published(fleet, WeightTag(5, 1, "any", 1), rollback=True)
        server.let_go |= {1}
        batch = await batcher.collect(prompts(2), 1)
        assert (batch.version, ids(batch.finished)) == (5, ["1"])
        assert batch.groups[0].versions == {10, 5}


async def test_servers_that_somebody_else_rolled_back_let_the_version_fall() -> None:
    async with (
        HeldServer({2}, version=10) as server,
        fleet_of(server, probe_interval=0.02) as fleet,
        batcher_of(fleet, max_lag=1) as batcher,
    ):
        source = prompts()
        await batcher.collect(source, 1, version=10, over_sample=2.0, tail=Carry())
        server.commit(5)
        await until(lambda: fleet._pool.servers[0].version == 5)
        with pytest.raises(ValueError, match="unless servers are rolled back"):
            await batcher.collect(source, 1, version=4)
        server.let_go |= {1}
        batch = await batcher.collect(source, 1, version=5)
        assert ids(batch.finished) == ["1"]
        assert batch.groups[0].versions == {10, 5}


async def test_versions_rise() -> None:
    async with held(1, 2, version=9) as (_, batcher):
        source = prompts()
        await batcher.collect(source, 1, version=8)
        for lower in (7, None):
            with pytest.raises(ValueError, match="versions rise"):
                await batcher.collect(source, 1, version=lower)
        assert (await batcher.collect(source, 1, version=8)).version == 8


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
        ({"weights_timeout": -1.0}, "weights_timeout is -1.0"),
        ({"options": {"request_id": "a"}}, "request_id: the batcher's own"),
        ({"options": {"session_id": "a", "max_weight_version": 1}}, "session_id, max_weight"),
    ],
)
def test_a_batcher_that_cannot_be(wrong: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        batcher_of(Fleet(["127.0.0.1:1"]), **wrong)


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

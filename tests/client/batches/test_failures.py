"""Samples that fail, against servers that do what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
import torch
from client.batches.support import QUICK, batcher_of, fleet_of, ids, prompts
from client.scripted import Sequence, expected_token, scripted, until
from rollwire.v1 import common_pb2
from rollwire_client import (
    CallbackError,
    ClosedError,
    DropReason,
    ErrorScope,
    InvalidRequestError,
    NotFiniteError,
    Prompt,
    RefusedError,
    Retries,
    RolloutFailedError,
    Sampling,
    StepFailedError,
    TimedOutError,
    Trajectory,
)
from rollwire_client._fleet.router import WaitReason
from rollwire_client._fleet.server_pool import ServerPool
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from pathlib import Path

LENGTH = 6
SHORT = Sampling(max_new_tokens=LENGTH)
NOT_FINITE = grpc.StatusCode.INTERNAL, "NOT_FINITE"


def fails(code: grpc.StatusCode, reason: str, *, after: int = 2):
    """A script: some tokens, and then an error."""

    async def script(sequence: Sequence) -> None:
        await sequence.send(after)
        await sequence.fail(code, reason)

    return script


async def lost(sequence: Sequence) -> None:
    await sequence.send(2)
    await sequence.cut()


@contextlib.asynccontextmanager
async def one(*scripts, **options: object):
    """A batcher of one sample a group, over a server that plays the scripts and then does well."""
    async with scripted() as servers:
        server = servers[0]
        server.scripts.extend(scripts)
        options = {"group_size": 1, "sampling": SHORT, **options}
        async with fleet_of(server, retries=QUICK) as fleet, batcher_of(fleet, **options) as made:
            yield server, made


def whole(number: int = 1) -> tuple[int, ...]:
    return tuple(expected_token([number], i) for i in range(LENGTH))


def outputs(batch) -> list[tuple[int, ...]]:
    return [s.trajectory.token_ids for group in batch.groups for s in group.samples]


async def test_what_the_fleet_gave_up_goes_on_from_its_tokens() -> None:
    async with one(lost) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert outputs(batch) == [whole()]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2]
    first, second = server.requests
    assert first.sampling.seed == second.sampling.seed


async def test_a_sample_that_a_server_failed_at_is_drawn_anew_and_alone() -> None:
    async with one(fails(*NOT_FINITE), group_size=3) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert outputs(batch) == [whole()] * 3
    assert len(server.requests) == 4
    seeds = [request.sampling.seed for request in server.requests]
    assert len(set(seeds)) == 4
    assert not any(request.output_token_ids for request in server.requests)


async def test_a_group_that_servers_fail_at_again_and_again_is_dropped_and_replaced() -> None:
    async with one(*[fails(*NOT_FINITE)] * 3, refills=2) as (_, batcher):
        batch = await batcher.collect(prompts(), 1)
        assert ids(batch.finished) == ["2"]
        (dropped,) = batch.dropped.groups
        assert (dropped.prompt.id, dropped.dropped) == ("1", DropReason.FAILED)
        assert isinstance(dropped.error, NotFiniteError)


async def test_what_servers_fail_at_again_and_again_is_dropped_too() -> None:
    """The fleet tries elsewhere before it gives up; the group ends all the same."""

    async def internal(sequence: Sequence) -> None:
        if list(sequence.request.prompt_token_ids) == [1]:
            await sequence.fail(grpc.StatusCode.INTERNAL, "INTERNAL")
        else:
            await sequence.rest()

    async with one(refills=1) as (server, batcher):
        server.default = internal
        batch = await batcher.collect(prompts(), 1)
    assert ids(batch.finished) == ["2"]
    (dropped,) = batch.dropped.groups
    assert repr(batch.dropped).startswith("Part(groups=1, 1 failed")
    assert (dropped.prompt.id, dropped.dropped) == ("1", DropReason.FAILED)
    assert isinstance(dropped.error, RolloutFailedError)


async def test_servers_that_fail_at_every_group_are_told() -> None:
    async with one(refills=0) as (server, batcher):
        server.default = fails(*NOT_FINITE)
        with pytest.raises(NotFiniteError) as caught:
            await batcher.collect(prompts(), 2)
        assert "Groups dropped in a row" in caught.value.__notes__[-1]
        assert caught.value.__notes__[-1].endswith(": 9.")
        assert (batcher.handed_out, batcher.taken) == (0, 9)


async def test_a_step_that_fails_at_a_prompt_everywhere_drops_its_group(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def poisoned(sequence: Sequence) -> None:
        if list(sequence.request.prompt_token_ids) == [2]:
            await sequence.fail(grpc.StatusCode.INTERNAL, "STEP_FAILED", "the engine's step failed")
        else:
            await sequence.rest()

    async with scripted(2) as servers:
        for server in servers:
            server.default = poisoned
        async with fleet_of(*servers) as fleet, batcher_of(fleet, sampling=SHORT) as batcher:
            batch = await batcher.collect(prompts(), 3)
            batcher.save(tmp_path / "buffer")
            ready = [member.problem for member in fleet._pool.servers]
        async with fleet_of(*servers) as fleet, batcher_of(fleet, sampling=SHORT) as again:
            again.load(tmp_path / "buffer")
            counted = again.taken, again.handed_out, again.dropped
            rest = await again.collect(prompts(5), 1)
    assert ids(batch.finished) == ["1", "3", "4"]
    (dropped,) = batch.dropped.groups
    assert (dropped.prompt.id, dropped.dropped) == ("2", DropReason.FAILED)
    assert isinstance(dropped.error, StepFailedError)
    assert ready == [None, None]  # it was not blamed on the servers
    (told,) = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
    assert "prompt '2' (epoch 0) is dropped as failed" in told
    assert "the engine's step failed (STEP_FAILED)" in told
    assert counted == (4, 3, 1)
    assert ids(rest.finished) == ["5"]
    assert not rest.dropped.groups


async def test_a_prompt_that_every_server_gives_up_is_dropped_in_the_end() -> None:
    """As one that crashes the process would be: told as interrupted, or as a lost link."""

    async def poisoned(sequence: Sequence) -> None:
        if list(sequence.request.prompt_token_ids) == [1]:
            await sequence.finish("INTERRUPTED", message="the engine's step raised")
        else:
            await sequence.rest()

    async with one(refills=1) as (server, batcher):
        server.default = poisoned
        batch = await batcher.collect(prompts(), 1)
    assert ids(batch.finished) == ["2"]
    (dropped,) = batch.dropped.groups
    assert (dropped.prompt.id, dropped.dropped) == ("1", DropReason.FAILED)
    assert "the engine's step raised" in str(dropped.error)


async def test_what_the_fleet_gives_up_with_new_tokens_each_time_goes_on() -> None:
    async with one(*[lost] * 2, refills=1) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert outputs(batch) == [whole()]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2, 4]


async def test_a_fleet_without_a_server_is_told_and_nothing_is_lost() -> None:
    async with scripted() as (server,):
        server.scripts = [lost]
        server.default = drains
        quick = Retries(attempts=5, seconds=0.2, first_delay=0.001)
        async with (
            fleet_of(server, retries=quick, probe_interval=0.02) as fleet,
            batcher_of(fleet, group_size=1, sampling=SHORT, refills=0) as batcher,
        ):
            source = prompts()
            with pytest.raises(RolloutFailedError, match="is draining") as caught:
                await batcher.collect(source, 1)
            assert caught.value.scope is ErrorScope.SERVER
            server.default = Sequence.rest
            server.state = common_pb2.SERVER_STATE_SERVING
            await until(lambda: fleet._pool.servers[0].problem is None)
            batch = await batcher.collect(source, 1)
    assert outputs(batch) == [whole()]
    assert not batch.dropped.groups


async def test_a_batch_waits_for_room_for_as_long_as_it_takes() -> None:
    """The servers are busy, perhaps with the rest of the batch."""
    refusals = 0

    async def full_for_long(sequence: Sequence) -> None:
        nonlocal refusals
        if (refusals := refusals + 1) <= 20:
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            await sequence.fail(code, "QUEUE_FULL", retry_after=0.01)
        else:
            await sequence.rest()

    async with scripted() as (server,):
        server.default = full_for_long
        async with (
            fleet_of(server, retries=Retries(seconds=0.02)) as fleet,
            batcher_of(fleet, group_size=1, sampling=SHORT, refills=0) as batcher,
        ):
            batch = await batcher.collect(prompts(), 1)
    assert outputs(batch) == [whole()]
    assert not batch.dropped.groups


@pytest.mark.parametrize("seconds", [0.0, 0.1])
async def test_a_batch_that_waits_for_room_says_so_and_lets_others_work(
    seconds: float, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However short the rollouts are that find none."""
    monkeypatch.setattr(WaitReason.QUEUE, "grace", 0.5)
    rollouts = 0
    begin = ServerPool.rollout

    def counted(*arguments: object, **options: object) -> object:
        nonlocal rollouts
        rollouts += 1
        return begin(*arguments, **options)

    monkeypatch.setattr(ServerPool, "rollout", counted)

    async def full(sequence: Sequence) -> None:
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
        await sequence.fail(code, "QUEUE_FULL", retry_after=0.3)

    async with scripted() as (server,):
        server.default = full
        async with (
            fleet_of(server, retries=Retries(seconds=seconds)) as fleet,
            batcher_of(fleet, group_size=1, sampling=SHORT, refills=0) as batcher,
        ):
            collecting = asyncio.create_task(batcher.collect(prompts(), 1))
            await until(lambda: "no server has room for them" in caplog.text)
            assert not collecting.done()
            server.default = Sequence.rest
            batch = await collecting
    assert outputs(batch) == [whole()]
    assert rollouts < 100


async def drains(sequence: Sequence) -> None:
    sequence.server.state = common_pb2.SERVER_STATE_DRAINING
    await sequence.finish("INTERRUPTED", message="it drains")


async def test_a_prompt_that_is_refused_is_dropped_and_the_run_goes_on() -> None:
    refused = fails(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", after=0)
    async with one(refused) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
        assert len(server.requests) == 2
    assert ids(batch.finished) == ["2"]
    (dropped,) = batch.dropped.of(DropReason.FAILED).groups
    assert isinstance(dropped.error, InvalidRequestError)
    assert "It is of prompt '1'" in dropped.error.__notes__[0]


async def test_prompts_that_end_at_once_do_not_hide_those_that_take_longer() -> None:
    """More than are enough to raise are refused before the first one is complete."""
    let_go = asyncio.Event()

    async def too_long(sequence: Sequence) -> None:
        (number,) = sequence.request.prompt_token_ids
        if number % 4:
            await sequence.fail(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
        else:
            await let_go.wait()
            await sequence.rest()

    async with one() as (server, batcher):
        server.default = too_long
        collecting = asyncio.create_task(batcher.collect(prompts(), 4, over_sample=3.0))
        await until(lambda: len(batcher._buffer.dropped) > 8)
        assert not collecting.done()
        let_go.set()
        batch = await collecting
    assert all(int(group.prompt.id) % 4 == 0 for group in batch.groups)
    assert len(batch.groups) == 4


async def test_a_configuration_that_no_server_takes_is_told_after_few_groups() -> None:
    async with one() as (server, batcher):
        server.default = fails(grpc.StatusCode.INVALID_ARGUMENT, "BAD_SAMPLING", after=0)
        with pytest.raises(InvalidRequestError, match="BAD_SAMPLING"):
            await batcher.collect(prompts(), 2)
        assert batcher.taken == 9


async def test_a_time_that_is_up_for_every_group_is_told() -> None:
    async with one() as (server, batcher):
        server.default = fails(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT")
        with pytest.raises(TimedOutError):
            await batcher.collect(prompts(), 1)


async def test_a_sample_whose_time_is_up_is_cut_and_never_refilled() -> None:
    timed_out = fails(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT")
    async with one(timed_out, options={"timeout": 60.0}) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert ids(batch.finished) == ["2"]
    (cut,) = batch.dropped.groups
    assert (cut.dropped, batch.dropped.lengths) == (DropReason.CUT, (2,))
    assert len(server.requests) == 2


async def test_a_refusal_that_is_not_the_prompt_s_fault_keeps_its_group() -> None:
    refused = fails(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    async with one(refused) as (server, batcher):
        source = prompts()
        with pytest.raises(RefusedError):
            await batcher.collect(source, 1)
        batch = await batcher.collect(source, 1)
    assert ids(batch.finished) == ["1"]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2]


async def test_a_batcher_that_is_closed_starts_nothing_again() -> None:
    refused = fails(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    async with one(refused) as (server, batcher):
        with pytest.raises(RefusedError):
            await batcher.collect(prompts(), 1)
        await batcher.close()
        with pytest.raises(ClosedError):
            await batcher.collect(prompts(), 1)
        await asyncio.sleep(0.1)
        assert len(server.requests) == 1


async def test_a_sample_that_was_cut_ends_its_group_at_once() -> None:
    timed_out = fails(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT")

    async def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "1":
            await asyncio.Event().wait()
        return 1.0

    async with one(timed_out, group_size=2, reward=reward) as (_, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert ids(batch.finished) == ["2"]
    assert [group.dropped for group in batch.dropped.groups] == [DropReason.CUT]


async def test_a_reward_that_raises_is_asked_for_again_and_nothing_is_sampled_again() -> None:
    asked: list[str] = []

    def reward(prompt: Prompt, _: Trajectory) -> float:
        asked.append(prompt.id)
        if len(asked) == 1:
            raise LookupError("the judge is away")
        return 1.0

    async with one(reward=reward) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert (batch.finished.rewards, asked) == ((1.0,), ["1", "1"])
    assert len(server.requests) == 1


async def cancelled(*_: object) -> float:
    judge = asyncio.create_task(asyncio.sleep(60))
    judge.cancel()
    await judge
    return 1.0


def away(*_: object) -> float:
    raise LookupError("the judge is away")


def returns(value: object):
    return lambda *_: value


NO_REWARDS = [
    (away, r"could not be computed: LookupError\('the judge is away'\)"),
    (lambda *_: next(iter(())), "could not be computed: .*StopIteration"),
    (cancelled, "could not be computed: .*CancelledError"),
    (returns(None), "is None, no finite number"),
    (returns("good"), "is 'good', no finite number"),
    (returns(float("nan")), "is nan, no finite number"),
    (returns(float("inf")), "is inf, no finite number"),
    (returns([1.0, 2.0]), r"is \[1.0, 2.0\], no finite number"),
    (returns(torch.zeros(2)), "no finite number"),
]


@pytest.mark.parametrize(("reward", "told"), NO_REWARDS)
async def test_a_group_without_a_reward_is_dropped_and_the_run_goes_on(
    reward, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def scored(prompt: Prompt, trajectory: Trajectory) -> object:
        return reward() if prompt.id == "2" else 1.0

    async with one(reward=scored, refills=0) as (server, batcher):
        source = prompts()
        first = await batcher.collect(source, 2, prefetch=2)
        batch = await batcher.collect(source, 2)
        assert [group.prompt.id for group in (*first.groups, *batch.groups)] == ["1", "3", "4", "5"]
        (dropped,) = (*first.dropped.groups, *batch.dropped.groups)
        assert (dropped.prompt.id, dropped.dropped) == ("2", DropReason.UNSCORED)
        assert isinstance(dropped.error, CallbackError)
        assert re.search(told, str(dropped.error))
        unscored = first.dropped.of(DropReason.UNSCORED)
        assert (unscored.lengths, unscored.rewards) == ((LENGTH,), ())
        (line,) = [r.getMessage() for r in caplog.records if "is dropped" in r.getMessage()]
        assert "prompt '2' (epoch 0) is dropped as unscored" in line
        assert re.search(told, line)
        assert len(server.requests) == 5


@pytest.mark.parametrize("given", [1, True, np.float32(0.5), np.array(0.5), torch.tensor([0.5])])
async def test_what_counts_as_a_reward(given: object) -> None:
    async with one(reward=returns(given)) as (_, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert batch.finished.rewards == (float(given),)
    assert type(batch.finished.rewards[0]) is float


async def test_a_reward_that_always_fails_is_told_and_the_rest_is_kept() -> None:
    broken = True

    def reward(*_: object) -> float:
        return away() if broken else 1.0

    async with one(reward=reward, refills=0) as (_, batcher):
        source = prompts()
        with pytest.raises(CallbackError, match="the judge is away") as caught:
            await batcher.collect(source, 1)
        assert isinstance(caught.value.__cause__, LookupError)
        assert batcher.taken == 8
        broken = False
        batch = await batcher.collect(source, 1)
    assert len(batch.groups) == 1
    assert len(batch.dropped.of(DropReason.UNSCORED).groups) == 8


async def test_prompts_that_raise_lose_nothing() -> None:
    def broken():
        yield Prompt("1", [1])
        raise OSError("the disk is gone")

    async with one() as (server, batcher):
        with pytest.raises(OSError, match="the disk is gone"):
            await batcher.collect(broken(), 2)
        batch = await batcher.collect(prompts(2), 2)
    assert ids(batch.finished) == ["1", "2"]
    assert len(server.requests) == 2


async def test_a_fleet_that_is_closed_ends_the_batch() -> None:
    async with FakeServer(tokens_per_second=10) as server:
        fleet = fleet_of(server)
        async with fleet, batcher_of(fleet) as batcher:
            collecting = asyncio.create_task(batcher.collect(prompts(), 1))
            await until(lambda: server.running == 2)
            await fleet.close()
            with pytest.raises(ClosedError):
                await collecting

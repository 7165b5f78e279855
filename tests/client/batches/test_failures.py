"""Samples that fail, against servers that do what a script says."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from client.batches.support import QUICK, batcher_of, fleet_of, prompts
from client.scripted import Sequence, expected_token, scripted, until
from rollwire_client import (
    ClosedError,
    DropReason,
    InvalidRequestError,
    NotFiniteError,
    Prompt,
    RefusedError,
    RolloutFailedError,
    Sampling,
    Trajectory,
)
from rollwire_client.testing import FakeServer

LENGTH = 6
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
        options = {"group_size": 1, "sampling": Sampling(max_new_tokens=LENGTH), **options}
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
    assert not server.requests[-1].output_token_ids


async def test_a_group_that_servers_fail_at_again_and_again_is_dropped_and_replaced() -> None:
    async with one(*[fails(*NOT_FINITE)] * 3, refills=2) as (_, batcher):
        batch = await batcher.collect(prompts(), 1)
        assert [group.prompt.id for group in batch.groups] == ["2"]
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
    assert [group.prompt.id for group in batch.groups] == ["2"]
    (dropped,) = batch.dropped.groups
    assert (dropped.prompt.id, dropped.dropped) == ("1", DropReason.FAILED)
    assert isinstance(dropped.error, RolloutFailedError)


async def test_servers_that_fail_at_every_group_are_told() -> None:
    async with one(*[fails(*NOT_FINITE)] * 9, refills=0) as (_, batcher):
        with pytest.raises(NotFiniteError):
            await batcher.collect(prompts(), 2)
        assert batcher.handed_out == 0


async def test_a_fleet_that_gives_up_again_and_again_is_told_and_nothing_is_lost() -> None:
    async with one(*[lost] * 3, refills=2) as (server, batcher):
        source = prompts()
        with pytest.raises(RolloutFailedError):
            await batcher.collect(source, 1)
        batch = await batcher.collect(source, 1)  # it does well by now
    assert outputs(batch) == [whole()]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2, 4, 6]


async def test_a_refusal_is_raised_at_once_and_its_group_dropped() -> None:
    refused = fails(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED", after=0)
    async with one(refused) as (server, batcher):
        source = prompts()
        with pytest.raises(InvalidRequestError) as caught:
            await batcher.collect(source, 1)
        assert "prompt '1'" in caught.value.__notes__[0]
        assert len(server.requests) == 1
        batch = await batcher.collect(source, 1)
    assert [group.prompt.id for group in batch.groups] == ["2"]
    assert [group.dropped for group in batch.dropped.groups] == [DropReason.FAILED]


async def test_a_sample_whose_time_is_up_is_cut_and_never_refilled() -> None:
    timed_out = fails(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT")
    async with one(timed_out, options={"timeout": 60.0}) as (server, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert [group.prompt.id for group in batch.groups] == ["2"]
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
    assert [group.prompt.id for group in batch.groups] == ["1"]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2]


async def test_a_sample_that_was_cut_ends_its_group_whatever_else_happened_to_it() -> None:
    timed_out = fails(grpc.StatusCode.DEADLINE_EXCEEDED, "TIMED_OUT")

    def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "1":
            raise LookupError("the judge is away")
        return 1.0

    async with one(timed_out, group_size=2, reward=reward) as (_, batcher):
        batch = await batcher.collect(prompts(), 1)
    assert [group.prompt.id for group in batch.groups] == ["2"]
    assert [group.dropped for group in batch.dropped.groups] == [DropReason.CUT]


async def test_a_reward_that_is_cancelled_is_told() -> None:
    async def reward(prompt: Prompt, _: Trajectory) -> float:
        judge = asyncio.create_task(asyncio.sleep(60))
        judge.cancel()
        await judge
        return 1.0

    async with one(reward=reward) as (_, batcher):
        with pytest.raises(RuntimeError, match="a sample of prompt '1' was cancelled"):
            await batcher.collect(prompts(), 1)


async def test_a_reward_that_raises_is_asked_for_again_and_nothing_is_sampled_again() -> None:
    asked: list[str] = []

    def reward(prompt: Prompt, _: Trajectory) -> float:
        asked.append(prompt.id)
        if len(asked) == 1:
            raise LookupError("the judge is away")
        return 1.0

    async with one(reward=reward) as (server, batcher):
        source = prompts()
        with pytest.raises(LookupError, match="the judge is away"):
            await batcher.collect(source, 1)
        batch = await batcher.collect(source, 1)
    assert (batch.finished.rewards, asked) == ((1.0,), ["1", "1"])
    assert len(server.requests) == 1


@pytest.mark.parametrize("given", [None, "good", float("nan"), [1.0, 2.0]])
async def test_a_reward_that_is_no_number_is_told(given: object) -> None:
    async with one(reward=lambda *_: given) as (_, batcher):
        with pytest.raises(ValueError, match=r"the reward of prompt '1' is .*, no number"):
            await batcher.collect(prompts(), 1)
        assert batcher.taken == 1


async def test_prompts_that_raise_lose_nothing() -> None:
    def broken():
        yield Prompt("1", [1])
        raise OSError("the disk is gone")

    async with one() as (server, batcher):
        with pytest.raises(OSError, match="the disk is gone"):
            await batcher.collect(broken(), 2)
        batch = await batcher.collect(prompts(2), 2)
    assert [group.prompt.id for group in batch.groups] == ["1", "2"]
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

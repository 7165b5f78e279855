"""Evaluations: whole, of one policy, beside batches."""

from __future__ import annotations

import asyncio
import itertools

import grpc
import pytest
from client.batches.support import HeldServer, batcher_of, fleet_of, ids, prompts
from client.scripted import Sequence, scripted, until
from rollwire_client import (
    Batcher,
    CallbackError,
    DropReason,
    InvalidRequestError,
    Prompt,
    Retries,
    RolloutFailedError,
    Sampling,
    Trajectory,
    WeightVersionError,
)
from rollwire_client.testing import FakeServer


async def test_every_prompt_is_sampled_to_its_end_under_one_version() -> None:
    async with FakeServer(version=4) as server, fleet_of(server) as fleet:
        batcher = Batcher(
            fleet, seed=1, sampling=Sampling(max_new_tokens=5), reward=lambda p, t: float(p.id)
        )
        told = await batcher.evaluate(
            itertools.islice(prompts(), 3),
            samples=2,
            sampling=Sampling(max_new_tokens=3),
            version=4,
        )
    assert ids(told.samples) == ["1", "2", "3"]
    assert told.samples.lengths == (3,) * 6
    assert told.samples.rewards == (1.0, 1.0, 2.0, 2.0, 3.0, 3.0)
    assert (told.version, told.digest) == (4, 0)
    bounds = {(r.min_weight_version, r.max_weight_version) for r in server.requests}
    assert bounds == {(4, 4)}


async def test_weights_without_a_version_are_told_apart_by_their_digest() -> None:
    async with FakeServer() as one, FakeServer() as other, fleet_of(one, other) as fleet:
        batcher = Batcher(fleet, seed=1, group_size=1, sampling=Sampling(max_new_tokens=3))
        told = await batcher.evaluate(itertools.islice(prompts(), 4))
        assert (told.version, told.digest) == (None, 0)
        assert one.requests
        assert other.requests
        other.commit(None)
        with pytest.raises(WeightVersionError, match="2 different weights"):
            await batcher.evaluate(itertools.islice(prompts(), 4))


async def test_what_cannot_be_evaluated() -> None:
    async with FakeServer(version=7) as server, fleet_of(server) as fleet:
        batcher = batcher_of(fleet)
        for samples in (0, -1):
            with pytest.raises(ValueError, match="from 1 on"):
                await batcher.evaluate([], samples=samples)
        with pytest.raises(ValueError, match="has a seed"):
            await batcher.evaluate([], sampling=Sampling(seed=1))
        told = await batcher.evaluate(
            itertools.islice(prompts(), 1), sampling=Sampling(max_new_tokens=2)
        )
        assert told.version == 7  # though nobody here has published it
        assert (await batcher.evaluate([])).version is None


async def test_a_prompt_that_cannot_be_sampled_is_named_and_costs_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def reward(prompt: Prompt, _: Trajectory) -> float:
        if prompt.id == "unscored":
            raise LookupError("no such answer")
        return 1.0

    async def too_long(sequence: Sequence) -> None:
        if len(sequence.request.prompt_token_ids) > 2:
            await sequence.fail(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_EXCEEDED")
        else:
            await sequence.rest()

    asked = [
        Prompt("a", [1]),
        Prompt("too long", [1, 2, 3]),
        Prompt("b", [2]),
        Prompt("negative", [-1]),
        Prompt("unscored", [3]),
        Prompt("c", [4]),
    ]
    async with scripted() as (server,), fleet_of(server) as fleet:
        server.default = too_long
        named = {"group_size": 1, "sampling": Sampling(max_new_tokens=4), "reward": reward}
        async with batcher_of(fleet, refills=0, **named) as batcher:
            told = await batcher.evaluate(asked)
            assert ids(told.samples) == ["a", "b", "c"]
            assert told.samples.rewards == (1.0, 1.0, 1.0)
            assert [(group.prompt.id, group.dropped) for group in told.failed.groups] == [
                ("too long", DropReason.FAILED),
                ("negative", DropReason.FAILED),
                ("unscored", DropReason.UNSCORED),
            ]
            assert told.failed.of(DropReason.UNSCORED).lengths == (4,)
            lines = {r.getMessage().partition(" as ")[0] for r in caplog.records}
            assert lines == {
                "prompt 1 of the evaluation, 'too long', is left out",
                "prompt 3 of the evaluation, 'negative', is left out",
                "prompt 4 of the evaluation, 'unscored', is left out",
            }
            with pytest.raises(InvalidRequestError, match="CONTEXT_EXCEEDED") as caught:
                await batcher.evaluate(asked[1:2])  # nothing else to tell
            assert "It is of prompt 0 of the evaluation, 'too long'." in caught.value.__notes__


async def test_a_reward_that_always_fails_ends_an_evaluation_early() -> None:
    def reward(*_: object) -> float:
        raise LookupError("the judge is away")

    async with FakeServer() as server, fleet_of(server) as fleet:
        named = {"group_size": 1, "sampling": Sampling(max_new_tokens=4), "reward": reward}
        async with batcher_of(fleet, refills=0, **named) as batcher:
            with pytest.raises(CallbackError, match="the judge is away"):
                await batcher.evaluate(itertools.islice(prompts(), 2000))
        assert len(server.requests) < 2000


async def test_endless_prompts_can_be_given_up() -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await batcher_of(fleet).evaluate(prompts())
        assert not server.requests


async def test_a_version_that_nobody_comes_to_serve_is_told() -> None:
    async with (
        FakeServer(version=3) as server,
        fleet_of(server, retries=Retries(seconds=0.3)) as fleet,
        batcher_of(fleet, refills=0) as batcher,
    ):
        with pytest.raises(RolloutFailedError, match="did not reach version 9"):
            await batcher.evaluate(itertools.islice(prompts(), 1), version=9)


async def test_batches_go_on_beside_it() -> None:
    async with (
        HeldServer({2, 3}) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet) as batcher,
    ):
        source = prompts()
        collecting = asyncio.create_task(batcher.collect(source, 1))
        await until(lambda: server.running == 2)
        told = await batcher.evaluate(itertools.islice(source, 2))
        assert ids(told.samples) == ["2", "3"]
        assert not collecting.done()
        server.let_go.add(1)
        assert ids((await collecting).finished) == ["1"]


async def test_one_that_is_left_ends_its_sequences() -> None:
    async with (
        HeldServer(set()) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet) as batcher,
    ):
        evaluating = asyncio.create_task(batcher.evaluate(itertools.islice(prompts(), 3)))
        await until(lambda: server.running == 3)
        evaluating.cancel()
        await asyncio.wait([evaluating])
        await until(lambda: server.running == 0)

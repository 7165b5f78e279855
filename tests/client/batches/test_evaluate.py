"""Evaluations: whole, of one policy, beside batches."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from client.batches.support import HeldServer, batcher_of, fleet_of, prompts
from client.scripted import until
from rollwire_client import Batcher, Retries, RolloutFailedError, Sampling, WeightVersionError
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
    assert [group.prompt.id for group in told.samples.groups] == ["1", "2", "3"]
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
        with pytest.raises(RolloutFailedError, match="did not come to serve version 9"):
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
        assert [group.prompt.id for group in told.samples.groups] == ["2", "3"]
        assert not collecting.done()
        server.let_go.add(1)
        assert [group.prompt.id for group in (await collecting).groups] == ["1"]


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

"""What a batch reads from its prompts."""

from __future__ import annotations

import itertools

import pytest
from client.batches.support import batcher_of, fates, fleet_of, held, ids, prompts
from rollwire_client import DropReason, InvalidRequestError, Prompt, Sampling
from rollwire_client.testing import FakeServer


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

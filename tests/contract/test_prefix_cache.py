"""The shared prompt of a group is computed once, and never taken from weights of before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.calls import Stream, generate, request
from support.publishing import publish, random_weights

if TYPE_CHECKING:
    from support.calls import Api

PROMPT = [*range(1, 200)]


async def group(api: Api, seed: int) -> list[int]:
    """Four sequences of one prompt; how much of it each took over."""
    stream = Stream(api)
    for handle in range(4):
        await stream.start(handle, request(PROMPT, 8, seed=seed + handle))
    outputs = await stream.all()
    finishes = [output.finish for output in outputs.values()]
    return [finish.cached_prompt_tokens for finish in finishes if finish is not None]


async def test_a_group_computes_its_prompt_once_for_each_policy(api: Api) -> None:
    for number in (1, 2):
        await publish(api, await random_weights(api, number))
        cached = sorted(await group(api, seed=number))
        assert cached[0] == 0, "what was computed under other weights was taken over"
        assert min(cached[1:]) >= len(PROMPT) // 2
        assert min(await group(api, seed=number)) >= len(PROMPT) // 2


async def test_what_is_taken_over_changes_nothing(api: Api) -> None:
    await generate(api, request(PROMPT[:150], 1))
    shared = await generate(api, request(PROMPT, 30, seed=4))
    assert shared.finish is not None
    assert shared.finish.cached_prompt_tokens > 0
    tensors = await random_weights(api, 7)
    for _ in range(2):  # the same weights anew: what the cache holds is of an older revision
        await publish(api, tensors)
        fresh = await generate(api, request(PROMPT, 30, seed=4))
        assert fresh.finish is not None
        assert fresh.finish.cached_prompt_tokens == 0
        taken = await generate(api, request(PROMPT, 30, seed=4))
        assert taken.finish is not None
        assert taken.finish.cached_prompt_tokens > 0
        assert taken.tokens == fresh.tokens
        assert taken.logprobs == pytest.approx(fresh.logprobs, abs=1e-4)

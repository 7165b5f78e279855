"""How often a caller hears of its sequences: the tokens are the same, the messages are fewer."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.calls import Api, Generation, Stream, generate, request, until

TOKENS = 200
AT_THE_END = 1e6  # seconds


async def streamed(api: Api, interval: float | None) -> tuple[Stream, float]:
    stream = Stream(api)
    began = time.monotonic()
    for seed in range(3):
        await stream.start(seed, request((3, 1), TOKENS, seed=seed, interval=interval))
    await stream.all()
    return stream, time.monotonic() - began


async def test_an_interval_changes_the_number_of_messages_and_nothing_else(api: Api) -> None:
    every_step, _ = await streamed(api, None)
    interval = 0.05
    seldom, seconds = await streamed(api, interval)
    for seed, output in every_step.outputs.items():
        rare = seldom.outputs[seed]
        assert rare.finish is not None
        assert (rare.tokens, rare.finish.output_tokens) == (output.tokens, TOKENS)
        assert rare.logprobs == pytest.approx(output.logprobs, abs=1e-3)
        assert rare.offset == 0
    ends = 3  # each sequence's end is told at once
    assert seldom.messages <= seconds / interval + ends + 1


async def test_the_end_brings_what_was_held_back(api: Api) -> None:
    wanted = await generate(api, request((3, 1), TOKENS, seed=1))
    alone = await generate(api, request((3, 1), TOKENS, seed=1, interval=AT_THE_END))
    assert (alone.tokens, alone.messages) == (wanted.tokens, 1)
    stream, _ = await streamed(api, AT_THE_END)
    assert stream.messages <= 3
    assert stream.outputs[1].tokens == wanted.tokens


async def test_who_hears_seldom_and_who_hears_each_step_share_a_stream(api: Api) -> None:
    stream = Stream(api)
    await stream.start(1, request((3, 1), 4000, seed=1, interval=AT_THE_END))
    await stream.start(2, request((3, 1), TOKENS, seed=2))
    while stream.outputs[2].finish is None:
        assert await stream.read()
    assert stream.outputs[2].messages > 1
    assert stream.outputs[1].messages == 0
    await stream.abort(1)
    await stream.all()
    assert stream.outputs[1].reason == "ABORTED"


async def test_an_abort_delivers_what_was_held_back(api: Api) -> None:
    generation = Generation(api, request((3, 1), 4000, request_id="held", interval=AT_THE_END))
    reading = asyncio.create_task(generation.all())
    before = (await api.info()).sampled_tokens

    async def sampled() -> bool:
        return (await api.info()).sampled_tokens >= before + 20

    await until(sampled)
    assert not generation.output.tokens
    await api.abort("held")
    output = await reading
    assert output.reason == "ABORTED"
    assert output.finish is not None
    assert output.finish.output_tokens == len(output.tokens) >= 20


async def test_a_newer_stream_that_wants_each_step_picks_up_what_was_held_back(api: Api) -> None:
    fields = {"request_id": "picked up", "seed": 3, "grace": 10.0}
    whole = await generate(api, request((3, 1), TOKENS, seed=3))
    rare = Generation(api, request((3, 1), 4000, interval=AT_THE_END, **fields))
    reading = asyncio.create_task(rare.all())
    await api.until(lambda info: info.running_sequences == 1)
    each_step = Generation(api, request((3, 1), 4000, **fields))
    output = await each_step.some(20)
    assert output.offset == 0
    assert whole.tokens[: len(output.tokens)] == output.tokens[:TOKENS]
    await api.abort("picked up")
    assert (await each_step.all()).reason == "ABORTED"
    assert (await reading).reason == "SUPERSEDED"
    assert not rare.output.tokens

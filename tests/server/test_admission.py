"""Who runs when: oldest first, running sequences keep their pace, a full cache costs only time."""

from __future__ import annotations

import math
import uuid
from typing import TYPE_CHECKING

import grpc
import pytest
from support.calls import Stream, connected, reason_of, request

if TYPE_CHECKING:
    from support.servers import StartServer

LONG = 3900


async def test_a_long_prompt_does_not_stop_what_runs(start_server: StartServer) -> None:
    """A step computes so many prompt tokens at the most, and one token of all that decodes."""
    budget, prompt = 64, 2000
    async with connected(start_server("--prefill-tokens", str(budget)).address) as api:
        stream = Stream(api)
        await stream.start(1, request((1,), LONG, ignore_eos=True))
        while not stream.outputs[1].tokens:
            await stream.read()
        before = len(stream.outputs[1].tokens)
        await stream.start(2, request([2] * prompt, 1))
        while not stream.outputs[2].tokens:
            await stream.read()
        assert len(stream.outputs[1].tokens) - before >= math.ceil(prompt / budget) - 1
        await stream.abort(1)
        await stream.all()
        await api.idle()


async def test_streams_of_one_client_have_a_limit(start_server: StartServer) -> None:
    flags = ("--engine", "synthetic", "--max-streams-per-client", "2")
    async with connected(start_server(*flags).address) as api:
        first, second = Stream(api), Stream(api)
        for stream in (first, second):
            await stream.start(1, request((1,), 3))
            assert await stream.read()
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Stream(api).all()
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(caught.value) == "TOO_MANY_STREAMS"
        await first.all()
        third = Stream(api)
        await third.start(1, request((1,), 3))
        assert (await third.all())[1].reason == "LENGTH"
        await second.all()


async def test_the_oldest_comes_first(start_server: StartServer) -> None:
    async with connected(start_server("--max-running", "1").address) as api:
        await api.pause("while they arrive")
        stream = Stream(api)
        for handle in range(8):
            await stream.start(handle, request((handle + 1,), 5, request_id=uuid.uuid4().hex))
        await api.held(8)
        await api.resume()
        ended: list[int] = []
        while len(ended) < 8:
            assert await stream.read()
            done = [h for h, output in stream.outputs.items() if output.finish is not None]
            ended += [handle for handle in done if handle not in ended]
        assert ended == sorted(ended)


@pytest.mark.slow
async def test_a_full_cache_costs_time_and_no_sequence(start_server: StartServer) -> None:
    """Twelve sequences that fill the context each, where the cache holds three."""
    context = 256
    flags = ("--max-running", "3", "--context-length", str(context))
    async with connected(start_server(*flags).address) as api:
        stream = Stream(api)
        for handle in range(12):
            prompt = [handle + 1] * (10 + 20 * handle)
            await stream.start(handle, request(prompt, None, ignore_eos=True))
        outputs = await stream.all()
        for handle, output in outputs.items():
            assert output.reason == "LENGTH"
            assert len(output.tokens) == context - (10 + 20 * handle)
        await api.idle()

"""Many prompts at once, several samples of each, against fake and scripted servers."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
from client.scripted import ScriptedServer, Sequence, until
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_client import (
    Fleet,
    InvalidRequestError,
    NotFiniteError,
    Retries,
    RollwireError,
    Sampling,
    Timeouts,
)
from rollwire_client.testing import FakeServer
from support.examples import examples

CLOSE = Timeouts(close=0.2)


def run_lengths(prompt: tuple[int, ...], output: tuple[int, ...]) -> int:
    """Ends early or late as the prompt says, so that the order of ends is another one."""
    return 7 if len(output) == prompt[0] % 5 else 100 + len(output)


@settings(max_examples=examples(25))
@given(prompts=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=3), max_size=6),
       n=st.integers(1, 4), seed=st.none() | st.integers(0, (1 << 64) - 1))  # fmt: skip
def test_trajectories_stand_where_their_prompts_do(
    prompts: list[list[int]], n: int, seed: int | None
) -> None:
    sampling = Sampling(max_new_tokens=6, stop_token_ids=[7], seed=seed)

    async def run() -> None:
        async with (
            FakeServer(run_lengths) as one,
            FakeServer(run_lengths) as two,
            Fleet([one.address, two.address], timeouts=CLOSE) as fleet,
        ):
            done = await fleet.generate_many(prompts, sampling, n=n)
            requests = [*one.requests, *two.requests]
        assert [[list(t.prompt_ids) for t in group] for group in done] == [[p] * n for p in prompts]
        assert all(len(t.token_ids) == t.prompt_ids[0] % 5 + 1 for group in done for t in group)
        seeds = {r.request_id: r.sampling.seed for r in requests if r.sampling.HasField("seed")}
        numbered = [t.request_id for group in done for t in group]
        if seed is not None:
            assert [seeds[r] for r in numbered] == [
                (seed + k) % (1 << 64) for k in range(n * len(prompts))
            ]
        sessions = {r.request_id: r.session_id for r in requests}
        of_group = [{sessions[t.request_id] for t in group} for group in done]
        assert all(len(ids) == 1 for ids in of_group)
        assert len(set.union(set(), *of_group)) == len(prompts)

    asyncio.run(run())


async def test_samples_of_a_prompt_share_a_server(pair: list[ScriptedServer]) -> None:
    async with Fleet([s.address for s in pair], timeouts=CLOSE) as fleet:
        prompts = np.arange(1, 13).reshape(6, 2)  # a row each
        done = await fleet.generate_many(prompts, Sampling(max_new_tokens=5), n=3)
    assert [group[0].prompt_ids for group in done] == [tuple(row) for row in prompts.tolist()]
    assert all(len({t.servers for t in group}) == 1 for group in done)
    assert len({group[0].servers for group in done}) == 2


async def test_what_is_wrong_is_refused_before_anything_is_sampled(server: ScriptedServer) -> None:
    async with Fleet([server.address], timeouts=CLOSE) as fleet:
        with pytest.raises(InvalidRequestError, match=r"prompts\[1\]") as caught:
            await fleet.generate_many([[1], [-2]])
        assert set(caught.value.violations) == {"prompts[1]"}
        for wrong in (0, 1.5, True):
            with pytest.raises((TypeError, ValueError), match="n is"):
                await fleet.generate_many([[1]], n=wrong)
        with pytest.raises(TypeError, match="request_id"):
            await fleet.generate_many([[1]], request_id="mine")
        with pytest.raises(InvalidRequestError, match=r"sampling\.seed"):
            await fleet.generate_many([[1]], Sampling(seed="7"))
        with pytest.raises(TypeError, match="generate_many"):
            await fleet.generate([1], n=2)
        assert await fleet.generate_many([]) == []
    assert server.requests == []


async def test_an_error_ends_the_others_and_says_whose_it_is(server: ScriptedServer) -> None:
    async def hang(_: Sequence) -> None:
        await asyncio.Event().wait()

    async def fail(sequence: Sequence) -> None:
        await until(lambda: len(server.requests) == 4)
        await sequence.fail(grpc.StatusCode.INTERNAL, "NOT_FINITE")

    server.scripts = [hang, hang, hang, fail]
    async with Fleet([server.address], timeouts=CLOSE) as fleet:
        with pytest.raises(NotFiniteError) as caught:
            await fleet.generate_many([[1], [2]], n=2)
        assert caught.value.__notes__ == ["It is of prompt 1, sample 1."]
        for _ in range(3):
            await server.aborted.get()


async def test_full_queues_are_waited_for(server: ScriptedServer) -> None:
    async def full(sequence: Sequence) -> None:
        await sequence.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.05)

    server.scripts = [full] * 4
    impatient = Retries(seconds=0)
    async with Fleet([server.address], retries=impatient, timeouts=CLOSE) as fleet:
        ((done,),) = await fleet.generate_many([[1]], Sampling(max_new_tokens=3))
    assert done.complete
    assert len(server.requests) == 5


async def test_full_queues_are_waited_for_as_long_as_the_timeout_says(
    server: ScriptedServer,
) -> None:
    async def full(sequence: Sequence) -> None:
        await sequence.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.05)

    server.scripts = [full] * 1000
    impatient = Retries(seconds=0)
    async with Fleet([server.address], retries=impatient, timeouts=CLOSE) as fleet:
        async with asyncio.timeout(60):
            with pytest.raises(RollwireError, match="its queue is full") as caught:
                await fleet.generate_many([[1]], timeout=0.5)
    assert caught.value.__notes__ == ["It is of prompt 0, sample 0."]
    assert 1 < len(server.requests) < 1000
    timeouts = [request.timeout.ToTimedelta().total_seconds() for request in server.requests]
    assert timeouts == sorted(timeouts, reverse=True)


async def test_minus_one_keeps_all_tokens(server: ScriptedServer) -> None:
    async with Fleet([server.address], timeouts=CLOSE) as fleet:
        await fleet.generate([1], Sampling(top_k=-1))
        with pytest.raises(InvalidRequestError, match=r"sampling\.top_k"):
            await fleet.generate([1], Sampling(top_k=-2))
    assert [request.sampling.top_k for request in server.requests] == [0]

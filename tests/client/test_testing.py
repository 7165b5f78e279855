"""The fake server that users test their trainers with, as they would."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from client.scripted import until
from rollwire_client import (
    FinishReason,
    Fleet,
    InvalidRequestError,
    Retries,
    RolloutClient,
    RolloutFailedError,
    RoutingReplay,
    Sampling,
    ServerState,
    SleepingWeights,
    Timeouts,
)
from rollwire_client.testing import FakeServer

PROMPT = [1, 2, 3]
SAMPLING = Sampling(max_new_tokens=8, seed=5)


def fleet_of(*servers: FakeServer) -> Fleet:
    return Fleet([server.address for server in servers], timeouts=Timeouts(close=0.2))


async def test_a_sequence_is_the_same_on_every_fake_server() -> None:
    async with FakeServer(version=3) as one, FakeServer() as other:
        async with RolloutClient(one.address) as client:
            first = await client.generate(PROMPT, SAMPLING)
        async with RolloutClient(other.address) as client:
            second = await client.generate(PROMPT, SAMPLING)
    assert first.token_ids == second.token_ids
    assert len(set(first.token_ids)) > 1
    assert (first.versions, second.versions) == ((3,) * 8, (None,) * 8)
    assert first.finish.reason is FinishReason.LENGTH
    assert [list(request.prompt_token_ids) for request in one.requests] == [PROMPT]


async def test_the_test_chooses_the_tokens() -> None:
    own = FakeServer(lambda prompt, output: prompt[len(output)])
    async with own as server, fleet_of(server) as fleet:
        got = await fleet.generate([7, 8, 9, 10], Sampling(stop_token_ids=[9]))
    assert got.token_ids == (7, 8, 9)
    assert (got.finish.reason, got.finish.stop_token_id) == (FinishReason.STOP, 9)


@pytest.mark.parametrize("fault", ["interrupt", "cut", "stop"])
async def test_faults_change_nothing(fault: str) -> None:
    async with FakeServer() as a, FakeServer() as b, fleet_of(a, b) as fleet:
        want = (await fleet.generate(PROMPT, Sampling(max_new_tokens=60, seed=5))).token_ids
        running = asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=60, seed=5)))
        await until(lambda: a.running + b.running == 1)
        done = getattr(a if a.running else b, fault)()
        if done is not None:
            await done
        assert (await running).token_ids == want
    assert max(request.attempt for s in (a, b) for request in s.requests) == 1


async def test_a_commit_is_seen_in_the_labels() -> None:
    async with FakeServer(version=1, tokens_per_second=200) as server, fleet_of(server) as fleet:
        stream = fleet.stream(PROMPT, Sampling(max_new_tokens=50))
        first = await anext(stream)
        server.commit(2)
        versions = {chunk.weights.version async for chunk in stream if chunk.token_ids}
        assert first.weights.version == 1
        assert 2 in versions
        waiting = asyncio.create_task(fleet.generate(PROMPT, SAMPLING, min_weight_version=3))
        await until(lambda: server.running == 1)
        server.commit(3)
        assert (await waiting).versions == (3,) * 8


async def test_a_server_that_does_not_serve() -> None:
    retries = Retries(seconds=0.2)
    async with FakeServer() as server:
        server.state = ServerState.DRAINING
        async with Fleet([server.address], retries=retries) as fleet:
            with pytest.raises(RolloutFailedError, match="is draining"):
                await fleet.generate(PROMPT, SAMPLING)


async def test_what_is_left_is_aborted() -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        async with contextlib.aclosing(fleet.stream(PROMPT, Sampling())) as stream:
            await anext(stream)
        await until(lambda: server.running == 0)
        async with RolloutClient(server.address) as client:
            stream = client.stream(PROMPT, request_id="mine")
            await anext(stream)
            assert (await client.abort(["mine", "other"])).not_found == ("other",)
            chunks = [chunk async for chunk in stream]
    assert chunks[-1].finish.reason is FinishReason.ABORTED


@pytest.mark.parametrize("fault", ["interrupt", "cut", "stop"])
async def test_routing_is_that_of_the_tokens_whatever_happens(fault: str) -> None:
    async with (
        FakeServer(routing=(3, 2)) as a,
        FakeServer(routing=(3, 2)) as b,
        fleet_of(a, b) as fleet,
    ):
        long = Sampling(max_new_tokens=60, seed=5)
        as_sampled, last_pass = RoutingReplay.AS_SAMPLED, RoutingReplay.LAST_PASS
        want = (await fleet.generate(PROMPT, long, routed_experts=as_sampled)).routing
        assert (want.num_rows, want.num_layers, want.top_k) == (len(PROMPT) + 59, 3, 2)
        assert len(set(want.experts)) > 50
        for replay in (as_sampled, last_pass) if fault != "stop" else (last_pass,):
            running = asyncio.create_task(fleet.generate(PROMPT, long, routed_experts=replay))
            await until(lambda: a.running + b.running == 1)
            done = getattr(a if a.running else b, fault)()
            if done is not None:
                await done
            got = await running
            assert got.routing.experts == want.experts


async def test_a_dense_model_has_no_routing() -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        with pytest.raises(InvalidRequestError, match="UNSUPPORTED_ROUTING") as caught:
            await fleet.generate(PROMPT, SAMPLING, routed_experts=RoutingReplay.AS_SAMPLED)
        assert list(caught.value.violations) == ["routed_experts"]


async def test_it_sleeps_and_pauses_as_servers_do() -> None:
    long = Sampling(max_new_tokens=60, seed=5)
    async with FakeServer() as a, FakeServer() as b, fleet_of(a, b) as fleet:
        want = (await fleet.generate(PROMPT, long)).token_ids
        running = [asyncio.create_task(fleet.generate(PROMPT, long)) for _ in range(4)]
        await until(lambda: a.running + b.running == 4)
        await fleet.sleep(SleepingWeights.KEEP)
        assert (await fleet.sleep(SleepingWeights.KEEP)).answers[a.address].already_asleep
        assert a.state is b.state is ServerState.SLEEPING
        await until(lambda: a.running + b.running == 0)
        await fleet.pause("mine", lease=60)
        await fleet.wake_up()
        assert a.state is b.state is ServerState.PAUSED
        await fleet.resume("mine")
        assert [(await task).token_ids for task in running] == [want] * 4
        await fleet.pause(lease=0.05)
        await until(lambda: a.state is b.state is ServerState.SERVING)


async def test_discarded_weights_come_with_a_commit() -> None:
    async with FakeServer() as server, fleet_of(server) as fleet:
        await fleet.sleep(SleepingWeights.DISCARD)
        await fleet.wake_up()
        assert server.state is ServerState.AWAITING_WEIGHTS
        server.commit(7)
        assert (await fleet.generate(PROMPT, SAMPLING)).versions == (7,) * 8

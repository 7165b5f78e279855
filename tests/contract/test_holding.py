"""Pause and Resume: what is held, what arrives meanwhile, what can still be ended."""

from __future__ import annotations

import asyncio
import uuid

import pytest
from google.protobuf.duration_pb2 import Duration
from rollwire.v1 import common_pb2, rollout_pb2
from support.calls import Api, Generation, Stream, generate, request

LONG = 2000


async def test_an_interrupted_sequence_is_equal_to_the_uninterrupted_one(api: Api) -> None:
    whole = await generate(api, request((7, 7), 200, seed=21))
    generation = Generation(api, request((7, 7), 200, seed=21))
    for tokens in (1, 20, 21, 90):
        await generation.some(tokens)
        await api.pause("p")
        await api.resume("p")
    output = await generation.all()
    assert output.tokens == whole.tokens
    assert output.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_while_paused_nothing_is_sampled_and_what_arrives_waits(api: Api) -> None:
    stream = Stream(api)
    await stream.start(1, request((1,), LONG))
    await stream.read()
    answer = await api.pause("p")
    assert answer.held_sequences == 1
    before = (await api.info()).kv_tokens_used
    late = Generation(api, request((2,), 4))
    await api.held(2)
    info = await api.info()
    assert info.state == common_pb2.SERVER_STATE_PAUSED
    assert info.kv_tokens_used == before
    assert not late.output.tokens
    answer = await api.resume("p")
    assert (answer.resumed_sequences, answer.remaining_pauses) == (2, 0)
    assert (await late.all()).reason == "LENGTH"
    await stream.abort(1)
    assert (await stream.all())[1].reason == "ABORTED"


async def test_what_is_held_can_be_aborted_at_once(api: Api) -> None:
    ids = [uuid.uuid4().hex for _ in range(2)]
    running = Generation(api, request((1,), LONG, request_id=ids[0]))
    await running.some(2)
    await api.pause("p")
    late = Generation(api, request((2,), LONG, request_id=ids[1]))
    await api.held(2)
    async with asyncio.timeout(60):
        assert await api.abort(*ids) == (2, [])
        assert (await running.all()).reason == "ABORTED"
        output = await late.all()
        assert (output.reason, output.tokens) == ("ABORTED", [])
    await api.resume("p")


async def test_pauses_are_lifted_one_by_one(api: Api) -> None:
    await api.pause("a")
    await api.pause("b")
    answer = await api.resume("a")
    assert answer.remaining_pauses == 1
    generation = Generation(api, request((1,), 3))
    await api.held(1)
    assert (await api.resume("a")).remaining_pauses == 1
    assert (await api.resume()).remaining_pauses == 0
    assert (await generation.all()).reason == "LENGTH"


async def test_a_forgotten_pause_is_lifted_by_its_lease(api: Api) -> None:
    lease = Duration()
    lease.FromMilliseconds(200)
    await api.rollouts.Pause(rollout_pb2.PauseRequest(lease=lease), timeout=60)
    output = await generate(api, request((1,), 3))
    assert output.reason == "LENGTH"


@pytest.mark.parametrize("nanos", [1, 1000, 100_000])
async def test_a_pause_whose_lease_is_over_at_once_is_answered(api: Api, nanos: int) -> None:
    lease = Duration(nanos=nanos)
    await api.rollouts.Pause(rollout_pb2.PauseRequest(lease=lease), timeout=60)
    assert (await generate(api, request((1,), 3))).reason == "LENGTH"


async def test_an_unnamed_pause_gets_a_name(api: Api) -> None:
    first, second = await api.pause(), await api.pause()
    assert first.pause_id != second.pause_id != ""
    await api.resume(first.pause_id)
    assert (await api.resume(second.pause_id)).remaining_pauses == 0

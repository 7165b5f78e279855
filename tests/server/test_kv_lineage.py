"""What was computed over kept keys and values says so on the wire, on both ways in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from rollwire.v1 import common_pb2, rollout_pb2
from support.calls import CALL_SECONDS, connected, request
from support.publishing import Update, random_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from support.calls import Api
    from support.servers import StartServer

PROMPT = [i % 500 for i in range(3500)]

Part = tuple[common_pb2.WeightTag, rollout_pb2.GenerateResponse | rollout_pb2.SequenceEvent]


async def generated(api: Api, message: rollout_pb2.GenerateRequest) -> AsyncIterator[Part]:
    call = api.rollouts.Generate(message, timeout=CALL_SECONDS)
    while (answer := await call.read()) is not grpc.aio.EOF:
        if not answer.token_ids and answer.prompt_logprobs:
            told = {part.oldest_kv_revision for part in answer.prompt_logprobs}
            assert answer.oldest_kv_revision == min(told)
        yield answer.weights, answer


async def streamed(api: Api, message: rollout_pb2.GenerateRequest) -> AsyncIterator[Part]:
    call = api.rollouts.StreamRollouts(timeout=CALL_SECONDS)
    await call.write(rollout_pb2.StreamRolloutsRequest(handle=1, start=message))
    await call.done_writing()
    while (answer := await call.read()) is not grpc.aio.EOF:
        for event in answer.events:
            yield answer.weights, event


@pytest.mark.parametrize("way", [pytest.param(generated, marks=pytest.mark.slow), streamed])
async def test_a_prompt_that_spans_a_commit_that_keeps(
    start_server: StartServer,
    way: Callable[[Api, rollout_pb2.GenerateRequest], AsyncIterator[Part]],
) -> None:
    server = start_server("--model", "builtin:tiny-moe", "--prefill-tokens", "16")
    async with connected(server.address) as api:
        change = Update(api, await random_weights(api, 1), 7)
        await change.stage()
        asked = request(PROMPT, 5, prompt_logprobs=True, routed_experts=True)
        prompt, routing = set(), set()
        async for weights, message in way(api, asked):
            if not prompt:
                await change.commit(common_pb2.KV_POLICY_KEEP)
            for part in message.prompt_logprobs:
                prompt.add((weights.revision, part.oldest_kv_revision))
            for rows in message.routed_experts:
                routing.add((rows.weights.revision, rows.oldest_kv_revision))
        assert prompt == routing == {(0, 0), (1, 0)}


async def test_tokens_and_top_logprobs_of_a_message_read_keys_of_one_age(
    start_server: StartServer,
) -> None:
    server = start_server()
    async with connected(server.address) as api:
        call = api.rollouts.StreamRollouts(timeout=CALL_SECONDS)
        asked = request((1, 2, 3), 4000, top_logprobs=2)
        await call.write(rollout_pb2.StreamRolloutsRequest(handle=1, start=asked))
        tokens: dict[tuple[int, int], int] = {}
        revision = 0
        while revision < 3:
            answer = await call.read()
            tops = sum(len(e.top_logprobs.token_ids) for e in answer.events)
            assert tops == 2 * len(answer.token_ids)
            now = answer.weights.revision
            (oldest,) = answer.oldest_kv_revisions or [now]
            tokens[now, oldest] = tokens.get((now, oldest), 0) + len(answer.token_ids)
            if now == revision and tokens[now, oldest] >= 10:
                change = Update(api, await random_weights(api, revision), revision)
                await change.stage()
                await change.commit(max_kv_lag=1)
                revision += 1
        call.cancel()
        assert set(tokens) == {(0, 0), (1, 0), (2, 2)}

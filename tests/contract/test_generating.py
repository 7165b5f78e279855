"""Sequences: tokens, offsets, ends, prefixes, seeds, aborts, over both ways in."""

from __future__ import annotations

import asyncio
import uuid

import grpc
import pytest
from google.rpc import error_details_pb2
from rollwire.v1 import rollout_pb2
from support.calls import Api, Generation, Stream, details_of, generate, reason_of, request
from support.sampling import NOT_DEFAULT, PARAMETERS

LONG = 2000


async def test_a_sequence_has_its_tokens_logprobs_and_finish(api: Api) -> None:
    before = await api.info()
    output = await generate(api, request((5, 6, 7), 20, seed=3))
    assert len(output.tokens) == len(output.logprobs) == 20
    assert output.reason == "LENGTH"
    assert output.finish is not None
    assert (output.finish.prompt_tokens, output.finish.output_tokens) == (3, 20)
    assert all(logprob <= 0 for logprob in output.logprobs)
    info = await api.info()
    assert {tag.SerializeToString() for tag in output.tags} == {info.weights.SerializeToString()}
    assert info.sampled_tokens == before.sampled_tokens + 20


async def test_both_ways_in_give_the_same(api: Api) -> None:
    requests = [request((i, 2 * i + 1), 10 + i, seed=i) for i in range(6)]
    alone = [await generate(api, message) for message in requests]
    stream = Stream(api)
    for handle, message in enumerate(requests):
        message.request_id = uuid.uuid4().hex
        await stream.start(handle, message)
    together = await stream.all()
    for handle, output in enumerate(alone):
        assert together[handle].tokens == output.tokens
        assert together[handle].reason == output.reason
        assert together[handle].logprobs == pytest.approx(output.logprobs, abs=1e-4)


async def test_going_on_from_a_prefix_gives_the_same_continuation(api: Api) -> None:
    whole = await generate(api, request((9, 8), 24, seed=11, temperature=0.9, top_k=50))
    for cut in (1, 7, 23):
        rest = await generate(
            api,
            request((9, 8), 24, seed=11, temperature=0.9, top_k=50, prefix=whole.tokens[:cut]),
        )
        assert rest.offset == cut
        assert whole.tokens[:cut] + rest.tokens == whole.tokens
        assert rest.logprobs == pytest.approx(whole.logprobs[cut:], abs=1e-4)
        assert rest.finish is not None
        assert rest.finish.output_tokens == 24


async def test_a_complete_prefix_gets_the_finish_that_it_had(api: Api) -> None:
    whole = await generate(api, request((1,), 8, seed=1))
    again = await generate(api, request((1,), 8, seed=1, prefix=whole.tokens))
    assert (again.tokens, again.reason) == ([], "LENGTH")
    last = whole.tokens[-1]
    stopped = await generate(
        api, request((1,), 20, seed=1, prefix=whole.tokens, stop_token_ids=[last])
    )
    assert (stopped.tokens, stopped.reason) == ([], "STOP")
    assert stopped.finish is not None
    assert stopped.finish.stop_token_id == last


async def test_a_stop_token_ends_a_sequence_also_as_the_last_one_allowed(api: Api) -> None:
    free = await generate(api, request((4, 4), 12, seed=5))
    stop = free.tokens[6]
    at = free.tokens.index(stop) + 1
    for budget in (12, at):
        output = await generate(api, request((4, 4), budget, seed=5, stop_token_ids=[stop]))
        assert output.tokens == free.tokens[:at]
        assert output.reason == "STOP"


async def test_min_new_tokens_keeps_stop_tokens_away(api: Api) -> None:
    free = await generate(api, request((4, 4), 12, seed=5))
    output = await generate(
        api, request((4, 4), 12, seed=5, stop_token_ids=[free.tokens[0]], min_new_tokens=4)
    )
    assert free.tokens[0] not in output.tokens[:4]
    assert len(output.tokens) >= 4


async def test_greedy_is_the_same_every_time_and_has_no_use_for_a_seed(api: Api) -> None:
    outputs = [
        await generate(api, request((2, 3, 4), 16, temperature=0, seed=seed)) for seed in (1, 2)
    ]
    assert outputs[0].tokens == outputs[1].tokens


async def test_without_a_seed_samples_differ(api: Api) -> None:
    first, second = await asyncio.gather(*(generate(api, request((2, 3), 24)) for _ in range(2)))
    assert first.tokens != second.tokens


async def test_max_new_tokens_defaults_to_the_context(api: Api) -> None:
    info = await api.info()
    prompt = [1] * (info.context_length - 8)
    for budget in (None, 1000):
        output = await generate(api, request(prompt, budget))
        assert (len(output.tokens), output.reason) == (8, "LENGTH")


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        ({"prompt": ()}, "EMPTY_PROMPT", "prompt_token_ids"),
        ({"prompt": (1, 10**6)}, "TOKEN_OUT_OF_RANGE", "prompt_token_ids"),
        ({"prefix": (2**32 - 1,)}, "TOKEN_OUT_OF_RANGE", "output_token_ids"),
        ({"stop_token_ids": (10**6,)}, "TOKEN_OUT_OF_RANGE", "sampling.stop_token_ids"),
        ({"prompt": (1,) * 100_000}, "CONTEXT_EXCEEDED", "prompt_token_ids"),
        ({"prefix": (1, 2, 3), "max_new_tokens": 2}, "CONTEXT_EXCEEDED", "output_token_ids"),
        ({"temperature": -1.0}, "BAD_SAMPLING", "sampling.temperature"),
        ({"temperature": float("nan")}, "BAD_SAMPLING", "sampling.temperature"),
        ({"top_p": 0.0}, "BAD_SAMPLING", "sampling.top_p"),
        ({"top_p": 1.5}, "BAD_SAMPLING", "sampling.top_p"),
        ({"min_p": 2.0}, "BAD_SAMPLING", "sampling.min_p"),
        ({"max_new_tokens": 0}, "BAD_SAMPLING", "sampling.max_new_tokens"),
        ({"min_new_tokens": 99}, "BAD_SAMPLING", "sampling.min_new_tokens"),
        ({"top_logprobs": 10**6}, "BAD_SAMPLING", "top_logprobs"),
        ({"logprob_basis": 77}, "UNSUPPORTED_LOGPROB_BASIS", "logprob_basis"),
        ({"min_weight_version": 5, "max_weight_version": 4}, "BAD_REQUEST", "min_weight_version"),
        ({"timeout": -1.0}, "BAD_REQUEST", "timeout"),
        ({"request_id": "x" * 1000}, "BAD_REQUEST", "request_id"),
    ],
)
async def test_bad_requests_are_refused_by_name(
    api: Api, change: dict[str, object], reason: str, field: str
) -> None:
    message = request(**{"max_new_tokens": 8, **change})  # type: ignore[arg-type]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(api, message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == reason
    bad = error_details_pb2.BadRequest()
    assert details_of(caught.value, bad)
    assert [violation.field for violation in bad.field_violations] == [field]
    stream = Stream(api)
    message.request_id = message.request_id or "named"
    await stream.start(1, message)
    await stream.start(2, request((1, 2), 3))
    outputs = await stream.all()
    error = outputs[1].error
    assert error is not None
    assert (error.code, error.reason) == (3, reason)
    assert outputs[2].reason == "LENGTH"


@pytest.mark.parametrize("name", PARAMETERS)
async def test_a_sampling_parameter_changes_what_is_sampled_or_is_refused_by_name(
    api: Api, name: str
) -> None:
    without: dict[str, object] = {"max_new_tokens": 40, "seed": 1}
    plain = await generate(api, request(**without))  # type: ignore[arg-type]
    value = NOT_DEFAULT[name]
    if name == "stop_token_ids":
        value = plain.tokens[5:6]
    if name == "min_new_tokens":  # which changes nothing where no stop token comes early
        without["stop_token_ids"] = plain.tokens[:1]
        plain = await generate(api, request(**without))  # type: ignore[arg-type]
    try:
        output = await generate(api, request(**{**without, name: value}))  # type: ignore[arg-type]
    except grpc.aio.AioRpcError as error:
        assert reason_of(error) == "BAD_SAMPLING"  # noqa: PT017
        assert f"{name} is not supported by" in error.details()  # noqa: PT017
    else:
        # What ignore_eos changes shows at a model that ends by itself: see test_end_tokens.
        assert output.tokens != plain.tokens or name == "ignore_eos"


async def test_abort_ends_exactly_the_named_and_tells_what_was_sampled(api: Api) -> None:
    name = uuid.uuid4().hex
    generations = [
        Generation(api, request((1,), LONG, request_id=request_id))
        for request_id in (name, f"{name}0")
    ]
    for generation in generations:
        await generation.some(3)
    assert await api.abort(name, "unknown") == (1, ["unknown"])
    output = await generations[0].all()
    assert output.reason == "ABORTED"
    assert output.finish is not None
    assert output.finish.output_tokens == len(output.tokens) >= 3
    assert await api.abort(name) == (0, [name])
    before = len(generations[1].output.tokens)
    await generations[1].some(before + 5)
    assert await api.abort(f"{name}0", attempt=7) == (0, [f"{name}0"])
    assert await api.abort(f"{name}0", attempt=0) == (1, [])
    assert (await generations[1].all()).reason == "ABORTED"


async def test_abort_all(api: Api) -> None:
    generations = [Generation(api, request((i,), LONG)) for i in range(1, 5)]
    for generation in generations:
        await generation.some(1)
    answer = await api.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=60)
    assert answer.aborted == 4
    assert {(await generation.all()).reason for generation in generations} == {"ABORTED"}


async def test_a_stream_aborts_by_handle(api: Api) -> None:
    stream = Stream(api)
    await stream.start(1, request((1,), LONG))
    await stream.start(2, request((2,), 10))
    while not stream.outputs[1].tokens:
        await stream.read()
    await stream.abort(1)
    await stream.abort(99)
    outputs = await stream.all()
    assert (outputs[1].reason, outputs[2].reason) == ("ABORTED", "LENGTH")


@pytest.mark.parametrize("command", ["twice", "empty"])
async def test_a_stream_that_makes_no_sense_is_ended(api: Api, command: str) -> None:
    stream = Stream(api)
    await stream.start(1, request((1,), LONG))
    if command == "twice":
        await stream.start(1, request((2,), 10))
    else:
        await stream.call.write(rollout_pb2.StreamRolloutsRequest(handle=5))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.all()
    assert reason_of(caught.value) == "BAD_REQUEST"


async def test_a_lost_stream_frees_the_engine(api: Api) -> None:
    generation = Generation(api, request((1,), LONG))
    stream = Stream(api)
    await stream.start(1, request((2,), LONG))
    await generation.some(2)
    await stream.read()
    generation.call.cancel()
    stream.call.cancel()
    await api.idle()


async def test_a_timeout_ends_a_sequence_with_what_it_has(api: Api) -> None:
    generation = Generation(api, request((1,), LONG, timeout=1.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generation.all()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert reason_of(caught.value) == "TIMED_OUT"
    assert generation.output.tokens


async def test_top_and_prompt_logprobs(api: Api) -> None:
    prompt = tuple(range(1, 30))
    output = await generate(
        api, request(prompt, 6, temperature=0, top_logprobs=3, prompt_logprobs=True)
    )
    assert len(output.prompt_logprobs) == len(prompt) - 1
    assert [ids[0] for ids, _ in output.top] == output.tokens
    for (_, logprobs), own in zip(output.top, output.logprobs, strict=True):
        assert logprobs == sorted(logprobs, reverse=True)
        assert logprobs[0] == pytest.approx(own, abs=1e-5)
    score = await generate(api, request(prompt[:20], 1, prompt_logprobs=True, prefix=()))
    assert score.prompt_logprobs == pytest.approx(output.prompt_logprobs[:19], abs=1e-4)

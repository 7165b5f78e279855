"""OpenAI's endpoints, by the real ``openai`` client."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
from rollwire_client import Fleet, Sampling
from support.events import data_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx
    from support.gateways import GatewayProcess
    from support.servers import ServerProcess

MODEL = "policy"
PROMPT = [5, 6, 7, 300]
MESSAGES: list[Any] = [{"role": "user", "content": "abc 한국"}]
EXTRA = {"return_token_ids": True}


@pytest_asyncio.fixture
async def client(gateway: GatewayProcess) -> AsyncIterator[openai.AsyncOpenAI]:
    made = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    async with made as client:
        yield client


async def test_completions_have_the_tokens_that_grpc_gives_for_the_same_seed(
    client: openai.AsyncOpenAI, server: ServerProcess, tokenizer: Any
) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, seed=3, n=3, logprobs=0, extra_body=EXTRA
    )
    async with Fleet([server.address]) as fleet:
        (expected,) = await fleet.generate_many([PROMPT], Sampling(max_new_tokens=24, seed=3), n=3)
    for choice, trajectory in zip(answer.choices, expected, strict=True):
        extra = choice.model_extra or {}
        assert extra["token_ids"] == list(trajectory.token_ids)
        assert extra["token_logprobs"] == list(trajectory.logprobs)
        assert extra["prompt_token_ids"] == PROMPT
        assert extra["weight_versions"] == [None] * 24
        assert choice.finish_reason == "length"
        assert choice.text == tokenizer.decode(trajectory.token_ids, skip_special_tokens=True)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == list(trajectory.logprobs)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 72)


async def test_a_streamed_completion_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "prompt": "abc 한국", "max_tokens": 60, "seed": 5, "n": 2, "logprobs": 0,
        "extra_body": EXTRA,
    }  # fmt: skip
    whole = await client.completions.create(**options)
    texts, ids, reasons = ["", ""], [[], []], [[], []]
    usage = None
    async for event in await client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.text
            ids[choice.index] += (choice.model_extra or {}).get("token_ids", [])
            reasons[choice.index].append(choice.finish_reason)
    assert texts == [choice.text for choice in whole.choices]
    assert ids == [choice.model_extra["token_ids"] for choice in whole.choices]  # type: ignore[index]
    for seen in reasons:
        assert seen[-1] == "length"
        assert set(seen[:-1]) == {None}
    assert usage == whole.usage


async def test_a_chat_is_rendered_by_the_models_template(
    client: openai.AsyncOpenAI, tokenizer: Any
) -> None:
    answer = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=12, seed=1, logprobs=True, n=2, extra_body=EXTRA
    )
    expected = tokenizer.encode(
        "<|im_start|>user\nabc 한국<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert (answer.model_extra or {})["prompt_token_ids"] == expected
    for choice in answer.choices:
        ids = (choice.model_extra or {})["token_ids"]
        assert len(ids) == 12
        assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert [entry.token for entry in content] == [tokenizer.decode([i]) for i in ids]
        assert all(math.isfinite(entry.logprob) for entry in content)


async def test_a_streamed_chat_is_the_whole_one(client: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": 60, "seed": 9, "logprobs": True,
        "extra_body": EXTRA,
    }  # fmt: skip
    whole = (await client.chat.completions.create(**options)).choices[0]
    text, ids, logprobs, reasons, roles = "", [], [], [], []
    async for event in await client.chat.completions.create(**options, stream=True):
        (choice,) = event.choices
        roles.append(choice.delta.role)
        text += choice.delta.content or ""
        ids += (choice.model_extra or {}).get("token_ids", [])
        logprobs += choice.logprobs.content or [] if choice.logprobs else []
        reasons.append(choice.finish_reason)
    assert text == whole.message.content
    assert ids == (whole.model_extra or {})["token_ids"]
    assert logprobs == (whole.logprobs.content if whole.logprobs else None)
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}
    assert roles[0] == "assistant"
    assert set(roles[1:]) == {None}


@pytest.mark.parametrize("stream", [False, True])
async def test_text_ids_and_usage_end_at_the_same_cut(
    client: openai.AsyncOpenAI, http: httpx.AsyncClient, tokenizer: Any, *, stream: bool
) -> None:
    """The ids keep the tokens up to the one that completes the stop string; the text hides it."""
    whole = (
        await client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=80, seed=2, extra_body=EXTRA
        )
    ).choices[0]
    found = re.compile("[a-z]{3}").search(whole.text, 20)
    assert found
    stop, end = found[0], whole.text.index(found[0])
    body = {
        "model": MODEL, "prompt": PROMPT, "max_tokens": 80, "seed": 2, "stop": stop,
        "return_token_ids": True, "stream": stream, "stream_options": {"include_usage": True},
        "logprobs": 0,
    }  # fmt: skip
    if not stream:
        del body["stream_options"]
    text, ids, logprobs, reason, usage, stop_reason = "", [], [], None, None, None
    events = [(await http.post("/v1/completions", json=body)).json()] if not stream else []
    if stream:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            events = [event async for event in data_of(response)]
        assert events.pop() == "[DONE]"
    for event in events:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["text"]
            ids += choice.get("token_ids", [])
            logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            reason, stop_reason = choice["finish_reason"], choice.get("stop_reason")
    assert text == whole.text[:end]
    assert (reason, stop_reason) == ("stop", stop)
    whole_ids = (whole.model_extra or {})["token_ids"]
    assert ids == whole_ids[: len(ids)]
    assert stop in tokenizer.decode(ids, skip_special_tokens=True)
    assert stop not in tokenizer.decode(ids[:-1], skip_special_tokens=True)
    assert len(logprobs) == len(ids)
    assert usage["completion_tokens"] == len(ids)


async def test_the_ending_token_stays_in_the_ids_and_is_hidden_in_the_text(
    client: openai.AsyncOpenAI, tokenizer: Any
) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "seed": 7}
    whole = (await client.completions.create(**ask, extra_body=EXTRA)).choices[0]
    ids = (whole.model_extra or {})["token_ids"]
    end = next(i for i, token in enumerate(ids) if i > 5 and token not in ids[:i])
    answer = await client.completions.create(
        **ask, extra_body={**EXTRA, "stop_token_ids": [ids[end]]}
    )
    (choice,) = answer.choices
    assert (choice.model_extra or {})["token_ids"] == ids[: end + 1]
    assert choice.text == tokenizer.decode(ids[:end], skip_special_tokens=True)
    assert choice.finish_reason == "stop"
    assert (choice.model_extra or {})["stop_reason"] == ids[end]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == end + 1


async def test_models_say_how_long_a_prompt_may_be(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in await client.models.list()]
    assert model.id == MODEL
    assert (model.model_extra or {})["max_model_len"] > 0


async def test_what_is_left_out_is_neutral(http: httpx.AsyncClient) -> None:
    ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "seed": 4, "return_token_ids": True}
    neutral = {
        "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}, "stop": [],
    }  # fmt: skip
    bare, told = [
        (await http.post("/v1/completions", json={**ask, **more})).json()["choices"][0]
        for more in ({}, neutral)
    ]
    assert bare["token_ids"] == told["token_ids"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 1),
        ("repetition_penalty", 1.1),
        ("logit_bias", {"5": 10}),
        ("logprobs", 5),
        ("best_of", 3),
        ("guided_regex", "a+"),
        ("allowed_token_ids", [1, 2]),
        ("prompt_logprobs", 1),
        ("suffix", "end"),
        ("typical_p", 0.5),
        ("n", 0),
        ("n", True),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 10**400),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("stop", ""),
        ("stop_token_ids", [-1]),
        ("logprob_basis", "raw"),
        ("stream", "yes"),
    ],
)
async def test_what_it_cannot_do_is_refused_by_name(
    http: httpx.AsyncClient, field: str, value: object
) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, field: value}
    response = await http.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["param"] in {field, "max_new_tokens"}
    assert field in error["message"] or error["param"] in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_object"}),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"chat_template": "{{ messages }}"}),
        ("reasoning_effort", "high"),
        ("messages", []),
        ("messages", [{"role": "nobody", "content": "x"}]),
        ("messages", [{"role": ["user"], "content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
    ],
)
async def test_what_a_chat_cannot_do_is_refused_by_name(
    http: httpx.AsyncClient, field: str, value: object
) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, field: value}
    response = await http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert error["message"]


async def test_another_model_is_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="this gateway serves policy"):
        await client.completions.create(model="gpt-4", prompt="x", max_tokens=1)


async def test_a_prompt_that_is_too_long_says_so(client: openai.AsyncOpenAI) -> None:
    said = "a prompt has 100000 tokens, and the maximum context length is [0-9]+"
    with pytest.raises(openai.BadRequestError, match=said) as raised:
        await client.completions.create(model=MODEL, prompt=[1] * 100_000, max_tokens=1)
    assert raised.value.code == "context_length_exceeded"


async def test_more_tokens_than_the_context_leaves_are_capped(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in await client.models.list()]
    length = (model.model_extra or {})["max_model_len"]
    answer = await client.completions.create(
        model=MODEL, prompt=[1] * (length - 3), max_tokens=1000, extra_body=EXTRA
    )
    assert answer.choices[0].finish_reason == "length"
    assert len((answer.choices[0].model_extra or {})["token_ids"]) == 3

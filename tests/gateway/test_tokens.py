"""Token ids in, token ids out: vLLM's shape by verifiers' renderers, and SGLang's."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import openai
import pytest
from renderers import create_renderer
from renderers.client import OverlongPromptError, generate
from rollwire_client import Fleet, RolloutClient, Sampling
from support.events import data_of
from support.synthetic import start_synthetic
from support.waiting import until

if TYPE_CHECKING:
    import httpx
    from support.gateways import GatewayProcess, StartGateway
    from support.servers import ServerProcess, StartServer

MODEL = "policy"
PROMPT = [5, 6, 7, 300]


@pytest.fixture
async def expected(server: ServerProcess) -> Any:
    async with Fleet([server.address]) as fleet:
        return await fleet.generate(PROMPT, Sampling(max_new_tokens=20, seed=11))


async def test_renderers_of_verifiers_get_tokens_and_logprobs(
    gateway: GatewayProcess, tokenizer: Any, expected: Any
) -> None:
    renderer = create_renderer(tokenizer)
    params = {"max_tokens": 20, "seed": 11, "temperature": 1.0}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        answer = await generate(
            client=client, renderer=renderer, messages=[], model=MODEL, prompt_ids=PROMPT,
            sampling_params=params,
        )  # fmt: skip
        chat = await generate(
            client=client, renderer=renderer, messages=[{"role": "user", "content": "hi"}],
            model=MODEL, sampling_params=params, extra_headers={"X-Session-ID": "a"},
        )  # fmt: skip
        with pytest.raises(OverlongPromptError):
            await generate(
                client=client, renderer=renderer, messages=[], model=MODEL, prompt_ids=[1] * 100_000
            )
    assert answer["completion_ids"] == list(expected.token_ids)
    assert answer["completion_logprobs"] == list(expected.logprobs)
    assert answer["finish_reason"] == "length"
    assert len(chat["completion_ids"]) == 20


async def test_sglangs_generate(http: httpx.AsyncClient, tokenizer: Any, expected: Any) -> None:
    body = {
        "input_ids": PROMPT,
        "sampling_params": {"max_new_tokens": 20, "sampling_seed": 11, "temperature": 1.0},
        "return_logprob": True,
        "rid": "mine",
    }
    answer = (await http.post("/generate", json=body)).json()
    meta = answer["meta_info"]
    assert answer["output_ids"] == list(expected.token_ids)
    assert answer["text"] == tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert [entry[:2] for entry in meta["output_token_logprobs"]] == [
        [logprob, token]
        for logprob, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert meta["finish_reason"] == {"type": "length", "length": 20}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("mine", 4, 20)
    assert (meta["weight_version"], meta["weight_versions"]) == ("default", [None] * 20)


async def test_sglangs_stream_has_all_so_far_in_each_event(
    http: httpx.AsyncClient, expected: Any
) -> None:
    params = {"max_new_tokens": 20, "sampling_seed": 11}
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True}
    async with http.stream("POST", "/generate", json=body) as response:
        events = [event async for event in data_of(response)]
    whole = (await http.post("/generate", json={**body, "stream": False})).json()
    assert events.pop() == "[DONE]"
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["output_ids"] == list(expected.token_ids)
    assert events[-1]["text"] == whole["text"]


async def test_sglangs_prompts_come_in_lists(http: httpx.AsyncClient) -> None:
    params = {"max_new_tokens": 3, "n": 2}
    answers = (
        await http.post("/generate", json={"text": ["a", "b"], "sampling_params": params})
    ).json()
    assert [len(answer["output_ids"]) for answer in answers] == [3] * 4
    one = (await http.post("/generate", json={"text": ["a"]} | _few(2))).json()
    assert [len(answer["output_ids"]) for answer in one] == [2]


def _few(tokens: int) -> dict[str, Any]:
    return {"sampling_params": {"max_new_tokens": tokens}}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_ids": PROMPT, "lora_path": "x"}, "lora_path"),
        ({"input_ids": PROMPT, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"input_ids": PROMPT, "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": PROMPT, "sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"input_ids": PROMPT, "sampling_params": {"max_tokens": 5}}, "max_tokens"),
        ({"input_ids": PROMPT, "text": "x"}, "input_ids"),
        ({}, "input_ids"),
        ({"input_ids": []}, "prompt_token_ids"),
        ({"input_ids": [100_000]}, "prompt_token_ids"),
    ],
)
async def test_sglangs_fields_that_cannot_be_done_are_refused(
    http: httpx.AsyncClient, body: dict[str, Any], field: str
) -> None:
    response = await http.post("/generate", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert field in f"{error['param']} {error['message']}"


async def test_an_aborted_request_is_answered_with_what_was_sampled(
    start_server: StartServer, start_gateway: StartGateway
) -> None:
    server = start_synthetic(start_server, 50)
    gateway = start_gateway(server.address)
    body = {"input_ids": PROMPT, "rid": "mine", "sampling_params": {"max_new_tokens": 4000}}
    import httpx

    async with (
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
        RolloutClient(server.address) as client,
    ):
        waiting = asyncio.create_task(http.post("/generate", json=body))
        streamed: list[Any] = []

        async def stream() -> None:
            more = {**body, "stream": True}
            async with http.stream("POST", "/generate", json=more) as response:
                async for event in data_of(response):
                    streamed.append(event)  # noqa: PERF401 - the test looks at it meanwhile

        streaming = asyncio.create_task(stream())
        await until(lambda: len(streamed) > 3)
        assert (await http.post("/abort_request", json={"rid": "other"})).json()["sequences"] == 0
        assert (await http.post("/abort_request", json={"rid": "mine"})).json()["sequences"] == 2
        answer = (await waiting).json()
        await streaming
        assert (await client.info()).running_sequences == 0
        refused = await http.post("/abort_request", json={})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "rid is missing: send it, or abort_all true"
    assert streamed.pop() == "[DONE]"
    for end in (answer, streamed[-1]):
        assert end["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(end["output_ids"]) < 4000


async def test_server_info_names_the_servers(
    http: httpx.AsyncClient, server: ServerProcess
) -> None:
    info = (await http.get("/server_info")).json()
    assert info["model_path"] == MODEL
    assert [one["address"] for one in info["servers"]] == [server.address]
    assert (await http.get("/model_info")).json()["is_generation"] is True

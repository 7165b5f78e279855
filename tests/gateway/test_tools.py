"""Calls of tools, found in the output by PyPI's renderers."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
from rollwire_client.testing import FakeServer
from support.gateways import loaded_tokenizer, small_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from support.gateways import StartGateway

MODEL = "policy"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("now", "weather")
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
END = "<|im_end|>"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NOW, WEATHER = call("now", "{}"), call("weather", '{"city": "서울"}')


@dataclass
class Policy:
    """What the server says, whatever it is asked."""

    tokenizer: Any
    client: openai.AsyncOpenAI
    server: FakeServer
    says: list[int]

    def say(self, text: str) -> None:
        self.says[:] = self.tokenizer.encode(text, add_special_tokens=False)

    async def ask(self, **options: Any) -> Any:
        asked: dict[str, Any] = {
            "model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": len(self.says),
            "extra_body": {
                "return_token_ids": True,
                "stop_token_ids": [self.tokenizer.convert_tokens_to_ids(END)],
            },
        }  # fmt: skip
        return await self.client.chat.completions.create(**asked | options)


@pytest.fixture
async def policy(start_gateway: StartGateway, tmp_path: Path) -> AsyncIterator[Policy]:
    folder = small_tokenizer(tmp_path / "tokenizer", tools=True)
    says: list[int] = [0]

    def sample(_: Sequence[int], output: Sequence[int]) -> int:
        return says[min(len(output), len(says) - 1)]

    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(FakeServer(sample, vocab_size=1000, version=1))
        gateway = await asyncio.to_thread(
            start_gateway, server.address, "--tokenizer", str(folder), "--renderer", "qwen3",
            "--model-name", MODEL, "--stream-interval", "0",
        )  # fmt: skip
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0)
        await stack.enter_async_context(client)
        yield Policy(loaded_tokenizer(folder), client, server, says)


async def test_calls_of_tools(policy: Policy) -> None:
    # Two calls, the first without arguments.
    policy.say(f"<think>\nWhere?\n</think>\n\nI look.{NOW}\n{WEATHER}{END}")
    (choice,) = (await policy.ask()).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content.strip() == "Where?"
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("now", {}), ("weather", {"city": "서울"})]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert choice.token_ids == policy.says

    # The same, streamed: ids come once, and the message at the end.
    ids, message, reasons = [], {}, []
    async for event in await policy.ask(stream=True):
        (streamed,) = event.choices
        ids += (streamed.model_extra or {}).get("token_ids", [])
        reasons.append(streamed.finish_reason)
        message |= {k: v for k, v in streamed.delta.model_dump().items() if v}
    assert ids == policy.says
    assert (reasons[-1], set(reasons[:-1])) == ("tool_calls", {None})
    assert message["content"] == "I look."
    assert message["reasoning_content"] == choice.message.reasoning_content
    assert [
        (c["index"], c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message["tool_calls"]
    ] == [(0, "now", {}), (1, "weather", {"city": "서울"})]

    # The next turn: the calls come back with their arguments as text.
    said = choice.message.model_dump(exclude_none=True)
    results = [
        {"role": "tool", "tool_call_id": made.id, "content": "42"}
        for made in choice.message.tool_calls
    ]
    history = [*MESSAGES, said, *results]
    policy.say(f"It is fine.{END}")
    answer = await policy.ask(messages=history)
    assert answer.choices[0].message.content == "It is fine."
    assert answer.choices[0].finish_reason == "stop"
    assert '{"city": "서울"}' in policy.tokenizer.decode(answer.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_is_a_cut_though_there_are_calls(policy: Policy, *, stream: bool) -> None:
    policy.say(f"I look.{NOW}\n{WEATHER}")
    answer = await policy.ask(stream=stream)
    choice = [event async for event in answer][-1].choices[0] if stream else answer.choices[0]
    assert choice.finish_reason == "length"
    calls = (choice.delta if stream else choice.message).tool_calls
    assert [c.function.name for c in calls] == ["now", "weather"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<tool_call>\n{nothing}\n</tool_call>", "invalid_json"),
        (NOW.removesuffix("</tool_call>"), "unclosed_block"),
    ],
)
async def test_broken_calls_are_outcomes(policy: Policy, text: str, status: str) -> None:
    policy.say(f"I look.{text}{END}")
    (choice,) = (await policy.ask()).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    (broken,) = choice.message.invalid_tool_calls
    assert broken["status"] == status
    assert broken["raw"] in text
    # Without a look for calls, the text is as it was sampled.
    (plain,) = (await policy.ask(tool_choice="none")).choices
    assert plain.message.content == f"I look.{text}"


async def test_a_forced_call_is_refused(policy: Policy) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await policy.ask(tool_choice=choice)


async def test_each_token_names_the_version_that_sampled_it(policy: Policy) -> None:
    policy.say("abc" * 30)
    policy.server._pause = 0.01
    versions: list[int] = []
    async for event in await policy.ask(stream=True):
        for choice in event.choices:
            versions += (choice.model_extra or {}).get("weight_versions", [])
        if len(versions) > 5 and 2 not in versions:
            policy.server.commit(2)
    assert len(versions) == len(policy.says)
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}

"""Calls of tools, found in the output by PyPI's renderers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from gateway.spoken import END, MESSAGES

if TYPE_CHECKING:
    from gateway.spoken import SpokenPolicy

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("now", "weather")
]


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


NOW, WEATHER = call("now", "{}"), call("weather", '{"city": "서울"}')


async def test_calls_of_tools(policy: SpokenPolicy) -> None:
    # Two calls, the first without arguments.
    policy.say(f"<think>\nWhere?\n</think>\n\nI look.{NOW}\n{WEATHER}{END}")
    (choice,) = (await policy.ask(tools=TOOLS)).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content.strip() == "Where?"
    calls = [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls]
    assert calls == [("now", {}), ("weather", {"city": "서울"})]
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert choice.token_ids == policy.says

    # The same, streamed: ids come once, and the message at the end.
    ids, message, reasons = [], {}, []
    async for event in await policy.ask(tools=TOOLS, stream=True):
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
    answer = await policy.ask(tools=TOOLS, messages=history)
    assert answer.choices[0].message.content == "It is fine."
    assert answer.choices[0].finish_reason == "stop"
    assert '{"city": "서울"}' in policy.tokenizer.decode(answer.prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_without_words(policy: SpokenPolicy, *, stream: bool) -> None:
    policy.say(NOW + END)
    answer = await policy.ask(tools=TOOLS, stream=stream)
    choice = [event async for event in answer][-1].choices[0] if stream else answer.choices[0]
    message = choice.delta if stream else choice.message
    assert (message.content, len(message.tool_calls)) == (None, 1)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_cut_is_a_cut_though_there_are_calls(policy: SpokenPolicy, *, stream: bool) -> None:
    policy.say(f"I look.{NOW}\n{WEATHER}")
    answer = await policy.ask(tools=TOOLS, stream=stream)
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
async def test_broken_calls_are_outcomes(policy: SpokenPolicy, text: str, status: str) -> None:
    policy.say(f"I look.{text}{END}")
    (choice,) = (await policy.ask(tools=TOOLS)).choices
    assert choice.finish_reason == "stop"
    assert choice.message.tool_calls is None
    (broken,) = choice.message.invalid_tool_calls
    assert broken["status"] == status
    assert broken["raw"] in text
    # Without a look for calls, the text is as it was sampled.
    (plain,) = (await policy.ask(tools=TOOLS, tool_choice="none")).choices
    assert plain.message.content == f"I look.{text}"


async def test_a_forced_call_is_refused(policy: SpokenPolicy) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "now"}}):
        with pytest.raises(openai.BadRequestError, match="tool_choice"):
            await policy.ask(tools=TOOLS, tool_choice=choice)


async def test_each_token_names_the_version_that_sampled_it(policy: SpokenPolicy) -> None:
    policy.say("abc" * 30)
    policy.server._pause = 0.01
    versions: list[int] = []
    async for event in await policy.ask(tools=TOOLS, stream=True):
        for choice in event.choices:
            versions += (choice.model_extra or {}).get("weight_versions", [])
        if len(versions) > 5 and 2 not in versions:
            policy.server.commit(2)
    assert len(versions) == len(policy.says)
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}

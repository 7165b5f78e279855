"""Chats over a session: messages in and out, and between them the tokens that were sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from renderers import Qwen3RendererConfig, create_renderer
from rollwire_client import FinishReason, Fleet, Sampling
from rollwire_client.chat import Chat
from rollwire_client.testing import FakeServer
from support.gateways import loaded_tokenizer, small_tokenizer
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("now", "weather")
]
MESSAGES: list[Any] = [{"role": "user", "content": "How is the weather?"}]
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "서울"}}\n</tool_call>'
END = "<|im_end|>"


@dataclass
class Policy:
    """A server whose turns the test chooses."""

    tokenizer: Any
    renderer: Any
    server: FakeServer
    fleet: Fleet
    says: list[int]

    def say(self, text: str) -> list[int]:
        self.says[:] = self.tokenizer.encode(text, add_special_tokens=False)
        return list(self.says)

    def chat(self, **options: Any) -> Chat:
        return Chat(self.fleet.session(), self.renderer, MESSAGES, tools=TOOLS, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_tokenizer(tmp_path_factory.mktemp("tokenizer"), tools=True)


@pytest.fixture
async def policy(folder: Path) -> AsyncIterator[Policy]:
    says: list[int] = [0]

    def sample(_: Sequence[int], output: Sequence[int]) -> int:
        return says[min(len(output), len(says) - 1)]

    tokenizer = loaded_tokenizer(folder)
    renderer = create_renderer(tokenizer, Qwen3RendererConfig(enable_thinking=False))
    async with (
        FakeServer(sample, vocab_size=1000, version=1) as server,
        Fleet([server.address]) as fleet,
    ):
        yield Policy(tokenizer, renderer, server, fleet, says)


async def test_three_turns_with_results_of_parallel_calls(policy: Policy) -> None:
    chat = policy.chat()
    first = list(chat.session.token_ids)
    assert (
        first == policy.renderer.render(MESSAGES, tools=TOOLS, add_generation_prompt=True).token_ids
    )

    said = policy.say(f"I look.{NOW}\n{WEATHER}{END}")
    reply = await chat.generate()
    now, weather = reply.tool_calls
    assert (reply.content, reply.complete, reply.invalid_tool_calls) == ("I look.", True, ())
    assert json.loads(weather["function"]["arguments"]) == {"city": "서울"}
    assert list(chat.session.token_ids) == first + said

    # Results in another order than the calls; and an update of the weights.
    policy.server.commit(2)
    chat.append(
        [
            {"role": "tool", "tool_call_id": weather["id"], "content": "rain"},
            {"role": "tool", "tool_call_id": now["id"], "content": "noon"},
        ]
    )
    told = list(chat.session.token_ids)
    assert told[: len(first + said)] == first + said
    tail = policy.tokenizer.decode(told[len(first + said) :])
    assert tail.startswith("\n<|im_start|>user\n<tool_response>\nnoon\n</tool_response>")
    assert tail.index("noon") < tail.index("rain")
    assert "<|im_start|>assistant\n" in tail

    again = policy.say(f"{NOW}{END}")
    reply = await chat.generate(Sampling(temperature=0.5))
    (call,) = reply.tool_calls
    chat.append([{"role": "tool", "tool_call_id": call["id"], "content": "noon"}])
    last = policy.say(f"It rains.{END}")
    reply = await chat.generate()
    assert (reply.content, reply.tool_calls) == ("It rains.", ())
    assert [r.trajectory.token_ids for r in chat.replies] == [
        tuple(ids) for ids in (said, again, last)
    ]

    conversation = chat.session.conversation()
    sampled = [t for t, mine in zip(conversation.token_ids, conversation.mask, strict=True) if mine]
    assert sampled == said + again + last
    assert [v for v in conversation.versions if v is not None] == [1] * len(said) + [2] * len(
        again + last
    )


async def test_a_turn_that_was_cut_is_closed(policy: Policy) -> None:
    chat = policy.chat()
    policy.say("It rains, and then" + END)
    reply = await chat.generate(Sampling(max_new_tokens=3))
    assert reply.trajectory.finish is not None
    assert reply.trajectory.finish.reason is FinishReason.LENGTH
    assert not reply.complete
    held = list(chat.session.token_ids)
    chat.append([{"role": "user", "content": "Go on."}])
    tail = policy.tokenizer.decode(list(chat.session.token_ids)[len(held) :])
    assert tail.startswith("<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>")


async def test_unfinished_thoughts_are_no_answer(policy: Policy, folder: Path) -> None:
    thinking = create_renderer(loaded_tokenizer(folder), Qwen3RendererConfig(enable_thinking=True))
    chat = Chat(policy.fleet.session(), thinking, MESSAGES)
    policy.say("<think>\nIt may be" + END)
    reply = await chat.generate(Sampling(max_new_tokens=6))
    assert (reply.content, reply.reasoning_complete, reply.complete) == ("", False, False)


async def test_broken_calls_are_outcomes(policy: Policy) -> None:
    chat = policy.chat()
    policy.say(f"<tool_call>\n{{nothing}}\n</tool_call>{END}")
    reply = await chat.generate()
    assert reply.tool_calls == ()
    assert reply.invalid_tool_calls == ({"raw": "{nothing}", "status": "invalid_json"},)
    chat.append([{"role": "user", "content": "That was no call."}])


async def test_wrong_results_are_named(policy: Policy) -> None:
    chat = policy.chat()
    with pytest.raises(RuntimeError, match="the policy's turn"):
        chat.append([{"role": "user", "content": "x"}])
    policy.say(f"{NOW}\n{WEATHER}{END}")
    reply = await chat.generate()
    now, weather = (
        {"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in reply.tool_calls
    )
    before = chat.session.token_ids
    for results, problem in (
        ([now], "is missing"),
        ([now, now, weather], "two results"),
        ([now, weather, {**now, "tool_call_id": "other"}], "other is no call"),
    ):
        with pytest.raises(ValueError, match=problem):
            chat.append(results)
    assert chat.session.token_ids == before
    with pytest.raises(RuntimeError, match="has had its turn"):
        await chat.generate()
    chat.append([now, weather])


async def test_where_the_template_changes_what_was_said_a_new_chat_begins(
    policy: Policy, folder: Path
) -> None:
    """Qwen's template drops thoughts at the next question."""
    thinking = create_renderer(loaded_tokenizer(folder), Qwen3RendererConfig(enable_thinking=True))
    chat = Chat(policy.fleet.session(), thinking, MESSAGES)
    policy.say(f"<think>\nHm.\n</think>\n\nRain.{END}")
    reply = await chat.generate()
    assert (reply.content, reply.complete) == ("Rain.", True)
    assert (reply.reasoning or "").strip() == "Hm."
    question = {"role": "user", "content": "And now?"}
    with pytest.raises(ValueError, match="begin another chat"):
        chat.append([question])
    other = Chat(policy.fleet.session(), thinking, [*MESSAGES, reply.message(), question])
    assert "Hm." not in policy.tokenizer.decode(list(other.session.token_ids))


async def test_a_cancelled_turn_can_be_generated_again(policy: Policy) -> None:
    chat = policy.chat()
    policy.server._pause = 0.05
    policy.say("word " * 100 + END)
    before = chat.session.token_ids
    turn = asyncio.create_task(chat.generate())
    await until(lambda: policy.server.running == 1)
    turn.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await turn
    assert chat.session.token_ids == before
    policy.server._pause = 0.0
    policy.say(f"Rain.{END}")
    assert (await chat.generate()).content == "Rain."


async def test_forks_go_their_own_ways(policy: Policy) -> None:
    chat = policy.chat()
    policy.say(f"Rain.{END}")
    await chat.generate()
    other = chat.fork()
    chat.append([{"role": "user", "content": "Sure?"}])
    other.append([{"role": "user", "content": "Really?"}])
    policy.say(f"Yes.{END}")
    replies = await asyncio.gather(chat.generate(), other.generate())
    assert [reply.content for reply in replies] == ["Yes.", "Yes."]
    assert "Sure?" in policy.tokenizer.decode(list(chat.session.token_ids))
    assert "Sure?" not in policy.tokenizer.decode(list(other.session.token_ids))

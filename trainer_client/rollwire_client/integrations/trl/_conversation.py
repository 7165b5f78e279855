"""Conversations with tools, as tokens: rendered, held and parsed as TRL does it."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rollwire.types import FinishReason
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
)

from rollwire_client._concurrency import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_client._batches.batch import Prompt, Sample
    from rollwire_client._fleet.session import Session

Message: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class ToolUse:
    """What one conversation has had from tools.

    Attributes:
        messages: Their messages, after each turn that called any.
        calls, failures: Their numbers.
    """

    messages: list[list[Message]] = field(default_factory=list)
    calls: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A row of the data set, for one group.

    Attributes:
        number: Of the group, from 0.
        row: The row.
        tool_use: By the ids of the sessions of its samples.
    """

    number: int
    row: dict[str, Any]
    tool_use: dict[str, ToolUse] = field(default_factory=dict)


class Conversations:
    """Renders prompts, holds conversations, and makes messages of tokens.

    Attributes:
        tokenizer: The caller's, or a copy of it that parses tool calls.
        tools: By their names.
        context_length: Most tokens of a conversation, once it is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Callable[..., Any]],
        template_kwargs: dict[str, Any],
        max_iterations: int | None,
        tool_timeout: float,
    ) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        self.context_length: int | None = None
        self.tokenizer = tokenizer
        self._template: str | None = None
        self._template_kwargs = template_kwargs
        self._max_iterations = max_iterations
        self._tool_timeout = tool_timeout
        if tools and not _parses(tokenizer):
            self.tokenizer = add_response_schema(copy.deepcopy(tokenizer))
        if tools and not is_chat_template_prefix_preserving(self.tokenizer):
            self._template = get_training_chat_template(self.tokenizer)

    def render(self, messages: Sequence[Message], *, prompt: bool = True) -> list[int]:
        """The tokens of messages; ``prompt``: and of the beginning of a reply."""
        if isinstance(messages, str):
            raise TypeError("a prompt is a text: give a list of messages, as for a chat")
        token_ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(self.tools.values()) or None,
            chat_template=self._template,
            add_generation_prompt=prompt,
            tokenize=True,
            return_dict=False,
            **self._template_kwargs,
        )
        return token_ids

    async def hold(self, session: Session, prompt: Prompt) -> None:
        """Has turns sampled and calls tools, until a turn calls none."""
        use = prompt.info.tool_use[session.id] = ToolUse()
        while True:
            turn = await session.generate()
            calls = self.parse(turn.prompt_ids, turn.token_ids).get("tool_calls")
            if not calls or turn.finish is None or turn.finish.reason is not FinishReason.STOP:
                return
            if self._max_iterations is not None and len(use.messages) >= self._max_iterations:
                return
            results = [await self._call(call, use) for call in calls]
            suffix = self._suffix(results)
            limit = self.context_length
            if limit is not None and len(session.token_ids) + len(suffix) >= limit:
                return
            use.messages.append(results)
            session.append(suffix)

    def messages(self, sample: Sample, task: Task) -> list[Message]:
        """The replies of a complete sample, and what tools said between them."""
        turns = sample.turns
        use = self.tool_use(sample, task)
        messages = []
        for number, turn in enumerate(turns):
            messages.append(self.parse(turn.prompt_ids, turn.token_ids))
            if number + 1 < len(turns):
                messages += use.messages[number]
        return messages

    def tool_use(self, sample: Sample, task: Task) -> ToolUse:
        """What it has had from tools."""
        if sample.conversation is None:
            return ToolUse()
        return task.tool_use[sample.conversation.session_id]

    def parse(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> Message:
        """The message of a reply."""
        if _parses(self.tokenizer):
            message: Message = parse_response(
                self.tokenizer,
                list(token_ids),
                prefix=list(prompt_ids),
                tools=list(self.tools.values()),
            )
            return message
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    async def _call(self, call: Message, use: ToolUse) -> Message:
        """A tool's message; what goes wrong is its content."""
        function = call.get("function") or {}
        name, arguments = str(function.get("name")), function.get("arguments") or {}
        use.calls += 1
        try:
            if (tool := self.tools.get(name)) is None:
                raise LookupError(f"unknown tool {name}")  # noqa: TRY301 - an outcome like others
            async with asyncio.timeout(self._tool_timeout):
                if inspect.iscoroutinefunction(tool):
                    result = await tool(**arguments)
                else:
                    result = await run_in_thread(functools.partial(tool, **arguments))
        except Exception as error:
            use.failures += 1
            result = {"error": str(error) or type(error).__name__}
        return {"role": "tool", "name": name, "content": str(result)}

    def _suffix(self, results: list[Message]) -> list[int]:
        """The tokens that follow a turn's end token: tools' messages, and the beginning of the next
        reply. The tokens of the conversation stay as they were sampled.
        """
        call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
        before: list[Message] = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        prefix = self.render(before, prompt=False)
        whole = self.render([*before, *results])
        ends = [place for place, token in enumerate(prefix) if token == self.tokenizer.eos_token_id]
        if ends:  # templates put more after it, such as a newline
            prefix = prefix[: ends[-1] + 1]
        if whole[: len(prefix)] != prefix:
            raise ValueError("the chat template renders a reply differently when tools' follow it")
        return whole[len(prefix) :]


def _parses(tokenizer: Any) -> bool:
    """Whether it knows how replies with tool calls look."""
    names = ("response_template", "response_schema")
    return any(getattr(tokenizer, name, None) is not None for name in names)

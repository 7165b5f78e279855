"""Chats over a fleet: messages in, messages out, and the tokens between them kept as sampled.

    chat = Chat(fleet.session(), create_renderer(tokenizer), messages, tools=tools)
    while (reply := await chat.generate(sampling)).tool_calls:
        chat.append([await result_of(call) for call in reply.tool_calls])
    conversation = chat.session.conversation()

A renderer of PyPI's ``renderers`` (``pip install 'rollwire[tools]'``) makes tokens of messages as
the model's chat template does, and finds calls of tools in what was sampled. A turn continues from
exactly the tokens of the turns before: what was sampled is never converted to text and back.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from rollwire.types import FinishReason

from rollwire_client._data import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._fleet.session import Session
    from rollwire_client._rpc.conversion import RolloutOptions
    from rollwire_client._trajectory import Trajectory

__all__ = ["Chat", "ChatRenderer", "ParsedMessage", "Reply", "parse_message"]

Message = dict[str, Any]


class ChatRenderer(Protocol):
    """What a ``Chat`` uses of a renderer; those of PyPI's ``renderers`` have it."""

    def render(self, messages: Any, *, tools: Any, add_generation_prompt: bool) -> Any:
        """Has the ``token_ids`` of messages."""

    def parse_response(self, token_ids: Any, *, prompt_ids: Any, tools: Any) -> Any:
        """Has ``content``, ``reasoning_content``, ``reasoning_complete`` and ``tool_calls``."""

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Any,
        previous_completion_ids: Any,
        new_messages: Any,
        *,
        tools: Any,
    ) -> Any:
        """Has the ``token_ids`` of the conversation with new messages; None: it changed."""

    def get_stop_token_ids(self) -> Any:
        """The tokens that end a turn."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """What the policy says in its turn.

    Attributes:
        content: Its words.
        reasoning: What it thought before; None if it did not.
        reasoning_complete: Whether its thoughts have an end. If not, there are no words yet.
        tool_calls: Its calls, in OpenAI's shape: the arguments are JSON, as text.
        invalid_tool_calls: What was meant as a call and is none: "raw", its text, and "status",
            what is wrong with it.
    """

    content: str
    reasoning: str | None = None
    reasoning_complete: bool = True
    tool_calls: tuple[Message, ...] = ()
    invalid_tool_calls: tuple[dict[str, str], ...] = ()

    def message(self) -> Message:
        """The message of the assistant, in OpenAI's shape."""
        made: Message = {"role": "assistant", "content": self.content or None}
        if self.reasoning is not None:
            made["reasoning_content"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [dict(call) for call in self.tool_calls]
        return made


@dataclass(frozen=True, slots=True)
class Reply(ParsedMessage):
    """A turn of the policy.

    Attributes:
        trajectory: The tokens of the turn, and how it ended.
    """

    trajectory: Trajectory = field(kw_only=True)

    @property
    def complete(self) -> bool:
        """Whether the policy ended its turn itself, outside of its thoughts."""
        finish = self.trajectory.finish
        stopped = finish is not None and finish.reason is FinishReason.STOP
        return stopped and self.reasoning_complete


def parse_message(
    renderer: ChatRenderer, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Any = None
) -> ParsedMessage:
    """Makes a message of the tokens that were sampled after a prompt."""
    parsed = renderer.parse_response(list(token_ids), prompt_ids=list(prompt_ids), tools=tools)
    calls, invalid = [], []
    for call in parsed.tool_calls:
        if call.status == "ok" and call.name:
            calls.append(_call(call))
        else:
            invalid.append({"raw": call.raw, "status": str(call.status)})
    return ParsedMessage(
        content=parsed.content or "",
        reasoning=parsed.reasoning_content,
        reasoning_complete=parsed.reasoning_complete is not False,
        tool_calls=tuple(calls),
        invalid_tool_calls=tuple(invalid),
    )


def _call(call: Any) -> Message:
    arguments = call.arguments if call.arguments is not None else {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {
        "id": call.id or f"call_{uuid.uuid4().hex}",
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


class Chat:
    """A conversation in messages, over a session.

    Args:
        session: Of ``Fleet.session``, or the one that a ``Batcher`` gives a rollout function.
        renderer: The model's.
        messages: How the chat begins. None: the session has the tokens of these messages already,
            with the beginning of the policy's turn.
        tools: The tools that the policy may call, as OpenAI's API has them.

    Attributes:
        session: Has the tokens; ``session.conversation()`` is what a loss needs.
        replies: The turns of the policy so far.
    """

    def __init__(
        self,
        session: Session,
        renderer: ChatRenderer,
        messages: Sequence[Message] | None = None,
        *,
        tools: Sequence[Message] | None = None,
    ) -> None:
        self.session = session
        self.replies: list[Reply] = []
        self._renderer = renderer
        self._tools = list(tools) if tools else None
        self._waiting = True  # for the policy's turn
        if messages is not None:
            rendered = renderer.render(
                list(messages), tools=self._tools, add_generation_prompt=True
            )
            session.append(rendered.token_ids)

    async def generate(
        self, sampling: Sampling | None = None, **options: Unpack[RolloutOptions]
    ) -> Reply:
        """Samples the policy's turn; see ``Session.generate``. Tokens that end a turn of this model
        stop it, besides those of ``sampling``. Of a turn that failed or was cancelled, no token
        stays in the session, so that it can be generated again.

        Raises:
            RuntimeError: It is not the policy's turn: ``append`` what it is told next.
        """
        if not self._waiting:
            raise RuntimeError("the policy has had its turn: append what it is told next")
        sampling = sampling or Sampling()
        ends = dict.fromkeys([*sampling.stop_token_ids, *self._renderer.get_stop_token_ids()])
        before = len(self.session.token_ids)
        self._waiting = False
        try:
            turn = await self.session.generate(
                replace(sampling, stop_token_ids=tuple(ends)), **options
            )
        except BaseException:
            self.session.rewind(before)
            self._waiting = True
            raise
        parsed = parse_message(self._renderer, turn.prompt_ids, turn.token_ids, self._tools)
        reply = Reply(
            parsed.content, parsed.reasoning, parsed.reasoning_complete, parsed.tool_calls,
            parsed.invalid_tool_calls, trajectory=turn,
        )  # fmt: skip
        self.replies.append(reply)
        return reply

    def append(self, messages: Sequence[Message]) -> None:
        """Adds what the policy is told next: the results of all calls of its turn, or the words of
        the user. Its own tokens stay as they were sampled; a turn that was cut is closed as the
        model's template does.

        Results are told apart by their ``tool_call_id``, and brought into the order of the calls.

        Raises:
            ValueError: A result is missing or belongs to no call; or the template would change
                what was said before, such as drop thoughts: begin another chat with all messages.
            RuntimeError: It is the policy's turn.
        """
        if self._waiting or not self.replies:
            raise RuntimeError("it is the policy's turn: generate it first")
        reply = self.replies[-1]
        held = list(self.session.token_ids)
        prompt, output = list(reply.trajectory.prompt_ids), list(reply.trajectory.token_ids)
        if held != prompt + output:
            raise RuntimeError("the session has other tokens than the chat: append messages alone")
        bridged = self._renderer.bridge_to_next_turn(
            prompt, output, _in_order(reply, messages), tools=self._tools
        )
        told = None if bridged is None else list(bridged.token_ids)
        if told is None or told[: len(held)] != held:
            raise ValueError(
                "the model's template does not continue from these tokens with these messages, as "
                "it changes what was said before: begin another chat with all messages"
            )
        self.session.append(told[len(held) :])
        self._waiting = True

    def fork(self) -> Chat:
        """Another chat with the same turns, which goes its own way; see ``Session.fork``."""
        made = Chat(self.session.fork(), self._renderer, tools=self._tools)
        made.replies, made._waiting = list(self.replies), self._waiting
        return made


def _in_order(reply: Reply, messages: Sequence[Message]) -> list[Message]:
    """The results in the order of the calls: most templates tell them apart by nothing else."""
    order = [call["id"] for call in reply.tool_calls]
    results = [message for message in messages if message.get("tool_call_id") is not None]
    given = [message["tool_call_id"] for message in results]
    if unknown := [name for name in given if name not in order]:
        raise ValueError(f"{unknown[0]} is no call of the policy's last turn, or has its result")
    if len(set(given)) < len(given):
        raise ValueError("a call has two results")
    if results and (missing := [name for name in order if name not in given]):
        raise ValueError(f"the result of {missing[0]} is missing: append all of a turn at once")
    results.sort(key=lambda message: order.index(message["tool_call_id"]))
    return [*results, *(m for m in messages if m.get("tool_call_id") is None)]

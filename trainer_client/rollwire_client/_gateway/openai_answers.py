"""The answers of OpenAI's endpoints: choices, whole or as events."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from rollwire.types import FinishReason

from rollwire_client._gateway.answers import number
from rollwire_client._gateway.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import Finish

    from rollwire_client._gateway.answers import EventSender
    from rollwire_client._gateway.gateway import Gateway
    from rollwire_client._gateway.sampler import SampleRequest
    from rollwire_client._trajectory import Chunk, Trajectory


@dataclass(frozen=True, slots=True)
class TokenFields:
    """Which fields of its tokens a choice has, besides its text.

    Attributes:
        logprobs: OpenAI's.
        as_ids: Whether OpenAI's name tokens as "token_id:17", as vLLM does, instead of by text.
        token_ids: The extra fields ``token_ids``, ``token_logprobs`` and ``weight_versions``.
    """

    logprobs: bool
    as_ids: bool
    token_ids: bool

    def extra_fields(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Any
    ) -> Any:
        if not self.token_ids:
            return {}
        return {
            "token_ids": list(token_ids),
            "token_logprobs": list(map(number, logprobs)),
            "weight_versions": list(versions),
        }


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request of either endpoint, read and checked."""

    sample: SampleRequest
    tokens: TokenFields
    model: str
    chat: bool
    stream: bool
    include_usage: bool
    skip_special_tokens: bool
    echo: Sequence[str]  # what the text of each prompt's choices begins with
    parsed_tools: list[Any] | None = None  # whose calls are looked for


class ChoiceShape:
    """One answer: the fields of all its objects, and the choices in them."""

    def __init__(self, gateway: Gateway, request: TextRequest) -> None:
        self.gateway = gateway
        self.request = request
        self.tokenizer = gateway.tokenizer_for("text")
        self.kind = "chat.completion" if request.chat else "text_completion"
        self.chunk_kind = self.kind + (".chunk" if request.chat else "")
        prefix = "chatcmpl-" if request.chat else "cmpl-"
        self.head = {
            "id": prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": request.model,
        }

    async def whole(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        choices = []
        for index, trajectory in enumerate(trajectories):
            message, reason = await self.message(trajectory)
            content: dict[str, Any]
            if self.request.chat:
                content = {"message": {"role": "assistant", "refusal": None, **message}}
            else:
                content = {"text": self.echo(index) + message["content"]}
            choices.append(
                {
                    "index": index,
                    **content,
                    **self.tokens(trajectory.token_ids, trajectory.logprobs, trajectory.versions),
                    **self.ended(trajectory, reason),
                    **self.prompt_ids(index),
                }
            )
        return {
            **self.head,
            "object": self.kind,
            "choices": choices,
            "usage": self.usage([len(t.token_ids) for t in trajectories]),
            **self.chat_prompt_ids(),
        }

    async def stream(self, events: EventSender) -> None:
        """Sends each chunk of each sequence as an event."""
        stream = _ChoiceEvents(self, events)
        trajectories = await self.gateway.sampler.run(self.request.sample, stream)
        if self.request.include_usage:
            usage = self.usage([len(t.token_ids) for t in trajectories])
            await events.send(
                {**self.head, "object": self.chunk_kind, "choices": [], "usage": usage}
            )

    def delta(self, text: str) -> dict[str, Any]:
        if not self.request.chat:
            return {"text": text}
        return {"delta": {"content": text} if text else {}}

    def echo(self, index: int) -> str:
        return self.request.echo[index // self.request.sample.options.n]

    def prompt_ids(self, index: int) -> dict[str, Any]:
        """As vLLM has them: of a completion in each choice, of a chat once."""
        if not self.request.tokens.token_ids or self.request.chat:
            return {}
        prompt = self.request.sample.prompts[index // self.request.sample.options.n]
        return {"prompt_token_ids": list(prompt)}

    def chat_prompt_ids(self) -> dict[str, Any]:
        if not self.request.tokens.token_ids or not self.request.chat:
            return {}
        return {"prompt_token_ids": list(self.request.sample.prompts[0])}

    def tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int | None]
    ) -> dict[str, Any]:
        fields = self.request.tokens
        made: Any = None
        if fields.logprobs:
            names = [self._name(token) for token in token_ids]
            made = (_chat_logprobs if self.request.chat else _legacy_logprobs)(names, logprobs)
        return {"logprobs": made, **fields.extra_fields(token_ids, logprobs, versions)}

    def _name(self, token: int) -> str:
        if self.request.tokens.as_ids:
            return f"token_id:{token}"
        return self.tokenizer.token(token)

    async def message(self, trajectory: Trajectory) -> tuple[dict[str, Any], str]:
        """The fields of a message, and how it ended."""
        reason = finish_reason(trajectory.finish)
        if (tools := self.request.parsed_tools) is None:
            text = await self.tokenizer.text(
                trajectory, skip_special_tokens=self.request.skip_special_tokens
            )
            return {"content": text}, reason
        parsed = await self.tokenizer.message(trajectory.prompt_ids, trajectory.token_ids, tools)
        made = parsed.message()
        if parsed.invalid_tool_calls:
            made["invalid_tool_calls"] = list(parsed.invalid_tool_calls)
        # An output that was cut may lack a call: it says so.
        return made, "tool_calls" if parsed.tool_calls and reason == "stop" else reason

    def ended(self, trajectory: Trajectory, reason: str) -> dict[str, Any]:
        finish = trajectory.finish
        stop: str | int | None = trajectory.stop_string
        if stop is None and finish is not None and finish.stop_token_id is not None:
            asked = self.request.sample.options.sampling.stop_token_ids
            stop = finish.stop_token_id if finish.stop_token_id in asked else None
        return {"finish_reason": reason, "stop_reason": stop}

    def usage(self, output: Sequence[int]) -> dict[str, Any]:
        prompt = sum(map(len, self.request.sample.prompts))
        return usage(prompt, sum(output))


class _ChoiceEvents:
    """The chunks of one answer, as events."""

    def __init__(self, shape: ChoiceShape, events: EventSender) -> None:
        self._shape = shape
        self._events = events
        self._shown: dict[int, int] = {}  # characters of each sequence that has begun
        fields = shape.request.tokens
        self._shows_tokens = fields.logprobs or fields.token_ids

    async def on_chunk(self, number: int, chunk: Chunk) -> None:
        shape, first = self._shape, {}
        text = chunk.text if shape.request.parsed_tools is None else ""
        begins = number not in self._shown
        self._shown[number] = self._shown.get(number, 0) + len(text)
        if begins:
            first, text = shape.prompt_ids(number), shape.echo(number) + text
            if shape.request.chat:
                role = {"role": "assistant", "content": ""}
                await self._send(number, {"delta": role}, **shape.chat_prompt_ids())
        if text or first or (self._shows_tokens and chunk.token_ids):
            versions = [chunk.weights.version] * len(chunk.token_ids)
            tokens = shape.tokens(chunk.token_ids, chunk.logprobs, versions)
            await self._send(number, {**shape.delta(text), **tokens, **first})

    async def on_end(self, number: int, trajectory: Trajectory) -> None:
        shape = self._shape
        # What was held back, as it might have become a stop string, of a sequence that was aborted.
        rest = (trajectory.text or "")[self._shown.get(number, 0) :]
        delta, reason = shape.delta(rest), finish_reason(trajectory.finish)
        if shape.request.parsed_tools is not None:  # all at once, however the stream was cut
            message, reason = await shape.message(trajectory)
            for index, call in enumerate(message.get("tool_calls", [])):
                call["index"] = index
            delta = {"delta": message}
        ended = shape.ended(trajectory, reason)
        await self._send(number, {**delta, "logprobs": None, **ended})

    async def _send(self, number: int, choice: dict[str, Any], **fields: Any) -> None:
        whole = {"index": number, "finish_reason": None, **choice}
        head = {**self._shape.head, "object": self._shape.chunk_kind}
        await self._events.send({**head, "choices": [whole], **fields})


def usage(prompt: int, output: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }


def finish_reason(finish: Finish | None) -> str:
    """How a sequence ended, as vLLM names it."""
    if finish is None or finish.reason is FinishReason.ABORTED:
        return "abort"
    if finish.reason in {FinishReason.STOP, FinishReason.LENGTH}:
        return str(finish.reason.value)
    raise HttpError(
        HTTPStatus.BAD_GATEWAY, f"the sequence ended as {finish.reason.value}: {finish.message}"
    )


def _chat_logprobs(names: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    content = [
        {
            "token": name,
            "logprob": number(logprob),
            "bytes": None if "\ufffd" in name else list(name.encode()),
            "top_logprobs": [],
        }
        for name, logprob in zip(names, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _legacy_logprobs(names: Sequence[str], logprobs: Sequence[float]) -> dict[str, Any]:
    values = list(map(number, logprobs))
    return {
        "tokens": list(names),
        "token_logprobs": values,
        "top_logprobs": [{name: value} for name, value in zip(names, values, strict=True)],
        "text_offset": None,
    }

"""SGLang's ``/generate``, ``/abort_request``, ``/update_weights_from_disk``, ``/server_info``."""

from __future__ import annotations

import re
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollwire_client._gateway.answers import EventAnswer, json_answer, number
from rollwire_client._gateway.errors import invalid
from rollwire_client._gateway.fields import is_token_ids
from rollwire_client._gateway.openai_answers import finish_reason
from rollwire_client._gateway.sampler import SampleRequest
from rollwire_client._gateway.sampling import sglang_options, with_rollout_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._gateway.answers import EventSender
    from rollwire_client._gateway.fields import Fields
    from rollwire_client._gateway.gateway import Gateway
    from rollwire_client._trajectory import Chunk, Trajectory

_UNSUPPORTED = (
    "image_data", "audio_data", "video_data", "input_embeds", "lora_path", "token_ids_logprob",
    "custom_logit_processor", "session_params", "bootstrap_host", "bootstrap_room",
)  # fmt: skip


_DECIMAL = re.compile("[0-9]{1,20}")


async def generate(gateway: Gateway, fields: Fields, session: str) -> Any:
    name = fields.text("rid") or uuid.uuid4().hex
    prompts, batched = await _prompts(gateway, fields)
    stream, logprobs = fields.boolean("stream"), fields.boolean("return_logprob")
    fields.only("logprob_start_len", -1)
    fields.only("top_logprobs_num", 0)
    fields.off("return_hidden_states")
    fields.off("return_routed_experts")
    for unsupported in _UNSUPPORTED:
        fields.only(unsupported)
    sampling = fields.object("sampling_params")
    options = with_rollout_fields(sglang_options(sampling), fields)
    sampling.end()
    fields.ignore(
        ("return_text_in_logprobs", "priority", "log_metrics", "extra_key", "routing_key")
    )
    fields.end()
    detokenizer = None
    if gateway.tokenizer is not None and (stream or options.stop):
        detokenizer = gateway.tokenizer.detokenizer(
            options.stop, skip_special_tokens=options.skip_special_tokens
        )
    elif options.stop:
        gateway.tokenizer_for("stop strings")
    request = SampleRequest(prompts, options, session, name, detokenizer)
    shape = _GenerateShape(gateway, request, name, logprobs=logprobs)
    if stream:

        async def produce(events: EventSender) -> None:
            await gateway.sampler.run(request, _CumulativeEvents(shape, events))

        return EventAnswer(produce, gateway.heartbeat)
    trajectories = await gateway.sampler.run(request)
    answers = [await shape.answer(i, t) for i, t in enumerate(trajectories)]
    return json_answer(answers if batched or shape.several else answers[0])


async def _prompts(gateway: Gateway, fields: Fields) -> tuple[list[Sequence[int]], bool]:
    """The token ids of each prompt, and whether a list of prompts was given."""
    text, ids = fields.take("text"), fields.take("input_ids")
    if (text is None) == (ids is None):
        raise fields.wrong("input_ids", ids, "given: send input_ids or text, and not both")
    if text is not None:
        tokenizer = gateway.tokenizer_for("text")
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
            raise fields.wrong("text", text, "a text or a list of texts")
        encoded = [await tokenizer.encode(item, special_tokens=True) for item in texts]
        return [*encoded], not isinstance(text, str)
    if is_token_ids(ids):
        return [ids], False
    if not isinstance(ids, list) or not all(map(is_token_ids, ids)):
        raise fields.wrong("input_ids", ids, "a list of token ids, or a list of these")
    return ids, True


class _GenerateShape:
    """The answers to one request."""

    def __init__(
        self, gateway: Gateway, request: SampleRequest, name: str, *, logprobs: bool
    ) -> None:
        self._gateway = gateway
        self._request = request
        self._name = name
        self._logprobs = logprobs
        self.several = len(request.prompts) * request.options.n > 1

    async def answer(self, index: int, trajectory: Trajectory) -> dict[str, Any]:
        text, tokenizer = "", self._gateway.tokenizer
        if tokenizer is not None:
            text = await tokenizer.text(
                trajectory, skip_special_tokens=self._request.options.skip_special_tokens
            )
        output = _OutputSoFar(
            text, list(trajectory.token_ids), list(trajectory.logprobs), list(trajectory.versions)
        )
        finish = trajectory.finish
        answer = self.shaped(index, output, _ended(trajectory))
        answer["meta_info"]["cached_tokens"] = finish.cached_prompt_tokens if finish else 0
        return answer

    def shaped(
        self, index: int, output: _OutputSoFar, ended: dict[str, Any] | None
    ) -> dict[str, Any]:
        newest = output.versions[-1] if output.versions else None
        prompt = self._request.prompts[index // self._request.options.n]
        meta: dict[str, Any] = {
            "id": f"{self._name}_{index}" if self.several else self._name,
            "finish_reason": ended,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(output.ids),
            "cached_tokens": 0,
            # As SGLang has it: one, as text.
            "weight_version": "default" if newest is None else str(newest),
            "weight_versions": output.versions,
        }
        if self._logprobs:
            meta["output_token_logprobs"] = [
                [number(logprob), token, None]
                for logprob, token in zip(output.logprobs, output.ids, strict=True)
            ]
        return {"text": output.text, "output_ids": output.ids, "meta_info": meta}


@dataclass(slots=True)
class _OutputSoFar:
    """What a sequence has sampled so far."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)


def _ended(trajectory: Trajectory) -> dict[str, Any]:
    finish = trajectory.finish
    reason = finish_reason(finish)
    if reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    if reason == "length":
        return {"type": "length", "length": len(trajectory.token_ids)}
    matched: str | int | None = trajectory.stop_string
    if matched is None and finish is not None:
        matched = finish.stop_token_id
    return {"type": "stop", "matched": matched}


class _CumulativeEvents:
    """As SGLang by default: each event has all that was sampled so far."""

    def __init__(self, shape: _GenerateShape, events: EventSender) -> None:
        self._shape = shape
        self._events = events
        self._outputs: defaultdict[int, _OutputSoFar] = defaultdict(_OutputSoFar)

    async def on_chunk(self, number: int, chunk: Chunk) -> None:
        if chunk.finish is not None:  # the last event has it
            return
        output = self._outputs[number]
        output.text += chunk.text
        output.ids += chunk.token_ids
        output.logprobs += chunk.logprobs
        output.versions += [chunk.weights.version] * len(chunk.token_ids)
        await self._send(number, self._shape.shaped(number, output, None))

    async def on_end(self, number: int, trajectory: Trajectory) -> None:
        await self._send(number, await self._shape.answer(number, trajectory))

    async def _send(self, number: int, answer: dict[str, Any]) -> None:
        await self._events.send({**answer, **({"index": number} if self._shape.several else {})})


async def abort_request(gateway: Gateway, fields: Fields) -> Any:
    everything = fields.boolean("abort_all")
    name = fields.text("rid")
    fields.ignore(("abort_message",))
    fields.end()
    if not everything and not name:
        raise invalid("rid is missing: send it, or abort_all true", "rid")
    aborted = gateway.sampler.abort(None if everything else name)
    return json_answer({"success": True, "message": "", "sequences": aborted})


async def update_from_disk(gateway: Gateway, fields: Fields) -> Any:
    """SGLang's request, as slime and AReaL send it."""
    folder = fields.text("model_path")
    version = _version(fields)
    fields.only("load_format", "auto", "safetensors")
    fields.off("abort_all_requests")
    fields.off("is_async")
    fields.off("keep_pause")
    fields.off("recapture_cuda_graph")
    fields.only("token_step", 0)
    fields.only("manifest", {})
    fields.ignore(("torch_empty_cache", "flush_cache"))
    fields.end()
    if not folder:
        raise fields.wrong("model_path", folder, "the path of a checkpoint folder")
    report = await gateway.updater.update(folder, version)
    servers = len(report.servers)
    committed = servers - len(report.failed)
    return json_answer(
        {
            "success": not report.failed,
            "message": f"version {report.version} is on {committed} of {servers} servers"
            + "".join(f"; {server.error}" for server in report.failed),
            "num_paused_requests": sum(server.held_sequences for server in report.servers),
            "weight_version": str(report.version),
            "digest": f"{report.digest:016x}",
        }
    )


def _version(fields: Fields) -> int | None:
    value = fields.take("weight_version")
    if value is None:
        return None
    if isinstance(value, str) and _DECIMAL.fullmatch(value) is not None:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise fields.wrong("weight_version", value, "a version: an integer from 0 on")
    return value


async def server_info(gateway: Gateway) -> Any:
    """The gateway and the servers behind it; the first names are SGLang's."""
    servers = await gateway.servers()
    return json_answer(
        {
            "model_path": gateway.model_names[0],
            "served_model_name": gateway.model_names[0],
            "max_total_num_tokens": sum(s.get("kv_tokens_total", 0) for s in servers),
            "context_length": await gateway.context_length(),
            "weight_version": await gateway.weight_version(),
            "version": gateway.software_version,
            "status": "draining" if gateway.draining else "ready",
            "servers": servers,
        }
    )


async def model_info(gateway: Gateway) -> Any:
    return json_answer(
        {
            "model_path": gateway.model_names[0],
            "tokenizer_path": gateway.tokenizer_path,
            "is_generation": True,
            "weight_version": await gateway.weight_version(),
        }
    )

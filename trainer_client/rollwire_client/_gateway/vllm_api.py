"""vLLM's ``/inference/v1/generate``: token ids in, token ids out, as verifiers' renderers ask."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from rollwire_client._gateway.answers import EventAnswer, json_answer, number
from rollwire_client._gateway.openai_answers import finish_reason, usage
from rollwire_client._gateway.sampler import SampleRequest
from rollwire_client._gateway.sampling import openai_options, with_rollout_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._gateway.answers import EventSender
    from rollwire_client._gateway.fields import Fields
    from rollwire_client._gateway.gateway import Gateway
    from rollwire_client._trajectory import Chunk, Trajectory


async def generate(gateway: Gateway, fields: Fields, session: str) -> Any:
    gateway.checked_model(fields.text("model"))
    name = fields.text("request_id") or ""
    prompt = fields.token_ids("token_ids")
    if prompt is None:
        raise fields.wrong("token_ids", prompt, "a list of token ids")
    stream = fields.boolean("stream")
    for unsupported in ("features", "content_parts", "kv_transfer_params"):
        fields.only(unsupported)
    sampling = fields.object("sampling_params")
    sampling.integer(
        "logprobs", minimum=0, maximum=1
    )  # those of the sampled tokens are always sent
    options = with_rollout_fields(openai_options(sampling), fields)
    sampling.end()
    fields.ignore(("cache_salt", "priority", "return_token_ids", "stream_options"))
    fields.end()
    detokenizer = None
    if options.stop:
        detokenizer = gateway.tokenizer_for("stop strings").detokenizer(options.stop)
    request = SampleRequest([prompt], options, session, name, detokenizer)
    answer_id = name or uuid.uuid4().hex
    if stream:

        async def produce(events: EventSender) -> None:
            await gateway.sampler.run(request, _TokenEvents(answer_id, events))

        return EventAnswer(produce, gateway.heartbeat)
    trajectories = await gateway.sampler.run(request)
    return json_answer(
        {
            "request_id": answer_id,
            "choices": [_choice(i, t) for i, t in enumerate(trajectories)],
            "prompt_logprobs": None,
            "usage": usage(len(prompt), sum(len(t.token_ids) for t in trajectories)),
        }
    )


def _choice(index: int, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "index": index,
        **_tokens(trajectory.token_ids, trajectory.logprobs, trajectory.versions),
        "finish_reason": finish_reason(trajectory.finish),
        "routed_experts": None,
    }


def _tokens(
    token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int | None]
) -> dict[str, Any]:
    content: list[dict[str, Any]] = [
        {
            "token": f"token_id:{token}",
            "logprob": number(logprob),
            "bytes": None,
            "top_logprobs": [],
        }
        for token, logprob in zip(token_ids, logprobs, strict=True)
    ]
    return {
        "token_ids": list(token_ids),
        "logprobs": {"content": content},
        "weight_versions": list(versions),
    }


class _TokenEvents:
    def __init__(self, answer_id: str, events: EventSender) -> None:
        self._answer_id = answer_id
        self._events = events

    async def on_chunk(self, number: int, chunk: Chunk) -> None:
        if chunk.token_ids:
            versions = [chunk.weights.version] * len(chunk.token_ids)
            tokens = _tokens(chunk.token_ids, chunk.logprobs, versions)
            await self._send({"index": number, **tokens, "finish_reason": None})

    async def on_end(self, number: int, trajectory: Trajectory) -> None:
        ended = {"finish_reason": finish_reason(trajectory.finish)}
        await self._send({"index": number, **_tokens((), (), ()), **ended})

    async def _send(self, choice: dict[str, Any]) -> None:
        await self._events.send({"request_id": self._answer_id, "choices": [choice]})

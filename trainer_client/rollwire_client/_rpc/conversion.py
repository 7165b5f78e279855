"""Between protobuf messages and the library's own data."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING, Any, TypeVar

from google.protobuf import duration_pb2
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2

from rollwire_client._data import (
    ActivePause,
    Finish,
    FinishReason,
    KvPolicy,
    LogprobBasis,
    Sampling,
    ServerInfo,
    ServerState,
    WeightTag,
)
from rollwire_client._routing_replay import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import Manifest, TensorSpec


E = TypeVar("E", bound=enum.Enum)


def _numbers(kind: type[E], wire: Any, prefix: str) -> Mapping[E, Any]:
    """The wire's number of each member that the wire has."""
    named = dict(wire.items())
    return {m: named[prefix + m.name] for m in kind if prefix + m.name in named}


LOGPROB_BASES = _numbers(LogprobBasis, rollout_pb2.LogprobBasis, "LOGPROB_BASIS_")
_BASE_OF = {number: basis for basis, number in LOGPROB_BASES.items()}
_FINISH_REASONS = _numbers(FinishReason, rollout_pb2.FinishReason, "FINISH_REASON_")
_REASON_OF = {number: reason for reason, number in _FINISH_REASONS.items()}
_STATE_OF = {
    number: state
    for state, number in _numbers(ServerState, common_pb2.ServerState, "SERVER_STATE_").items()
}
KV_POLICIES = _numbers(KvPolicy, common_pb2.KvPolicy, "KV_POLICY_")


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds, as the wire has them."""
    made = duration_pb2.Duration()
    made.FromNanoseconds(round(seconds * 1e9))
    return made


def weight_tag(message: common_pb2.WeightTag) -> WeightTag:
    """A server's stamp."""
    return WeightTag(
        version=message.version if message.HasField("version") else None,
        revision=message.revision,
        server_id=message.server_id,
        digest=message.digest,
    )


def weight_tag_message(tag: WeightTag) -> common_pb2.WeightTag:
    """The same as a message."""
    return common_pb2.WeightTag(
        version=tag.version, revision=tag.revision, server_id=tag.server_id, digest=tag.digest
    )


def sampling(message: rollout_pb2.SamplingParams) -> Sampling:
    """How to sample, of a message in which all is said that ``Sampling`` does not leave open."""
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        max_new_tokens=message.max_new_tokens if message.HasField("max_new_tokens") else None,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        seed=message.seed if message.HasField("seed") else None,
    )


def finish(message: rollout_pb2.Finish) -> Finish | None:
    """The end of a sequence; None if its reason is not one of the API's."""
    reason = _REASON_OF.get(message.reason)
    if reason is None:
        return None
    return Finish(
        reason=reason,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        message=message.message,
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
    )


def finish_message(finish: Finish) -> rollout_pb2.Finish:
    """The same as a message."""
    return rollout_pb2.Finish(
        reason=_FINISH_REASONS[finish.reason],
        stop_token_id=finish.stop_token_id,
        message=finish.message,
        prompt_tokens=finish.prompt_tokens,
        output_tokens=finish.output_tokens,
        cached_prompt_tokens=finish.cached_prompt_tokens,
    )


def rows(message: rollout_pb2.RoutedExperts, weights: WeightTag) -> Rows:
    """Rows of routing that ``weights`` computed.

    Raises:
        ValueError: The message contradicts itself; says how.
    """
    shape = message.num_layers, message.top_k, message.bytes_per_expert
    size = message.num_tokens * math.prod(shape)
    if message.bytes_per_expert not in (1, 2) or not size or len(message.experts) != size:
        raise ValueError(
            f"routing of {message.num_tokens} tokens, {message.num_layers} layers, top "
            f"{message.top_k}, {message.bytes_per_expert} bytes an expert came in "
            f"{len(message.experts)} bytes"
        )
    return Rows(
        message.start_position, message.num_tokens, shape, message.experts, weights,
        message.oldest_kv_revision,
    )  # fmt: skip


def server_info(message: rollout_pb2.GetServerInfoResponse, address: str) -> ServerInfo:
    """What the server at ``address`` says of itself."""
    return ServerInfo(
        address=address,
        server_id=message.server_id,
        state=_STATE_OF.get(message.state, ServerState.UNKNOWN),
        weights=weight_tag(message.weights),
        highest_version=message.highest_version if message.HasField("highest_version") else None,
        engine=message.engine,
        model=message.model,
        software_version=message.software_version,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        logprob_bases=frozenset(
            _BASE_OF[number] for number in message.logprob_bases if number in _BASE_OF
        ),
        deterministic=message.deterministic,
        accepts_updates=message.accepts_updates,
        transports=tuple(message.transports),
        max_running_sequences=message.max_running_sequences,
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        held_sequences=message.held_sequences,
        kv_tokens_used=message.kv_tokens_used,
        kv_tokens_total=message.kv_tokens_total,
        sampled_tokens=message.sampled_tokens,
        pauses=tuple(_active_pause(pause) for pause in message.pauses),
    )


def _active_pause(message: rollout_pb2.ActivePause) -> ActivePause:
    left = message.lease_left.ToTimedelta().total_seconds()
    return ActivePause(message.pause_id, left if message.HasField("lease_left") else None)


def manifest(layout: Manifest) -> weights_pb2.Manifest:
    """The layout of a full update."""
    return weights_pb2.Manifest(
        tensors=[
            weights_pb2.TensorSpec(
                name=spec.name, dtype=spec.dtype, shape=spec.shape, alias_of=spec.alias_of or ""
            )
            for spec in layout.tensors
        ],
        buckets=[
            weights_pb2.Bucket(
                size=bucket.size,
                spans=[
                    weights_pb2.Span(
                        tensor=span.tensor,
                        tensor_offset=span.tensor_offset,
                        bucket_offset=span.bucket_offset,
                        length=span.length,
                    )
                    for span in bucket.spans
                ],
                sender=bucket.sender,
            )
            for bucket in layout.buckets
        ],
        encoding=weights_pb2.ENCODING_FULL,
        partial=layout.partial,
    )


def schema(message: weights_pb2.GetWeightSchemaResponse) -> tuple[TensorSpec, ...]:
    """The tensors that a server wants, in its order."""
    from rollwire_transport import TensorSpec

    return tuple(
        TensorSpec(spec.name, spec.dtype, tuple(spec.shape), spec.alias_of or None)
        for spec in message.tensors
    )

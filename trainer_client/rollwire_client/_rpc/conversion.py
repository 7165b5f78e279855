"""Between protobuf messages and the library's own data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rollwire.conversion import (
    LOGPROB_BASIS_FROM_PROTO,
    SERVER_STATE_FROM_PROTO,
    weight_tag_from_proto,
)
from rollwire.types import ServerState, WeightTag
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_client._data import ActivePause, Sampling, ServerInfo
from rollwire_client._routing_replay import Rows

if TYPE_CHECKING:
    from rollwire_transport import Manifest, TensorSpec


def sampling_from_proto(message: rollout_pb2.SamplingParams) -> Sampling:
    """Of a message that has every field for which ``Sampling`` has no None."""
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


def rows_from_proto(message: rollout_pb2.RoutedExperts, weights: WeightTag) -> Rows:
    """Rows of routing that ``weights`` computed; raises ValueError if the message contradicts
    itself.
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


def server_info_from_proto(message: rollout_pb2.GetServerInfoResponse, address: str) -> ServerInfo:
    return ServerInfo(
        address=address,
        server_id=message.server_id,
        state=SERVER_STATE_FROM_PROTO.get(message.state, ServerState.UNKNOWN),
        weights=weight_tag_from_proto(message.weights),
        highest_version=message.highest_version if message.HasField("highest_version") else None,
        engine=message.engine,
        model=message.model,
        software_version=message.software_version,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        eos_token_ids=tuple(message.eos_token_ids),
        logprob_bases=frozenset(
            LOGPROB_BASIS_FROM_PROTO[number]
            for number in message.logprob_bases
            if number in LOGPROB_BASIS_FROM_PROTO
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


def manifest_to_proto(layout: Manifest) -> weights_pb2.Manifest:
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
        encoding=weights_pb2.Encoding.Value(f"ENCODING_{layout.encoding.name}"),
        partial=layout.partial,
        base_digest=layout.base_digest,
    )


def schema_from_proto(message: weights_pb2.GetWeightSchemaResponse) -> tuple[TensorSpec, ...]:
    from rollwire_transport import TensorSpec

    return tuple(
        TensorSpec(spec.name, spec.dtype, tuple(spec.shape), spec.alias_of or None)
        for spec in message.tensors
    )

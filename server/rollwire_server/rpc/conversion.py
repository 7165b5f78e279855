"""Converts outputs of sequences and the weight schema to messages, and manifests from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rollwire_transport as transport
from rollwire.conversion import duration_to_proto, finish_to_proto, weight_tag_to_proto
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_server.engines.base import PromptLogprobs, RoutedExperts
from rollwire_server.errors import ServiceError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollwire.types import WeightTag

    from rollwire_server.sequences.sequence import Extra, SequenceOutput, TopTokens

ENCODINGS = {
    weights_pb2.ENCODING_UNSPECIFIED: transport.Encoding.FULL,
    weights_pb2.ENCODING_FULL: transport.Encoding.FULL,
    weights_pb2.ENCODING_DELTA: transport.Encoding.DELTA,
}
MAX_TENSORS = 200_000
MAX_BUCKETS = 200_000


def error_to_proto(error: ServiceError) -> rollout_pb2.SequenceError:
    retry_after = error.reason.retry_after
    return rollout_pb2.SequenceError(
        code=error.reason.code.value[0],
        reason=error.reason.name,
        message=error.message,
        metadata=error.metadata,
        retry_delay=None if retry_after is None else duration_to_proto(retry_after),
        field=error.field or "",
    )


def top_logprobs_to_proto(tops: list[TopTokens]) -> rollout_pb2.TopLogprobs | None:
    if not tops:
        return None
    message = rollout_pb2.TopLogprobs(k=len(tops[0][0]))
    for token_ids, logprobs in tops:
        message.token_ids.extend(token_ids)
        message.logprobs.extend(logprobs)
    return message


def prompt_logprobs_to_proto(extras: Iterable[Extra]) -> list[rollout_pb2.PromptLogprobs]:
    return [
        rollout_pb2.PromptLogprobs(
            start_position=part.start_position,
            logprobs=part.logprobs,
            oldest_kv_revision=part.oldest_kv_revision,
        )
        for extra in extras
        if isinstance(part := extra.value, PromptLogprobs)
    ]


def routed_experts_to_proto(extras: Iterable[Extra]) -> list[rollout_pb2.RoutedExperts]:
    return [
        rollout_pb2.RoutedExperts(
            start_position=rows.start_position,
            num_tokens=rows.num_tokens,
            num_layers=rows.num_layers,
            top_k=rows.top_k,
            experts=rows.experts,
            bytes_per_expert=rows.bytes_per_expert,
            weights=weight_tag_to_proto(extra.weights),
            oldest_kv_revision=rows.oldest_kv_revision,
        )
        for extra in extras
        if isinstance(rows := extra.value, RoutedExperts)
    ]


def generate_response(
    output: SequenceOutput, request_id: str, attempt: int, weights: WeightTag
) -> rollout_pb2.GenerateResponse:
    """A message of Generate; it has ``weights`` where the output has none of its own."""
    weights = output.weights or weights
    prompt = prompt_logprobs_to_proto(output.extras)
    if output.segment is not None:
        oldest = output.segment.oldest_kv_revision
    else:
        oldest = min((part.oldest_kv_revision for part in prompt), default=weights.revision)
    message = rollout_pb2.GenerateResponse(
        request_id=request_id,
        attempt=attempt,
        offset=output.offset,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        weights=weight_tag_to_proto(weights),
        oldest_kv_revision=oldest,
        top_logprobs=top_logprobs_to_proto(output.tops),
        prompt_logprobs=prompt,
        routed_experts=routed_experts_to_proto(output.extras),
    )
    if output.end is not None and not isinstance(output.end, ServiceError):
        message.finish.CopyFrom(finish_to_proto(output.end))
    return message


def schema_to_proto(specs: Iterable[transport.TensorSpec]) -> weights_pb2.GetWeightSchemaResponse:
    return weights_pb2.GetWeightSchemaResponse(
        tensors=[
            weights_pb2.TensorSpec(
                name=spec.name, dtype=spec.dtype, shape=spec.shape, alias_of=spec.alias_of or ""
            )
            for spec in specs
        ]
    )


def check_manifest_size(message: weights_pb2.Manifest) -> None:
    """Raises ServiceError for a manifest of too many parts, before each of them becomes a Python
    object, which takes a hundred times the memory.
    """
    spans = 0
    if len(message.buckets) <= MAX_BUCKETS:
        spans = sum(len(bucket.spans) for bucket in message.buckets)
    for what, count, limit in (
        ("tensors", len(message.tensors), MAX_TENSORS),
        ("buckets", len(message.buckets), MAX_BUCKETS),
        ("spans", spans, MAX_TENSORS + MAX_BUCKETS),  # a bucket's end cuts one tensor
    ):
        if count > limit:
            raise ServiceError(
                Reason.MANIFEST_MISMATCH,
                f"the manifest has {count} {what}, more than {limit}: use larger buckets, or send "
                "tensors that belong together as one",
                field="manifest",
            )


def manifest_from_proto(message: weights_pb2.Manifest) -> transport.Manifest:
    """The manifest of a message that passed ``check_manifest_size``; it is not validated yet.

    Raises:
        ServiceError: Its encoding is not known.
    """
    if message.encoding not in ENCODINGS:
        raise ServiceError(
            Reason.UNSUPPORTED_ENCODING,
            f"unknown encoding {message.encoding}",
            field="manifest.encoding",
        )
    return transport.Manifest(
        tensors=tuple(
            transport.TensorSpec(
                name=spec.name,
                dtype=spec.dtype,
                shape=tuple(spec.shape[: transport.MAX_DIMENSIONS + 1]),  # too many stay too many
                alias_of=spec.alias_of or None,
            )
            for spec in message.tensors
        ),
        buckets=tuple(
            transport.Bucket(
                size=bucket.size,
                spans=tuple(
                    transport.Span(
                        tensor=span.tensor,
                        tensor_offset=span.tensor_offset,
                        bucket_offset=span.bucket_offset,
                        length=span.length,
                    )
                    for span in bucket.spans
                ),
                sender=bucket.sender,
            )
            for bucket in message.buckets
        ),
        encoding=ENCODINGS[message.encoding],
        partial=message.partial,
        base_digest=message.base_digest if message.HasField("base_digest") else None,
    )

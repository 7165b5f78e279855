"""Reads requests and manifests. What the engine or the server could fail at is refused by name."""

from __future__ import annotations

import math
import secrets
import struct
import uuid
from typing import TYPE_CHECKING

import rollwire_transport as transport
from google.protobuf.unknown_fields import UnknownFieldSet
from rollwire.conversion import LOGPROB_BASIS_FROM_PROTO
from rollwire.reasons import Reason
from rollwire.types import LogprobBasis
from rollwire.v1 import weights_pb2

from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError, bad_request, float_text
from rollwire_server.sequences.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.duration_pb2 import Duration
    from rollwire.v1 import rollout_pb2

    from rollwire_server.engines.base import EngineInfo

# Those that mean nothing when a request sets them: an engine need not support them.
SAMPLING_DEFAULTS = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
MAX_DURATION_SECONDS = 315_576_000_000  # of google.protobuf.Duration
MAX_ID_CHARACTERS = 256  # ids are repeated in answers
MAX_STOP_TOKENS = 1024
TOKEN_BYTES = 5  # the most that an id takes
OTHER_BYTES = 1 << 16  # names, stop tokens, sampling
MIN_TEMPERATURE = 1e-6  # below, logits / temperature may not be finite
MIN_TEMPERATURE_FLOAT32 = struct.unpack("f", struct.pack("f", MIN_TEMPERATURE))[0]  # a little less


def read_request(message: rollout_pb2.GenerateRequest, info: EngineInfo, key: int) -> Request:
    """The validated request with every default filled in; ``key`` is the engine's."""
    for field in ("request_id", "session_id"):
        check_id(field, getattr(message, field))
    prompt = _check_lengths(message, info)
    _check_tokens("prompt_token_ids", message.prompt_token_ids, info)
    _check_tokens("output_token_ids", message.output_token_ids, info)
    sampling = _read_sampling(message.sampling, info, info.context_length - prompt)
    if len(message.output_token_ids) > sampling.max_new_tokens:
        raise ServiceError(
            Reason.CONTEXT_EXCEEDED,
            f"{len(message.output_token_ids)} output tokens are given, more than the "
            f"{sampling.max_new_tokens} that max_new_tokens and the context allow",
            field="output_token_ids",
        )
    _check_extras(message, info, sampling)
    minimum = message.min_weight_version if message.HasField("min_weight_version") else None
    maximum = message.max_weight_version if message.HasField("max_weight_version") else None
    if minimum is not None and maximum is not None and minimum > maximum:
        raise bad_request(
            "min_weight_version",
            f"min_weight_version {minimum} is above max_weight_version {maximum}",
        )
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        attempt=message.attempt,
        spec=SequenceSpec(
            key=key,
            prompt=tuple(message.prompt_token_ids),
            prefix=tuple(message.output_token_ids),
            sampling=sampling,
            logprob_basis=LOGPROB_BASIS_FROM_PROTO[message.logprob_basis],
            top_logprobs=message.top_logprobs,
            prompt_logprobs=message.prompt_logprobs,
            routed_experts=message.routed_experts,
        ),
        seed=sampling.seed if message.sampling.HasField("seed") else None,
        min_weight_version=minimum,
        max_weight_version=maximum,
        detach_grace=read_duration(message, "detach_grace") or 0.0,
        delivery_interval=read_duration(message, "delivery_interval") or 0.0,
        timeout=read_duration(message, "timeout"),
    )


def read_duration(message: object, field: str) -> float | None:
    """Seconds of a Duration field; None where it is absent."""
    if not message.HasField(field):  # type: ignore[attr-defined]
        return None
    duration: Duration = getattr(message, field)
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise bad_request(field, f"{field} is negative: {seconds:g} s")
    if seconds > MAX_DURATION_SECONDS:
        raise bad_request(field, f"{field} is {seconds:g} s, more than 10,000 years")
    return seconds


def check_id(field: str, value: str) -> None:
    if len(value) > MAX_ID_CHARACTERS:
        raise bad_request(
            field, f"{field} has {len(value)} characters, more than {MAX_ID_CHARACTERS}"
        )


def _check_lengths(message: rollout_pb2.GenerateRequest, info: EngineInfo) -> int:
    """Returns the prompt's length. Comes before all that looks at each token."""
    prompt, given = len(message.prompt_token_ids), len(message.output_token_ids)
    if not prompt:
        raise ServiceError(
            Reason.EMPTY_PROMPT, "a prompt needs at least one token", field="prompt_token_ids"
        )
    if prompt >= info.context_length:
        raise ServiceError(
            Reason.CONTEXT_EXCEEDED,
            f"a prompt of {prompt} tokens leaves no room in a context of {info.context_length}",
            field="prompt_token_ids",
        )
    if prompt + given > info.context_length:
        raise ServiceError(
            Reason.CONTEXT_EXCEEDED,
            f"{given} output tokens are given after a prompt of {prompt}, more than a context of "
            f"{info.context_length} holds",
            field="output_token_ids",
        )
    if len(message.sampling.stop_token_ids) > MAX_STOP_TOKENS:
        raise _bad_sampling("stop_token_ids", f"are more than {MAX_STOP_TOKENS}")
    limit = TOKEN_BYTES * info.context_length + OTHER_BYTES
    if (size := message.ByteSize()) > limit:  # of fields that this server does not know
        raise ServiceError(
            Reason.BAD_REQUEST,
            f"the request has {size} bytes, more than a valid one can have ({limit})",
        )
    return prompt


def _check_tokens(field: str, token_ids: Iterable[int], info: EngineInfo) -> None:
    highest = max(token_ids, default=0)
    if highest >= info.vocab_size:
        raise ServiceError(
            Reason.TOKEN_OUT_OF_RANGE,
            f"token id {highest} in {field} is beyond the vocabulary of {info.vocab_size}",
            field=field,
        )


def _check_extras(
    message: rollout_pb2.GenerateRequest, info: EngineInfo, sampling: SamplingParams
) -> None:
    basis = LOGPROB_BASIS_FROM_PROTO.get(message.logprob_basis)
    if basis not in info.logprob_bases:
        offered = ", ".join(sorted(basis.name for basis in info.logprob_bases))
        raise ServiceError(
            Reason.UNSUPPORTED_LOGPROB_BASIS,
            f"this server reports log-probabilities of the basis {offered} only",
            field="logprob_basis",
        )
    if message.top_logprobs > info.max_top_logprobs:
        raise ServiceError(
            Reason.BAD_SAMPLING,
            f"top_logprobs is {message.top_logprobs}, the limit is {info.max_top_logprobs}",
            field="top_logprobs",
        )
    scaled = basis is LogprobBasis.TEMPERATURE and sampling.temperature not in (0.0, 1.0)
    if message.prompt_logprobs and scaled and not info.scaled_prompt_logprobs:
        raise ServiceError(
            Reason.BAD_SAMPLING,
            f"the {info.engine} engine reports prompt_logprobs at temperature 0 or 1 only, not at "
            f"{float_text(sampling.temperature)}: ask for them in a separate request",
            field="prompt_logprobs",
        )
    if message.routed_experts and not info.routed_experts:
        raise ServiceError(
            Reason.UNSUPPORTED_ROUTING,
            f"{info.model} has no experts, or the engine was started without reporting them "
            "(SGLang: --engine-arg enable-return-routed-experts=true, on GPUs)",
            field="routed_experts",
        )


def _read_sampling(
    message: rollout_pb2.SamplingParams, info: EngineInfo, room: int
) -> SamplingParams:
    _check_supported(message, info)
    _check_tokens("sampling.stop_token_ids", message.stop_token_ids, info)
    temperature = message.temperature if message.HasField("temperature") else 1.0
    if temperature != 0:
        if not (math.isfinite(temperature) and temperature >= MIN_TEMPERATURE_FLOAT32):
            problem = f"is {float_text(temperature)}, neither 0 nor at least {MIN_TEMPERATURE:g}"
            raise _bad_sampling("temperature", problem)
        temperature = max(temperature, MIN_TEMPERATURE)
    top_p = message.top_p if message.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise _bad_sampling("top_p", f"is {float_text(top_p)}, not above 0 and at most 1")
    if not 0 <= message.min_p <= 1:
        raise _bad_sampling("min_p", f"is {float_text(message.min_p)}, not from 0 to 1")
    limit = min(message.max_new_tokens, room) if message.HasField("max_new_tokens") else room
    if limit == 0:
        raise _bad_sampling("max_new_tokens", "is 0: nothing would be sampled")
    if message.min_new_tokens > limit:
        raise _bad_sampling("min_new_tokens", f"is {message.min_new_tokens}, the limit is {limit}")
    stop = frozenset(message.stop_token_ids)
    if message.min_new_tokens and len(stop.union(info.eos_token_ids)) >= info.vocab_size:
        raise _bad_sampling("min_new_tokens", "leaves nothing to sample: every token is a stop")
    return SamplingParams(
        max_new_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        top_k=message.top_k if message.top_k < info.vocab_size else 0,  # engines may use int32
        min_p=message.min_p,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=stop if message.ignore_eos else stop.union(info.eos_token_ids),
        seed=message.seed if message.HasField("seed") else secrets.randbits(64),
    )


def _check_supported(message: rollout_pb2.SamplingParams, info: EngineInfo) -> None:
    """Refuses what the engine would ignore, fields of a later API among them."""
    for field, value in message.ListFields():
        name = field.name
        if name not in info.sampling_parameters and value != SAMPLING_DEFAULTS.get(name):
            raise _bad_sampling(name, f"is not supported by the {info.engine} engine: leave it out")
    if unknown := UnknownFieldSet(message):
        raise ServiceError(
            Reason.BAD_SAMPLING,
            f"sampling has a field {unknown[0].field_number} that this server does not know: leave "
            "it out, or use a server of a later release",
            field="sampling",
        )


def _bad_sampling(field: str, problem: str) -> ServiceError:
    return ServiceError(Reason.BAD_SAMPLING, f"{field} {problem}", field=f"sampling.{field}")


# Manifests of updates.

ENCODINGS = {
    weights_pb2.ENCODING_UNSPECIFIED: transport.Encoding.FULL,
    weights_pb2.ENCODING_FULL: transport.Encoding.FULL,
    weights_pb2.ENCODING_DELTA: transport.Encoding.DELTA,
}
MAX_TENSORS = 200_000
MAX_BUCKETS = 200_000


def check_manifest_size(message: weights_pb2.Manifest) -> None:
    """To be called before each part becomes a Python object, which takes a hundred times the
    memory.
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
    """The manifest of a message that passed ``check_manifest_size``; it is not validated yet."""
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

"""Between the library's own data and protobuf messages.

An unknown option is a TypeError, as with any Python function; a value that its field cannot carry
is an InvalidRequestError that names the field as the API does. Both are raised before anything is
sent. The server decides whether a value makes sense (a token id of the vocabulary, a ``top_p`` of
at most 1), with the same error.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import uuid
from typing import TYPE_CHECKING, Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from rollwire.conversion import (
    LOGPROB_BASIS_FROM_PROTO,
    LOGPROB_BASIS_TO_PROTO,
    SERVER_STATE_FROM_PROTO,
    SLEEPING_WEIGHTS_FROM_PROTO,
    SLEEPING_WEIGHTS_TO_PROTO,
    committed_update_from_proto,
    duration_to_proto,
    weight_tag_from_proto,
)
from rollwire.types import LogprobBasis, ServerState, SleepingWeights, WeightTag
from rollwire.v1 import rollout_pb2, weights_pb2

from rollwire_client import _arguments as arguments
from rollwire_client._data import ActivePause, Sampling, ServerInfo
from rollwire_client._detokenizer import Detokenizer, TextBuilder
from rollwire_client._errors import InvalidRequestError
from rollwire_client._routing_replay import RoutingReplay, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message
    from rollwire_transport import Manifest, TensorSpec

    from rollwire_client._trajectory import TrajectoryBuilder


class RolloutOptions(TypedDict, total=False):
    """The options of a rollout, besides prompt and sampling.

    Attributes:
        request_id: Globally unique id of the sequence. Default: a random one.
        logprob_basis: The distribution of the log-probabilities. Default:
            ``LogprobBasis.TEMPERATURE``.
        min_weight_version: Do not sample under older weights: the sequence waits for newer ones. In
            a fleet this counts as waiting for a server (``Retries.seconds``).
        max_weight_version: Do not sample under newer weights: their commit ends the sequence. A
            fleet continues it on a server with older weights, as long as there is one.
        session_id: Id that sequences with the same prefix share. A fleet sends them to the server
            that has the prefix, unless it is clearly busier than the others. Default: none.
        routed_experts: Report the experts that a mixture of experts chose for each token. The value
            says which choice is kept if a token was computed more than once. Default: None, no
            experts.
        timeout: Seconds from start to last token, then ``TimedOutError``. Default: no limit.
        delivery_interval: Seconds for which a server may collect tokens before it sends them; the
            end of a sequence is sent at once. Each message costs client and server time. Tokens
            that a dying server has not sent are sampled again elsewhere. Default: 0 (every step is
            sent) for streams, 0.25 for sequences that are generated as a whole, 0.05 if a stop
            string may end them.
        detokenizer: Makes text of the output, and ends the sequence at a stop string. Default:
            none.
    """

    request_id: str
    logprob_basis: LogprobBasis
    min_weight_version: int | None
    max_weight_version: int | None
    session_id: str
    routed_experts: RoutingReplay | None
    timeout: float | None
    delivery_interval: float | None
    detokenizer: Detokenizer | None


DEFAULT_SAMPLING = Sampling()
# Seconds between deliveries of sequences that nobody streams, and of those that are aborted as soon
# as a stop string has come.
_WHOLE_INTERVAL, _TEXT_INTERVAL = 0.25, 0.05

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))
_OPTIONS = RolloutOptions.__optional_keys__
_EXPECTED = {
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 2^32 - 1",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 2^64 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
}


def generate_request(
    prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
) -> rollout_pb2.GenerateRequest:
    _check_names(options)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {reprlib.repr(sampling)}, not a Sampling(…)")
    request = rollout_pb2.GenerateRequest(sampling=sampling_to_proto(sampling))
    set_field(request, "request_id", options.get("request_id") or uuid.uuid4().hex)
    set_repeated(request, "prompt_token_ids", prompt_ids)
    basis = options.get("logprob_basis", LogprobBasis.TEMPERATURE)
    if not isinstance(basis, LogprobBasis):
        raise _invalid("logprob_basis", basis, "a LogprobBasis")
    request.logprob_basis = LOGPROB_BASIS_TO_PROTO[basis]
    replay = options.get("routed_experts")
    if not isinstance(replay, RoutingReplay | None):
        raise _invalid("routed_experts", replay, "a RoutingReplay")
    request.routed_experts = replay is not None
    set_version(request, "min_weight_version", options.get("min_weight_version"))
    set_version(request, "max_weight_version", options.get("max_weight_version"))
    set_field(request, "session_id", options.get("session_id"))
    set_duration(request, "timeout", options.get("timeout"))
    set_duration(request, "delivery_interval", options.get("delivery_interval"))
    return request


def begin_output(
    output: TrajectoryBuilder, request: rollout_pb2.GenerateRequest, options: RolloutOptions
) -> TrajectoryBuilder:
    """``output``, which begins or goes on under a request of these options."""
    detokenizer = options.get("detokenizer")
    if not isinstance(detokenizer, Detokenizer | None):
        raise _invalid("detokenizer", detokenizer, "a Detokenizer")
    text = None
    if detokenizer is not None:
        text = TextBuilder(detokenizer, request.sampling.min_new_tokens)
    output.begin(request.request_id, options.get("routed_experts"), text)
    return output


def deliver_rarely(request: rollout_pb2.GenerateRequest, output: TrajectoryBuilder) -> None:
    """For a reader who wants the whole sequence, unless the caller chose an interval."""
    if not request.HasField("delivery_interval"):
        interval = _WHOLE_INTERVAL if output.text is None else _TEXT_INTERVAL
        set_duration(request, "delivery_interval", interval)


def pause_request(pause_id: str, lease: float | None) -> rollout_pb2.PauseRequest:
    request = rollout_pb2.PauseRequest()
    set_field(request, "pause_id", pause_id)
    set_duration(request, "lease", lease)
    return request


def resume_request(pause_id: str) -> rollout_pb2.ResumeRequest:
    request = rollout_pb2.ResumeRequest()
    set_field(request, "pause_id", pause_id)
    return request


def sleep_request(weights: SleepingWeights) -> rollout_pb2.SleepRequest:
    if not isinstance(weights, SleepingWeights):
        raise TypeError(f"weights is {weights!r}: use for example SleepingWeights.DISCARD")
    return rollout_pb2.SleepRequest(weights=SLEEPING_WEIGHTS_TO_PROTO[weights])


def wake_up_request(*, reload_checkpoint: bool) -> rollout_pb2.WakeUpRequest:
    request = rollout_pb2.WakeUpRequest()
    set_field(request, "reload_checkpoint", reload_checkpoint)
    return request


def sampling_to_proto(sampling: Sampling) -> rollout_pb2.SamplingParams:
    made = rollout_pb2.SamplingParams()
    for field in _SAMPLING_FIELDS:
        fill = set_repeated if field == "stop_token_ids" else set_field
        value = getattr(sampling, field)
        if field == "top_k" and value == -1:  # as vLLM and SGLang say it
            value = 0
        fill(made, field, value, prefix="sampling.")
    return made


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


def checked_token_ids(values: Sequence[int]) -> tuple[int, ...]:
    checked = rollout_pb2.GenerateRequest()
    set_repeated(checked, "prompt_token_ids", values)
    return tuple(checked.prompt_token_ids)


def set_field(message: Message, field: str, value: Any, *, prefix: str = "") -> None:
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _invalid(prefix + field, value, _expected(message, field)) from error


def set_repeated(message: Message, field: str, values: Any, *, prefix: str = "") -> None:
    """Fills a field from any iterable of integers, such as a list, array or tensor."""
    name, container = prefix + field, getattr(message, field)
    items = _items(values)
    if items is None:
        raise _invalid(name, values, "a sequence of integers")
    try:
        container.extend(items)
    except (TypeError, ValueError, OverflowError):
        for number, item in enumerate(items):
            try:
                container.append(item)
            except (TypeError, ValueError, OverflowError) as error:
                expected = _expected(message, field)
                raise _invalid(f"{name}[{number}]", item, expected, field=name) from error


def set_version(message: Message, field: str, value: int | None) -> None:
    try:
        checked = arguments.checked_version(field, value)
    except (TypeError, ValueError) as error:
        raise _invalid(field, value, arguments.VERSION) from error
    set_field(message, field, checked)


def set_duration(message: Message, field: str, seconds: float | None) -> None:
    if seconds is None:
        return
    try:
        fits = math.isfinite(seconds) and seconds >= 0
        made = duration_to_proto(seconds) if fits else None
    except (TypeError, ValueError, OverflowError):
        made = None
    if made is None:
        raise _invalid(field, seconds, "a number of seconds from 0 on")
    getattr(message, field).CopyFrom(made)


def _check_names(options: RolloutOptions) -> None:
    for name in options:
        if name in _SAMPLING_FIELDS:
            raise TypeError(f"{name} is a sampling parameter: use Sampling({name}=…)")
        if name == "n":
            raise TypeError(
                "generate and stream sample one sequence: for several of each prompt use "
                "Fleet.generate_many(prompts, sampling, n=…)"
            )
        if name not in _OPTIONS:
            raise TypeError(
                f"a rollout has no option {name}; its options are {', '.join(sorted(_OPTIONS))}, "
                "and sampling parameters are those of Sampling"
            )


def _items(values: Any) -> list[Any] | None:
    """The elements of a sequence, array or tensor; None if it is none."""
    if isinstance(values, str | bytes | bytearray):  # whose bytes are integers by chance
        return None
    if hasattr(values, "tolist"):  # else each element of a tensor is a tensor, and slow
        items = values.tolist()
        return items if isinstance(items, list) else None
    try:
        return list(values)
    except TypeError:
        return None


def _expected(message: Message, field: str) -> str:
    return _EXPECTED[message.DESCRIPTOR.fields_by_name[field].type]


def _invalid(
    name: str, value: object, expected: str, *, field: str | None = None
) -> InvalidRequestError:
    message = f"{name} is {reprlib.repr(value)}, not {expected}"
    return InvalidRequestError(message, violations={field or name: message})


def rows_from_proto(message: rollout_pb2.RoutedExperts, weights: WeightTag) -> Rows:
    """Rows that ``weights`` computed; raises ValueError if the message contradicts itself."""
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
        accepts_deltas=message.accepts_deltas,
        transports=tuple(message.transports),
        max_running_sequences=message.max_running_sequences,
        running_sequences=message.running_sequences,
        waiting_sequences=message.waiting_sequences,
        held_sequences=message.held_sequences,
        kv_tokens_used=message.kv_tokens_used,
        kv_tokens_total=message.kv_tokens_total,
        sampled_tokens=message.sampled_tokens,
        pauses=tuple(_active_pause(pause) for pause in message.pauses),
        last_update=(
            committed_update_from_proto(message.last_update)
            if message.HasField("last_update")
            else None
        ),
        sleeping_weights=(
            SLEEPING_WEIGHTS_FROM_PROTO.get(message.sleeping_weights)
            if message.sleeping_weights
            else None
        ),
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

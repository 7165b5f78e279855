"""From a call's arguments to the message that goes over the wire.

One rule: a name that the call does not have is a TypeError, as with any Python function; a value
that its field cannot carry is an InvalidRequestError that names the field as the API does. Both
are raised before anything is sent. Whether a value makes sense (a token id within the vocabulary,
a ``top_p`` of at most 1) is the server's to say, with the same error.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import uuid
from typing import TYPE_CHECKING, Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from rollwire.conversion import LOGPROB_BASIS_TO_PROTO, duration_to_proto
from rollwire.types import LogprobBasis
from rollwire.v1 import rollout_pb2

from rollwire_client import _arguments as arguments
from rollwire_client._data import Sampling
from rollwire_client._errors import InvalidRequestError
from rollwire_client._routing_replay import RoutingReplay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from google.protobuf.message import Message


class RolloutOptions(TypedDict, total=False):
    """What can be said of a rollout beside prompt and sampling; there are no other options.

    Attributes:
        request_id: Names the sequence, globally unique. Default: a random one.
        logprob_basis: Of the log-probabilities. Default: ``LogprobBasis.TEMPERATURE``.
        min_weight_version: Do not sample under older weights: the sequence waits for newer ones, in
            a fleet for as long as it waits for a server (``Retries.seconds``).
        max_weight_version: Do not sample under newer weights: their commit ends the sequence, which
            a fleet goes on with where older ones are served, until there are none.
        session_id: Names sequences that share a prefix: a fleet sends them to the server that has
            it, until that is clearly busier than the others. Default: none.
        routed_experts: Bring the experts that a mixture of experts chose for each token, and which
            choice stands where it was made more than once. Default: None, not at all.
        timeout: Seconds from start to last token, then ``TimedOutError``. Default: no limit.
        delivery_interval: Seconds for which a server may collect tokens before it sends them, the
            end of the sequence excepted. Each message costs client and server time; tokens that a
            dying server has not sent are sampled again elsewhere. Default: 0 where chunks are
            streamed (every step is sent), 0.25 where sequences are taken whole.
    """

    request_id: str
    logprob_basis: LogprobBasis
    min_weight_version: int | None
    max_weight_version: int | None
    session_id: str
    routed_experts: RoutingReplay | None
    timeout: float | None
    delivery_interval: float | None


DEFAULT_SAMPLING = Sampling()
WHOLE_INTERVAL = 0.25  # seconds between deliveries to who takes sequences whole

_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Sampling))
_OPTIONS = RolloutOptions.__optional_keys__
_FITS = {
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 2^32 - 1",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 2^64 - 1",
    FieldDescriptor.TYPE_FLOAT: "a number",
    FieldDescriptor.TYPE_BOOL: "True or False",
    FieldDescriptor.TYPE_STRING: "text",
}


def generate_request(
    prompt_ids: Sequence[int], sampling: Sampling, options: RolloutOptions
) -> rollout_pb2.GenerateRequest:
    """The first attempt at a sequence, as it goes over the wire.

    Raises:
        TypeError: An option that there is not, or ``sampling`` is no ``Sampling``.
        InvalidRequestError: A value does not fit its field, such as a negative token id.
    """
    _check_names(options)
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling is {reprlib.repr(sampling)}, not a Sampling(…)")
    made = rollout_pb2.GenerateRequest(sampling=sampling_message(sampling))
    put(made, "request_id", options.get("request_id") or uuid.uuid4().hex)
    put_all(made, "prompt_token_ids", prompt_ids)
    basis = options.get("logprob_basis", LogprobBasis.TEMPERATURE)
    if not isinstance(basis, LogprobBasis):
        raise _misfit("logprob_basis", basis, "a LogprobBasis")
    made.logprob_basis = LOGPROB_BASIS_TO_PROTO[basis]
    replay = options.get("routed_experts")
    if not isinstance(replay, RoutingReplay | None):
        raise _misfit("routed_experts", replay, "a RoutingReplay")
    made.routed_experts = replay is not None
    put_version(made, "min_weight_version", options.get("min_weight_version"))
    put_version(made, "max_weight_version", options.get("max_weight_version"))
    put(made, "session_id", options.get("session_id"))
    put_seconds(made, "timeout", options.get("timeout"))
    put_seconds(made, "delivery_interval", options.get("delivery_interval"))
    return made


def deliver_rarely(request: rollout_pb2.GenerateRequest) -> None:
    """Whoever reads it wants the whole sequence: unless it says how often to deliver, rarely."""
    if not request.HasField("delivery_interval"):
        put_seconds(request, "delivery_interval", WHOLE_INTERVAL)


def sampling_message(sampling: Sampling) -> rollout_pb2.SamplingParams:
    """How to sample, as it goes over the wire.

    Raises:
        InvalidRequestError: A value does not fit its field.
    """
    made = rollout_pb2.SamplingParams()
    for field in _SAMPLING_FIELDS:
        fill = put_all if field == "stop_token_ids" else put
        fill(made, field, getattr(sampling, field), within="sampling.")
    return made


def checked_token_ids(values: Sequence[int]) -> tuple[int, ...]:
    """The token ids of a prompt as plain integers.

    Raises:
        InvalidRequestError: They are none.
    """
    checked = rollout_pb2.GenerateRequest()
    put_all(checked, "prompt_token_ids", values)
    return tuple(checked.prompt_token_ids)


def put(message: Message, field: str, value: Any, *, within: str = "") -> None:
    """Sets a field; None leaves it out.

    Args:
        message: Gets the value.
        field: Its name.
        value: For it.
        within: What comes before the name in an error.

    Raises:
        InvalidRequestError: The value does not fit.
    """
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _misfit(within + field, value, _fitting(message, field)) from error


def put_all(message: Message, field: str, values: Any, *, within: str = "") -> None:
    """Fills a repeated field from any iterable of integers, such as a list, an array or a tensor.

    Args:
        message: Gets the values.
        field: Its name.
        values: For it.
        within: What comes before the name in an error.

    Raises:
        InvalidRequestError: One of the values does not fit, or they are no sequence.
    """
    name, container = within + field, getattr(message, field)
    items = _items(values)
    if items is None:
        raise _misfit(name, values, "a sequence of integers")
    try:
        container.extend(items)
    except (TypeError, ValueError, OverflowError):
        for number, item in enumerate(items):
            try:
                container.append(item)
            except (TypeError, ValueError, OverflowError) as error:
                fitting = _fitting(message, field)
                raise _misfit(f"{name}[{number}]", item, fitting, field=name) from error


def put_version(message: Message, field: str, value: int | None) -> None:
    """Sets a version of weights; None leaves it out.

    Raises:
        InvalidRequestError: It is none.
    """
    try:
        checked = arguments.checked_version(field, value)
    except (TypeError, ValueError) as error:
        raise _misfit(field, value, arguments.VERSION) from error
    put(message, field, checked)


def put_seconds(message: Message, field: str, seconds: float | None) -> None:
    """Sets a duration; None leaves it out.

    Raises:
        InvalidRequestError: It is none, negative, or not finite.
    """
    if seconds is None:
        return
    try:
        fits = math.isfinite(seconds) and seconds >= 0
        made = duration_to_proto(seconds) if fits else None
    except (TypeError, ValueError, OverflowError):
        made = None
    if made is None:
        raise _misfit(field, seconds, "a number of seconds from 0 on")
    getattr(message, field).CopyFrom(made)


def _check_names(options: RolloutOptions) -> None:
    for name in options:
        if name in _SAMPLING_FIELDS:
            raise TypeError(f"{name} is no option of its own: say Sampling({name}=…)")
        if name not in _OPTIONS:
            raise TypeError(
                f"a rollout has no option {name}; there are {', '.join(sorted(_OPTIONS))}, and "
                f"those of Sampling"
            )


def _items(values: Any) -> list[Any] | None:
    """The elements of a sequence, array or tensor; None if it is none of these."""
    if isinstance(values, str | bytes | bytearray):  # whose bytes are integers by chance
        return None
    if hasattr(values, "tolist"):  # else each element of a tensor is a tensor, and slow
        items = values.tolist()
        return items if isinstance(items, list) else None
    try:
        return list(values)
    except TypeError:
        return None


def _fitting(message: Message, field: str) -> str:
    return _FITS[message.DESCRIPTOR.fields_by_name[field].type]


def _misfit(
    name: str, value: object, fitting: str, *, field: str | None = None
) -> InvalidRequestError:
    message = f"{name} is {reprlib.repr(value)}, not {fitting}"
    return InvalidRequestError(message, violations={field or name: message})

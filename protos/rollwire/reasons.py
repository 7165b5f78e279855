"""The API's table of reasons, and how an error travels as a google.rpc.Status.

A status has ErrorInfo (the reason, in the domain ``rollwire``), BadRequest where a field of the
request is wrong, and RetryInfo where waiting helps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from rollwire.conversion import duration_to_proto

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.message import Message

DOMAIN = "rollwire"
DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata


class ErrorScope(enum.Enum):
    """Whom an error concerns."""

    SEQUENCE = "sequence"
    """This sequence, or its request: it would fail elsewhere too, and others go on."""
    SERVER = "server"
    """The server as it is now: another one, or the same one later, may do better."""
    CONFIGURATION = "configuration"
    """Every sequence alike: the caller, or whoever runs the servers, has to change something."""
    UPDATE = "update"
    """A weight update; no sequence ends with it."""


_SEQUENCE, _SERVER = ErrorScope.SEQUENCE, ErrorScope.SERVER
_CONFIGURATION, _UPDATE = ErrorScope.CONFIGURATION, ErrorScope.UPDATE


@enum.unique
class Reason(enum.Enum):
    """Why a call or a sequence failed.

    Attributes:
        code: The gRPC code.
        scope: Whom it concerns.
        meaning: In a few words.
        retry_after: Seconds after which trying again may help; None where waiting does not.
    """

    def __init__(
        self,
        code: StatusCode,
        scope: ErrorScope,
        meaning: str,
        retry_after: float | None = None,
    ) -> None:
        self.code = code
        self.scope = scope
        self.meaning = meaning
        self.retry_after = retry_after

    # Requests, checked before the engine sees them.
    EMPTY_PROMPT = StatusCode.INVALID_ARGUMENT, _SEQUENCE, "the prompt has no tokens"
    TOKEN_OUT_OF_RANGE = StatusCode.INVALID_ARGUMENT, _SEQUENCE, "a token id beyond the vocabulary"
    CONTEXT_EXCEEDED = StatusCode.INVALID_ARGUMENT, _SEQUENCE, "longer than the context"
    BAD_SAMPLING = (  # of the sequence: the limit may depend on the prompt's length
        StatusCode.INVALID_ARGUMENT,
        _SEQUENCE,
        "a sampling parameter out of its range, or not supported",
    )
    UNSUPPORTED_LOGPROB_BASIS = (
        StatusCode.INVALID_ARGUMENT,
        _CONFIGURATION,
        "not offered by this engine",
    )
    UNSUPPORTED_ROUTING = (
        StatusCode.INVALID_ARGUMENT,
        _CONFIGURATION,
        "the model has no experts to report",
    )
    BAD_REQUEST = (
        StatusCode.INVALID_ARGUMENT,
        _SEQUENCE,
        "a field that is missing or makes no sense",
    )

    INTERNAL = StatusCode.INTERNAL, _SERVER, "a bug of the server"
    ENGINE_FAILED = (
        StatusCode.INTERNAL,
        _SERVER,
        "the engine failed at it; what serves is untouched",
    )
    NO_MEMORY = StatusCode.RESOURCE_EXHAUSTED, _SERVER, "the engine finds no memory for it"

    # Who calls.
    UNAUTHENTICATED = (
        StatusCode.UNAUTHENTICATED,
        _CONFIGURATION,
        "no token, or one that is not known",
    )
    PERMISSION_DENIED = StatusCode.PERMISSION_DENIED, _CONFIGURATION, "a token for something else"

    # Sequences.
    STALE_ATTEMPT = StatusCode.ABORTED, _SEQUENCE, "a lower attempt than one already seen"
    PREFIX_MISMATCH = (
        StatusCode.FAILED_PRECONDITION,
        _SEQUENCE,
        "a prefix that the server did not sample",
    )
    REQUEST_MISMATCH = (
        StatusCode.FAILED_PRECONDITION,
        _SEQUENCE,
        "a pick-up that asks for something else than the request that it picks up",
    )
    WEIGHTS_TOO_OLD = (
        StatusCode.FAILED_PRECONDITION,
        _CONFIGURATION,
        "older than min_weight_version",
    )
    WEIGHTS_TOO_NEW = (
        StatusCode.FAILED_PRECONDITION,
        _CONFIGURATION,
        "newer than max_weight_version",
    )
    TIMED_OUT = (
        StatusCode.DEADLINE_EXCEEDED,
        _SEQUENCE,
        "the time that a request may take is over",
    )
    NOT_FINITE = StatusCode.INTERNAL, _SEQUENCE, "NaN or infinity in the sequence's logits"
    STEP_FAILED = (
        StatusCode.INTERNAL,
        _SEQUENCE,
        "the engine's step raised for this sequence alone",
    )

    # What the server is doing.
    QUEUE_FULL = StatusCode.RESOURCE_EXHAUSTED, _SERVER, "more waiting than the limit", 1.0
    TOO_MANY_STREAMS = (
        StatusCode.RESOURCE_EXHAUSTED,
        _SERVER,
        "more StreamRollouts calls of one client than the limit",
    )
    TOO_MANY_CALLS = (
        StatusCode.RESOURCE_EXHAUSTED,
        _SERVER,
        "more calls of a method by one client than the limit",
        1.0,
    )
    STARTING = StatusCode.UNAVAILABLE, _SERVER, "the engine is loading", 5.0
    DRAINING = StatusCode.UNAVAILABLE, _SERVER, "the server is going down", 1.0
    SLEEPING = StatusCode.UNAVAILABLE, _SERVER, "its memory is given back", 5.0
    AWAITING_WEIGHTS = StatusCode.UNAVAILABLE, _SERVER, "no update was committed yet", 5.0
    QUARANTINED = (
        StatusCode.UNAVAILABLE,
        _SERVER,
        "a commit failed half way; a full update cures it",
        5.0,
    )
    UNSUPPORTED_SLEEP = (
        StatusCode.FAILED_PRECONDITION,
        _CONFIGURATION,
        "not what can become of this engine's weights while it sleeps",
    )

    # Weight updates.
    FROZEN = StatusCode.FAILED_PRECONDITION, _UPDATE, "this server takes no updates"
    STALE_PUBLISHER = (
        StatusCode.FAILED_PRECONDITION,
        _UPDATE,
        "a publisher with a higher term was here",
    )
    UPDATE_IN_PROGRESS = StatusCode.FAILED_PRECONDITION, _UPDATE, "another update is under way"
    NOT_STAGED = StatusCode.FAILED_PRECONDITION, _UPDATE, "no such update, or not complete"
    VERSION_NOT_NEWER = StatusCode.FAILED_PRECONDITION, _UPDATE, "below what is committed"
    VERSION_CONFLICT = StatusCode.FAILED_PRECONDITION, _UPDATE, "this version with other content"
    BASE_MISMATCH = StatusCode.FAILED_PRECONDITION, _UPDATE, "the update is made for other weights"
    MANIFEST_MISMATCH = (
        StatusCode.INVALID_ARGUMENT,
        _UPDATE,
        "tensors that the model does not have",
    )
    DIGEST_MISMATCH = StatusCode.DATA_LOSS, _UPDATE, "received bytes are not what was sent"
    TRANSPORT_FAILED = StatusCode.ABORTED, _UPDATE, "the transport group broke"
    TRANSPORT_TIMEOUT = StatusCode.ABORTED, _UPDATE, "a member of the transport group is silent"
    STAGING_FAILED = (
        StatusCode.RESOURCE_EXHAUSTED,
        _UPDATE,
        "no memory for an update beside what serves",
    )
    COMMIT_FAILED = StatusCode.INTERNAL, _UPDATE, "nothing was changed"
    UNSUPPORTED_ENCODING = (
        StatusCode.UNIMPLEMENTED,
        _UPDATE,
        "this server takes full updates only",
    )


@dataclass(slots=True)
class ErrorDetails:
    """What an error says beside its code and message.

    Attributes:
        reason: The name of a ``Reason``, perhaps of a later release; "" if there is none.
        retry_after: Seconds after which trying again may help.
        violations: Fields of the request that are wrong, and how.
        metadata: Facts for programs.
    """

    reason: str = ""
    retry_after: float | None = None
    violations: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def encode_status(
    reason: Reason, message: str, *, field: str | None = None, metadata: Mapping[str, str]
) -> status_pb2.Status:
    """An error as it goes over the wire.

    Args:
        reason: Why.
        message: What happened, what state things are in, what to do.
        field: The request's field that is wrong.
        metadata: Facts for programs.
    """
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason=reason.name, domain=DOMAIN, metadata=metadata)
    ]
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=message, reason=reason.name
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if reason.retry_after is not None:
        delay = duration_to_proto(reason.retry_after)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    code: int = reason.code.value[0]
    return status_pb2.Status(code=code, message=message, details=map(_packed, details))


def decode_details(metadata: Iterable[tuple[str, str | bytes]]) -> ErrorDetails:
    """What the trailing metadata of a call says of the error that ended it."""
    found = ErrorDetails()
    for key, value in metadata:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:  # from a proxy on the way, not from a rollwire server
            continue
        for detail in status.details:
            _read_detail(detail, found)
    return found


def _packed(message: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _read_detail(packed: AnyMessage, found: ErrorDetails) -> None:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    if packed.Unpack(info) and info.domain == DOMAIN:
        found.reason, found.metadata = info.reason, dict(info.metadata)
    elif packed.Unpack(bad):
        found.violations = {v.field: v.description for v in bad.field_violations}
    elif packed.Unpack(retry):
        found.retry_after = retry.retry_delay.ToTimedelta().total_seconds()

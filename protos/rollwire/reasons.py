"""The API's table of reasons, and how an error travels as a google.rpc.Status.

A status has ErrorInfo (the reason, in the domain ``rollwire``), BadRequest where a field of the
request is wrong, and RetryInfo where waiting helps.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode as Code

from rollwire.conversion import duration_to_proto

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.message import Message

DOMAIN = "rollwire"
DETAILS_KEY = "grpc-status-details-bin"  # of the trailing metadata


class ErrorScope(enum.Enum):
    """What an error concerns."""

    SEQUENCE = "sequence"
    """One sequence or its request: it would fail on other servers too; other sequences continue."""
    SERVER = "server"
    """One server: the request may succeed on another server, or later on this one."""
    CONFIGURATION = "configuration"
    """Every sequence: the caller or the operator of the servers has to change something."""
    UPDATE = "update"
    """A weight update; no sequence ends because of it."""


_SEQUENCE, _SERVER = ErrorScope.SEQUENCE, ErrorScope.SERVER
_CONFIG, _UPDATE = ErrorScope.CONFIGURATION, ErrorScope.UPDATE


@enum.unique
class Reason(enum.Enum):
    """Why a call or a sequence failed.

    Attributes:
        code: The gRPC code.
        scope: What the error concerns.
        meaning: A few words that explain it.
        retry_after: Seconds after which a retry may help; None if waiting does not help.
    """

    def __init__(
        self, code: Code, scope: ErrorScope, meaning: str, retry_after: float | None = None
    ) -> None:
        self.code = code
        self.scope = scope
        self.meaning = meaning
        self.retry_after = retry_after

    # Requests, checked before the engine sees them.
    EMPTY_PROMPT = Code.INVALID_ARGUMENT, _SEQUENCE, "the prompt has no tokens"
    TOKEN_OUT_OF_RANGE = Code.INVALID_ARGUMENT, _SEQUENCE, "a token id beyond the vocabulary"
    CONTEXT_EXCEEDED = Code.INVALID_ARGUMENT, _SEQUENCE, "longer than the context"
    BAD_SAMPLING = (  # of the sequence: the limit may depend on the prompt's length
        Code.INVALID_ARGUMENT,
        _SEQUENCE,
        "a sampling parameter out of its range, or not supported",
    )
    UNSUPPORTED_LOGPROB_BASIS = Code.INVALID_ARGUMENT, _CONFIG, "not offered by this engine"
    UNSUPPORTED_ROUTING = Code.INVALID_ARGUMENT, _CONFIG, "the model has no experts to report"
    BAD_REQUEST = Code.INVALID_ARGUMENT, _SEQUENCE, "a field is missing or invalid"

    INTERNAL = Code.INTERNAL, _SERVER, "a bug of the server"
    ENGINE_FAILED = (
        Code.INTERNAL,
        _SERVER,
        "the engine failed at the call; the serving weights are unchanged",
    )
    NO_MEMORY = Code.RESOURCE_EXHAUSTED, _SERVER, "the engine has no memory for the call"

    # Authentication.
    UNAUTHENTICATED = Code.UNAUTHENTICATED, _CONFIG, "no token, or an unknown one"
    PERMISSION_DENIED = Code.PERMISSION_DENIED, _CONFIG, "the token does not permit this call"

    # Sequences.
    STALE_ATTEMPT = Code.ABORTED, _SEQUENCE, "the server has seen a higher attempt"
    PREFIX_MISMATCH = Code.FAILED_PRECONDITION, _SEQUENCE, "a prefix that the server did not sample"
    REQUEST_MISMATCH = (
        Code.FAILED_PRECONDITION,
        _SEQUENCE,
        "a pick-up that differs from the request that it picks up",
    )
    WEIGHTS_TOO_OLD = Code.FAILED_PRECONDITION, _CONFIG, "older than min_weight_version"
    WEIGHTS_TOO_NEW = Code.FAILED_PRECONDITION, _CONFIG, "newer than max_weight_version"
    TIMED_OUT = Code.DEADLINE_EXCEEDED, _SEQUENCE, "the request's time limit has passed"
    NOT_FINITE = Code.INTERNAL, _SEQUENCE, "NaN or infinity in the sequence's logits"
    STEP_FAILED = Code.INTERNAL, _SEQUENCE, "the engine's step raised for this sequence alone"

    # State and load of the server.
    QUEUE_FULL = Code.RESOURCE_EXHAUSTED, _SERVER, "too many sequences wait", 1.0
    TOO_MANY_STREAMS = (
        Code.RESOURCE_EXHAUSTED,
        _SERVER,
        "the client has too many StreamRollouts calls",
    )
    TOO_MANY_CALLS = (
        Code.RESOURCE_EXHAUSTED,
        _SERVER,
        "the client has too many calls of this method",
        1.0,
    )
    STARTING = Code.UNAVAILABLE, _SERVER, "the engine is loading", 5.0
    DRAINING = Code.UNAVAILABLE, _SERVER, "the server is shutting down", 1.0
    SLEEPING = Code.UNAVAILABLE, _SERVER, "the server has freed its memory", 5.0
    AWAITING_WEIGHTS = Code.UNAVAILABLE, _SERVER, "no update was committed yet", 5.0
    QUARANTINED = Code.UNAVAILABLE, _SERVER, "a commit failed half way; a full update cures it", 5.0
    UNSUPPORTED_SLEEP = (
        Code.FAILED_PRECONDITION,
        _CONFIG,
        "the engine does not support this sleep mode",
    )

    # Weight updates.
    FROZEN = Code.FAILED_PRECONDITION, _UPDATE, "this server accepts no updates"
    STALE_PUBLISHER = Code.FAILED_PRECONDITION, _UPDATE, "a publisher with a higher term took over"
    UPDATE_IN_PROGRESS = Code.FAILED_PRECONDITION, _UPDATE, "another update is under way"
    NOT_STAGED = Code.FAILED_PRECONDITION, _UPDATE, "the update is unknown or not complete"
    VERSION_NOT_NEWER = Code.FAILED_PRECONDITION, _UPDATE, "the version is below the committed one"
    VERSION_CONFLICT = (
        Code.FAILED_PRECONDITION,
        _UPDATE,
        "the version was committed with other content",
    )
    BASE_MISMATCH = Code.FAILED_PRECONDITION, _UPDATE, "the update needs other weights"
    MANIFEST_MISMATCH = Code.INVALID_ARGUMENT, _UPDATE, "the update's tensors are not the model's"
    DIGEST_MISMATCH = Code.DATA_LOSS, _UPDATE, "the received bytes are not the sent ones"
    TRANSPORT_FAILED = Code.ABORTED, _UPDATE, "the transport group failed"
    TRANSPORT_TIMEOUT = Code.ABORTED, _UPDATE, "a member of the transport group is silent"
    STAGING_FAILED = (
        Code.RESOURCE_EXHAUSTED,
        _UPDATE,
        "no memory for an update beside the serving weights",
    )
    COMMIT_FAILED = Code.INTERNAL, _UPDATE, "the commit failed; nothing was changed"
    UNSUPPORTED_ENCODING = (
        Code.UNIMPLEMENTED,
        _UPDATE,
        "this server does not support the update's encoding",
    )


@dataclass(slots=True)
class ErrorDetails:
    """The details of an error, besides its code and message.

    Attributes:
        reason: The name of a ``Reason``, perhaps of a later release; "" if there is none.
        retry_after: Seconds after which a retry may help.
        violations: The wrong fields of the request, each with a description.
        metadata: Facts for programs.
    """

    reason: str = ""
    retry_after: float | None = None
    violations: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)


def encode_status(
    reason: Reason, message: str, *, field: str | None = None, metadata: Mapping[str, str]
) -> status_pb2.Status:
    """Encodes an error for the wire; ``field`` is the wrong field of the request."""
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
    status = status_pb2.Status(code=code, message=message)
    for detail in details:
        status.details.add().Pack(detail)
    return status


def decode_details(metadata: Iterable[tuple[str, str | bytes]]) -> ErrorDetails:
    """Decodes the error that ended a call from its trailing metadata."""
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


def _read_detail(packed: AnyMessage, found: ErrorDetails) -> None:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    if packed.Unpack(info) and info.domain == DOMAIN:
        found.reason, found.metadata = info.reason, dict(info.metadata)
    elif packed.Unpack(bad):
        found.violations = {v.field: v.description for v in bad.field_violations}
    elif packed.Unpack(retry):
        found.retry_after = retry.retry_delay.ToTimedelta().total_seconds()

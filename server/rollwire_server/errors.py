"""Every error that the server answers with: one table of reasons, one exception.

On the wire an error is a google.rpc.Status with ErrorInfo (domain ``rollwire``), BadRequest where a
field of the request is wrong, and RetryInfo where waiting helps.
"""

from __future__ import annotations

import enum
import struct
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from rollwire_server.engines.base import NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

    from rollwire_server.engines.base import EngineError

DOMAIN = "rollwire"
DETAILS_KEY = "grpc-status-details-bin"
MESSAGE_BYTES = 1500


class Reason(enum.Enum):
    """Why a call or a sequence failed: the gRPC code, and what it means."""

    def __init__(self, code: grpc.StatusCode, meaning: str) -> None:
        self.code = code
        self.meaning = meaning

    # Requests, checked before the engine sees them.
    EMPTY_PROMPT = grpc.StatusCode.INVALID_ARGUMENT, "the prompt has no tokens"
    TOKEN_OUT_OF_RANGE = grpc.StatusCode.INVALID_ARGUMENT, "a token id beyond the vocabulary"
    CONTEXT_EXCEEDED = grpc.StatusCode.INVALID_ARGUMENT, "longer than the context"
    BAD_SAMPLING = grpc.StatusCode.INVALID_ARGUMENT, "a sampling parameter out of its range"
    UNSUPPORTED_LOGPROB_BASIS = grpc.StatusCode.INVALID_ARGUMENT, "not offered by this engine"
    UNSUPPORTED_ROUTING = grpc.StatusCode.INVALID_ARGUMENT, "the model has no experts to report"
    BAD_REQUEST = grpc.StatusCode.INVALID_ARGUMENT, "a field that is missing or makes no sense"

    INTERNAL = grpc.StatusCode.INTERNAL, "a bug of the server"
    ENGINE_FAILED = grpc.StatusCode.INTERNAL, "the engine failed at it; what serves is untouched"
    NO_MEMORY = grpc.StatusCode.RESOURCE_EXHAUSTED, "the engine finds no memory for it"

    # Who calls.
    UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED, "no token, or one that is not known"
    PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED, "a token for something else"

    # Sequences.
    STALE_ATTEMPT = grpc.StatusCode.ABORTED, "a lower attempt than one already seen"
    PREFIX_MISMATCH = grpc.StatusCode.FAILED_PRECONDITION, "a prefix that the server did not sample"
    REQUEST_MISMATCH = (
        grpc.StatusCode.FAILED_PRECONDITION,
        "a pick-up that asks for something else than the request that it picks up",
    )
    WEIGHTS_TOO_OLD = grpc.StatusCode.FAILED_PRECONDITION, "older than min_weight_version"
    WEIGHTS_TOO_NEW = grpc.StatusCode.FAILED_PRECONDITION, "newer than max_weight_version"
    TIMED_OUT = grpc.StatusCode.DEADLINE_EXCEEDED, "the time that a request may take is over"
    NOT_FINITE = grpc.StatusCode.INTERNAL, "NaN or infinity in the sequence's logits"
    STEP_FAILED = grpc.StatusCode.INTERNAL, "the engine's step raised for this sequence alone"

    # What the server is doing.
    QUEUE_FULL = grpc.StatusCode.RESOURCE_EXHAUSTED, "more waiting than the limit"
    TOO_MANY_STREAMS = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "more StreamRollouts calls of one client than the limit",
    )
    TOO_MANY_CALLS = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "more calls of a method by one client than the limit",
    )
    STARTING = grpc.StatusCode.UNAVAILABLE, "the engine is loading"
    DRAINING = grpc.StatusCode.UNAVAILABLE, "the server is going down"
    SLEEPING = grpc.StatusCode.UNAVAILABLE, "its memory is given back"
    AWAITING_WEIGHTS = grpc.StatusCode.UNAVAILABLE, "no update was committed yet"
    QUARANTINED = grpc.StatusCode.UNAVAILABLE, "a commit failed half way; a full update cures it"
    UNSUPPORTED_SLEEP = (
        grpc.StatusCode.FAILED_PRECONDITION,
        "not what can become of this engine's weights while it sleeps",
    )

    # Weight updates.
    FROZEN = grpc.StatusCode.FAILED_PRECONDITION, "this server takes no updates"
    STALE_PUBLISHER = grpc.StatusCode.FAILED_PRECONDITION, "a publisher with a higher term was here"
    UPDATE_IN_PROGRESS = grpc.StatusCode.FAILED_PRECONDITION, "another update is under way"
    NOT_STAGED = grpc.StatusCode.FAILED_PRECONDITION, "no such update, or not complete"
    VERSION_NOT_NEWER = grpc.StatusCode.FAILED_PRECONDITION, "below what is committed"
    VERSION_CONFLICT = grpc.StatusCode.FAILED_PRECONDITION, "this version with other content"
    BASE_MISMATCH = grpc.StatusCode.FAILED_PRECONDITION, "the update is made for other weights"
    MANIFEST_MISMATCH = grpc.StatusCode.INVALID_ARGUMENT, "tensors that the model does not have"
    DIGEST_MISMATCH = grpc.StatusCode.DATA_LOSS, "received bytes are not what was sent"
    TRANSPORT_FAILED = grpc.StatusCode.ABORTED, "the transport group broke"
    TRANSPORT_TIMEOUT = grpc.StatusCode.ABORTED, "a member of the transport group is silent"
    STAGING_FAILED = (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "no memory for an update beside what serves",
    )
    COMMIT_FAILED = grpc.StatusCode.INTERNAL, "nothing was changed"
    UNSUPPORTED_ENCODING = grpc.StatusCode.UNIMPLEMENTED, "this server takes full updates only"


# Where waiting helps, and for how long (seconds).
RETRY_AFTER = {
    Reason.QUEUE_FULL: 1.0,
    Reason.TOO_MANY_CALLS: 1.0,
    Reason.STARTING: 5.0,
    Reason.DRAINING: 1.0,
    Reason.SLEEPING: 5.0,
    Reason.AWAITING_WEIGHTS: 5.0,
    Reason.QUARANTINED: 5.0,
}


class ServiceError(Exception):
    """A refusal or failure that the caller is told.

    Args:
        reason: Why.
        message: What happened, what state things are in, what to do.
        field: The request's field that is wrong.
        metadata: Facts for programs, as strings.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = _cut(message)
        self.field = field
        self.metadata = dict(metadata or {})

    @property
    def retry_delay(self) -> duration_pb2.Duration | None:
        """How long to wait before trying again, where that helps."""
        if (seconds := RETRY_AFTER.get(self.reason)) is None:
            return None
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(seconds * 1000))
        return delay

    def status(self) -> status_pb2.Status:
        """The error as it goes over the wire."""
        info = error_details_pb2.ErrorInfo(
            reason=self.reason.name, domain=DOMAIN, metadata=self.metadata
        )
        details = [_packed(info)]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message, reason=self.reason.name
            )
            details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
        if (delay := self.retry_delay) is not None:
            details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        code: int = self.reason.code.value[0]
        return status_pb2.Status(code=code, message=self.message, details=details)


def of_engine(
    error: EngineError, state: str = "", *, no_memory: Reason = Reason.NO_MEMORY
) -> ServiceError:
    """What a caller is told of an engine's failure.

    Args:
        error: What the engine raised.
        state: What state things are in, and what to do.
        no_memory: The reason where there was no memory for it.
    """
    reason = no_memory if isinstance(error, NoMemoryError) else Reason.ENGINE_FAILED
    return ServiceError(reason, f"{error}; {state}" if state else str(error))


def told_float(value: float) -> str:
    """A float32 in a message: the shortest decimal that is this one and no other, so usually what
    its sender wrote.
    """
    single = struct.pack("f", value)
    for digits in range(1, 9):
        told = f"{value:.{digits}g}"
        if struct.pack("f", float(told)) == single:
            return told
    return f"{value:.9g}"


def _cut(message: str) -> str:
    """At most MESSAGE_BYTES: longer ones do not pass as gRPC metadata, where errors travel."""
    encoded = message.encode(errors="replace")
    if len(encoded) <= MESSAGE_BYTES:
        return message
    return encoded[:MESSAGE_BYTES].decode(errors="ignore") + " …"


async def answer(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """Ends a call with an error."""
    trailing = ((DETAILS_KEY, error.status().SerializeToString()),)
    await context.abort(error.reason.code, error.message, trailing)
    raise AssertionError("abort raises")


def _packed(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed

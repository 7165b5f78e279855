"""Every error that the library raises, and how each is told from what a server answers.

    RollwireError
    ├── RefusedError                   the request cannot work as it is: never sent again
    │   ├── InvalidRequestError        a field is wrong; `.violations` names it
    │   ├── StaleAttemptError          a newer attempt of this request was seen
    │   ├── PrefixMismatchError        the prefix is not what the server sampled
    │   └── WeightVersionError         the servers' weights are too old or too new
    ├── UnavailableError               not now, or not here
    │   ├── ServerUnreachableError     nothing answers at the address, or the link to it is lost
    │   ├── ServerNotReadyError        drains, sleeps, awaits weights, is quarantined
    │   └── QueueFullError             more sequences wait than the server allows
    ├── ServerFailedError              the server failed at it
    │   ├── NotFiniteError             NaN or infinity in the sequence's logits
    │   └── ProtocolError              the server broke the API's contract, such as a gap in offsets
    ├── TimedOutError                  the time that the caller gave is up
    ├── RolloutFailedError             a fleet gave a sequence up; `.causes` says what it tried
    ├── PublishError                   a publish cannot go on
    │   ├── UpdateRefusedError         a server refused it; `.reason` says why
    │   │   ├── StalePublisherError    a publisher with a higher term took over
    │   │   └── FrozenError            the server takes no updates
    │   ├── TransferError              the transport between trainer and servers failed
    │   ├── DigestMismatchError        bytes are not what was sent, or not the version's
    │   ├── SourceError                the trainer did not give its tensors
    │   ├── TensorsChangedError        the trainer changed its tensors while they were sent
    │   ├── SchemaMismatchError        the trainer's tensors are not those that the servers want
    │   ├── PublishInProgressError     another publish of this publisher is under way
    │   └── PublishFailedError         no server committed; says what each serves now
    ├── StalenessError                 no server serves weights that the batch's bound allows
    ├── BufferFileError                a saved buffer is none, damaged, or of another run
    ├── ClosedError                    the client or fleet is not open
    └── MissingDependencyError         an extra is not installed

An error of a rollout carries what was sampled before it in ``.trajectory``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rollwire_client.unreachable import explain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire.v1 import rollout_pb2

    from rollwire_client.trajectory import Trajectory

DOMAIN = "rollwire"
DETAILS_KEY = "grpc-status-details-bin"


class RollwireError(Exception):
    """The root of every error of this library.

    Attributes:
        server: Address of the server concerned, if it is one.
        reason: The server's word for it ("DRAINING"), from the API's table; "" if it gave none.
        elsewhere: Whether the same may succeed on another server, or later.
        retry_after: Seconds after which the server expects that trying again helps.
        violations: Fields of the request that are wrong, and how.
        metadata: Facts for programs that the server added.
        trajectory: Of a rollout: what was sampled before the error.
    """

    elsewhere = False

    def __init__(
        self,
        message: str,
        *,
        server: str | None = None,
        reason: str = "",
        retry_after: float | None = None,
        violations: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.server = server
        self.reason = reason
        self.retry_after = retry_after
        self.violations = dict(violations or {})
        self.metadata = dict(metadata or {})
        self.trajectory: Trajectory | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross the borders of processes as they are."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RollwireError], args: tuple[Any, ...], state: Any) -> RollwireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RefusedError(RollwireError):
    """The request cannot work as it is."""


class InvalidRequestError(RefusedError):
    """A field of the request is wrong; ``violations`` names it."""


class StaleAttemptError(RefusedError):
    """The server has seen a newer attempt of this request."""


class PrefixMismatchError(RefusedError):
    """The output tokens given back are not what the server sampled."""


class WeightVersionError(RefusedError):
    """The server's weights stayed older than asked for, or are newer; of a fleet, those of every
    server are newer.
    """


class UnavailableError(RollwireError):
    """The server cannot do it now; another one, or the same one later, may."""

    elsewhere = True


class ServerUnreachableError(UnavailableError):
    """Nothing answers at the address, or the link to it is lost."""


class ServerNotReadyError(UnavailableError):
    """The server drains, sleeps, awaits weights or is quarantined."""


class QueueFullError(UnavailableError):
    """More sequences wait, or more streams are open, than the server allows."""


class ServerFailedError(RollwireError):
    """The server failed at it."""

    elsewhere = True


class NotFiniteError(ServerFailedError):
    """NaN or infinity in the sequence's logits; another server would find the same."""

    elsewhere = False


class ProtocolError(ServerFailedError):
    """The server broke the API's contract."""

    elsewhere = False


class TimedOutError(RollwireError):
    """The time that the caller gave is up."""


class RolloutFailedError(RollwireError):
    """A fleet gave a sequence up: too many attempts, or too long, without a new token.

    Attributes:
        causes: What each attempt since the last new token failed with.
    """

    def __init__(self, message: str, causes: Sequence[RollwireError]) -> None:
        super().__init__(message)
        self.causes = tuple(causes)

    @property
    def of_servers(self) -> bool:
        """Whether servers failed at it, each time."""
        return bool(self.causes) and all(isinstance(c, ServerFailedError) for c in self.causes)


class PublishError(RollwireError):
    """A publish cannot go on."""


class UpdateRefusedError(PublishError):
    """A server refused the update, or its commit."""


class StalePublisherError(UpdateRefusedError):
    """A publisher with a higher term took over; this one is of the past."""


class FrozenError(UpdateRefusedError):
    """The server takes no updates."""


class TransferError(PublishError):
    """The transport between the trainer and the servers failed."""


class DigestMismatchError(PublishError):
    """What a server received is not what was sent; or what is sent to catch up is not what the
    fleet serves.
    """


class SourceError(PublishError):
    """The trainer did not give its tensors: its source raised (what it raised is the cause), took
    too long over one, or a process of a sharded trainer failed.
    """


class TensorsChangedError(PublishError):
    """Tensors changed in place before ``released``: what was sent is of no one step."""


class SchemaMismatchError(PublishError):
    """The trainer's tensors are not those that the servers want; the message names each."""


class PublishInProgressError(PublishError):
    """Another publish of this publisher is under way."""


class PublishFailedError(PublishError):
    """No server committed.

    Attributes:
        errors: What went wrong, by server address.
    """

    def __init__(self, message: str, errors: Mapping[str, RollwireError]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class StalenessError(RollwireError):
    """No server serves weights as new as the batch's ``max_lag`` asks for."""


class BufferFileError(RollwireError):
    """What was to be loaded is no buffer, is damaged, or belongs to another run."""


class ClosedError(RollwireError):
    """The client or fleet is not open: not yet, or no more."""


class MissingDependencyError(RollwireError, ImportError):
    """An extra is not installed; the message says how to install it."""


# What a reason of the API becomes; its class says whether to try elsewhere.
_BY_REASON: Mapping[str, type[RollwireError]] = {
    "EMPTY_PROMPT": InvalidRequestError,
    "TOKEN_OUT_OF_RANGE": InvalidRequestError,
    "CONTEXT_EXCEEDED": InvalidRequestError,
    "BAD_SAMPLING": InvalidRequestError,
    "UNSUPPORTED_LOGPROB_BASIS": InvalidRequestError,
    "UNSUPPORTED_ROUTING": InvalidRequestError,
    "BAD_REQUEST": InvalidRequestError,
    "UNAUTHENTICATED": RefusedError,
    "PERMISSION_DENIED": RefusedError,
    "TOO_MANY_STREAMS": QueueFullError,
    "TOO_MANY_CALLS": QueueFullError,
    "STALE_ATTEMPT": StaleAttemptError,
    "PREFIX_MISMATCH": PrefixMismatchError,
    "REQUEST_MISMATCH": RefusedError,
    "WEIGHTS_TOO_OLD": WeightVersionError,
    "WEIGHTS_TOO_NEW": WeightVersionError,
    "TIMED_OUT": TimedOutError,
    "INTERNAL": ServerFailedError,
    "ENGINE_FAILED": ServerFailedError,
    "NO_MEMORY": ServerFailedError,
    "NOT_FINITE": NotFiniteError,
    "STEP_FAILED": ServerFailedError,
    "QUEUE_FULL": QueueFullError,
    "STARTING": ServerNotReadyError,
    "DRAINING": ServerNotReadyError,
    "SLEEPING": ServerNotReadyError,
    "AWAITING_WEIGHTS": ServerNotReadyError,
    "QUARANTINED": ServerNotReadyError,
    "UNSUPPORTED_SLEEP": RefusedError,
    "FROZEN": FrozenError,
    "STALE_PUBLISHER": StalePublisherError,
    "UPDATE_IN_PROGRESS": UpdateRefusedError,
    "NOT_STAGED": UpdateRefusedError,
    "VERSION_NOT_NEWER": UpdateRefusedError,
    "VERSION_CONFLICT": UpdateRefusedError,
    "BASE_MISMATCH": UpdateRefusedError,
    "MANIFEST_MISMATCH": UpdateRefusedError,
    "UNSUPPORTED_ENCODING": UpdateRefusedError,
    "STAGING_FAILED": UpdateRefusedError,
    "COMMIT_FAILED": UpdateRefusedError,
    "DIGEST_MISMATCH": DigestMismatchError,
    "TRANSPORT_FAILED": TransferError,
    "TRANSPORT_TIMEOUT": TransferError,
}

# What a status without a known reason becomes.
_BY_CODE: Mapping[int, type[RollwireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT.value[0]: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND.value[0]: RefusedError,
    grpc.StatusCode.ALREADY_EXISTS.value[0]: RefusedError,
    grpc.StatusCode.PERMISSION_DENIED.value[0]: RefusedError,
    grpc.StatusCode.UNAUTHENTICATED.value[0]: RefusedError,
    grpc.StatusCode.FAILED_PRECONDITION.value[0]: RefusedError,
    grpc.StatusCode.OUT_OF_RANGE.value[0]: RefusedError,
    grpc.StatusCode.UNIMPLEMENTED.value[0]: RefusedError,
    grpc.StatusCode.DEADLINE_EXCEEDED.value[0]: TimedOutError,
    grpc.StatusCode.UNAVAILABLE.value[0]: ServerUnreachableError,
    grpc.StatusCode.CANCELLED.value[0]: ServerUnreachableError,  # by the other side: it shuts down
}


@dataclass(slots=True)
class _Details:
    """What google.rpc.Status says beside code and message."""

    reason: str = ""
    retry_after: float | None = None
    violations: Mapping[str, str] | None = None
    metadata: Mapping[str, str] | None = None


def from_rpc(error: grpc.aio.AioRpcError, server: str) -> RollwireError:
    """What a call that ended with ``error`` raises."""
    message = error.details() or error.code().name
    details = _details_of(error)
    fields = "".join(
        f"; {field}: {what}"
        for field, what in (details.violations or {}).items()
        if what not in message
    )
    return _make(error.code().value[0], f"{message}{fields}", server, details)


def from_sequence(error: rollout_pb2.SequenceError, server: str) -> RollwireError:
    """What a sequence that ended with ``error`` raises."""
    details = _Details(reason=error.reason, metadata=error.metadata)
    if error.HasField("retry_delay"):
        details.retry_after = error.retry_delay.ToTimedelta().total_seconds()
    if error.field:
        details.violations = {error.field: error.message}
    return _make(error.code, error.message, server, details)


def _make(code: int, message: str, server: str, details: _Details) -> RollwireError:
    kind = _BY_REASON.get(details.reason) or _BY_CODE.get(code, ServerFailedError)
    if kind is ServerUnreachableError:
        message = f"cannot be reached: {explain(message, server)}"
    reason = f" ({details.reason})" if details.reason else ""
    return kind(
        f"{server}: {message}{reason}",
        server=server,
        reason=details.reason,
        retry_after=details.retry_after,
        violations=details.violations,
        metadata=details.metadata,
    )


def _details_of(error: grpc.aio.AioRpcError) -> _Details:
    found = _Details()
    for key, value in error.trailing_metadata() or ():
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            packed = status_pb2.Status.FromString(value).details
        except DecodeError:  # from a proxy on the way, not from a rollwire server
            continue
        for detail in packed:
            _read_detail(detail, found)
    return found


def _read_detail(packed: Any, found: _Details) -> None:
    info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    if packed.Unpack(info) and info.domain == DOMAIN:
        found.reason, found.metadata = info.reason, info.metadata
    elif packed.Unpack(bad):
        found.violations = {v.field: v.description for v in bad.field_violations}
    elif packed.Unpack(retry):
        found.retry_after = retry.retry_delay.ToTimedelta().total_seconds()

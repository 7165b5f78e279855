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
    │   ├── StepFailedError            the engine's step raised for this sequence alone
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
    ├── CallbackError                  what the caller gave to be called raised, or never returned
    ├── StalenessError                 no server serves weights that the batch's bound allows
    ├── BufferFileError                a saved buffer is none, damaged, or of another run
    ├── ClosedError                    the client or fleet is not open
    │   └── NotOpenHereError           it is open in another process or event loop
    └── MissingDependencyError         an extra is not installed

An error of a rollout carries what was sampled before it in ``.trajectory``, and says in ``.scope``
whom it concerns: that sequence, that server, or every sequence alike.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rollwire_client._rpc.unreachable import explain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire.v1 import rollout_pb2

    from rollwire_client._trajectory import Trajectory

DOMAIN = "rollwire"
DETAILS_KEY = "grpc-status-details-bin"


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


class RollwireError(Exception):
    """The root of every error of this library.

    Attributes:
        server: Address of the server concerned, if it is one.
        reason: The server's word for it ("DRAINING"), from the API's table; "" if it gave none.
        scope: Whom it concerns.
        elsewhere: Whether the same may succeed on another server, or later: with that scope.
        retry_after: Seconds after which the server expects that trying again helps.
        violations: Fields of the request that are wrong, and how.
        metadata: Facts for programs that the server added.
        trajectory: Of a rollout: what was sampled before the error.
    """

    scope = ErrorScope.CONFIGURATION

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

    @property
    def elsewhere(self) -> bool:
        """Whether the same may succeed on another server, or later."""
        return self.scope is ErrorScope.SERVER

    def __reduce__(self) -> tuple[Any, ...]:
        """Errors cross the borders of processes as they are."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RollwireError], args: tuple[Any, ...], state: Any) -> RollwireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RefusedError(RollwireError):
    """The request cannot work as it is."""

    scope = ErrorScope.SEQUENCE


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

    scope = ErrorScope.CONFIGURATION


class UnavailableError(RollwireError):
    """The server cannot do it now; another one, or the same one later, may."""

    scope = ErrorScope.SERVER


class ServerUnreachableError(UnavailableError):
    """Nothing answers at the address, or the link to it is lost."""


class ServerNotReadyError(UnavailableError):
    """The server drains, sleeps, awaits weights or is quarantined."""


class QueueFullError(UnavailableError):
    """More sequences wait, or more streams are open, than the server allows."""


class ServerFailedError(RollwireError):
    """The server failed at it."""

    scope = ErrorScope.SERVER


class NotFiniteError(ServerFailedError):
    """NaN or infinity in the sequence's logits; another server would find the same."""

    scope = ErrorScope.SEQUENCE


class StepFailedError(ServerFailedError):
    """The engine's step raised for this sequence alone, on each server that a fleet tried."""

    scope = ErrorScope.SEQUENCE


class ProtocolError(ServerFailedError):
    """The server broke the API's contract."""

    scope = ErrorScope.SEQUENCE


class TimedOutError(RollwireError):
    """The time that the caller gave is up."""

    scope = ErrorScope.SEQUENCE


class RolloutFailedError(RollwireError):
    """A fleet gave a sequence up: too many attempts, or too long without a place on a server.

    Attributes:
        causes: What each attempt since the last new token failed with.
        scope: ``SEQUENCE`` if the attempts were too many: servers were ready for each. ``SERVER``
            if none had a place for it.
    """

    def __init__(
        self,
        message: str,
        causes: Sequence[RollwireError],
        *,
        scope: ErrorScope = ErrorScope.SEQUENCE,
    ) -> None:
        super().__init__(message)
        self.causes = tuple(causes)
        self.scope = scope

    @property
    def of_servers(self) -> bool:
        """Whether servers failed at it, each time."""
        return bool(self.causes) and all(isinstance(c, ServerFailedError) for c in self.causes)


class PublishError(RollwireError):
    """A publish cannot go on."""

    scope = ErrorScope.UPDATE


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


class CallbackError(RollwireError):
    """What the caller gave to be called raised (what it raised is the cause), returned what it must
    not, or took too long.

    Attributes:
        callback: Its name as an argument: "reward", "decide", "stop", "prompts".
    """

    scope = ErrorScope.SEQUENCE

    def __init__(self, message: str, *, callback: str) -> None:
        super().__init__(message)
        self.callback = callback


class StalenessError(RollwireError):
    """No server serves weights as new as the batch's ``max_lag`` asks for."""


class BufferFileError(RollwireError):
    """What was to be loaded is no buffer, is damaged, or belongs to another run."""


class ClosedError(RollwireError):
    """The client or fleet is not open: not yet, or no more."""


class NotOpenHereError(ClosedError):
    """It was opened in another process, of which this is a fork, or in another event loop."""


class MissingDependencyError(RollwireError, ImportError):
    """An extra is not installed; the message says how to install it."""


# What each reason of the API becomes, and whom it concerns. One that is missing here is told by its
# code, below; a test holds the table against the server's.
_SEQUENCE, _SERVER = ErrorScope.SEQUENCE, ErrorScope.SERVER
_CONFIGURATION, _UPDATE = ErrorScope.CONFIGURATION, ErrorScope.UPDATE
_BY_REASON: Mapping[str, tuple[type[RollwireError], ErrorScope]] = {
    "EMPTY_PROMPT": (InvalidRequestError, _SEQUENCE),
    "TOKEN_OUT_OF_RANGE": (InvalidRequestError, _SEQUENCE),
    "CONTEXT_EXCEEDED": (InvalidRequestError, _SEQUENCE),
    "BAD_SAMPLING": (InvalidRequestError, _SEQUENCE),  # it may depend on the prompt's length
    "UNSUPPORTED_LOGPROB_BASIS": (InvalidRequestError, _CONFIGURATION),
    "UNSUPPORTED_ROUTING": (InvalidRequestError, _CONFIGURATION),
    "BAD_REQUEST": (InvalidRequestError, _SEQUENCE),
    "UNAUTHENTICATED": (RefusedError, _CONFIGURATION),
    "PERMISSION_DENIED": (RefusedError, _CONFIGURATION),
    "TOO_MANY_STREAMS": (QueueFullError, _SERVER),
    "TOO_MANY_CALLS": (QueueFullError, _SERVER),
    "STALE_ATTEMPT": (StaleAttemptError, _SEQUENCE),
    "PREFIX_MISMATCH": (PrefixMismatchError, _SEQUENCE),
    "REQUEST_MISMATCH": (RefusedError, _SEQUENCE),
    "WEIGHTS_TOO_OLD": (WeightVersionError, _CONFIGURATION),
    "WEIGHTS_TOO_NEW": (WeightVersionError, _CONFIGURATION),
    "TIMED_OUT": (TimedOutError, _SEQUENCE),
    "INTERNAL": (ServerFailedError, _SERVER),
    "ENGINE_FAILED": (ServerFailedError, _SERVER),
    "NO_MEMORY": (ServerFailedError, _SERVER),
    "NOT_FINITE": (NotFiniteError, _SEQUENCE),
    "STEP_FAILED": (StepFailedError, _SEQUENCE),
    "QUEUE_FULL": (QueueFullError, _SERVER),
    "STARTING": (ServerNotReadyError, _SERVER),
    "DRAINING": (ServerNotReadyError, _SERVER),
    "SLEEPING": (ServerNotReadyError, _SERVER),
    "AWAITING_WEIGHTS": (ServerNotReadyError, _SERVER),
    "QUARANTINED": (ServerNotReadyError, _SERVER),
    "UNSUPPORTED_SLEEP": (RefusedError, _CONFIGURATION),
    "FROZEN": (FrozenError, _UPDATE),
    "STALE_PUBLISHER": (StalePublisherError, _UPDATE),
    "UPDATE_IN_PROGRESS": (UpdateRefusedError, _UPDATE),
    "NOT_STAGED": (UpdateRefusedError, _UPDATE),
    "VERSION_NOT_NEWER": (UpdateRefusedError, _UPDATE),
    "VERSION_CONFLICT": (UpdateRefusedError, _UPDATE),
    "BASE_MISMATCH": (UpdateRefusedError, _UPDATE),
    "MANIFEST_MISMATCH": (UpdateRefusedError, _UPDATE),
    "UNSUPPORTED_ENCODING": (UpdateRefusedError, _UPDATE),
    "STAGING_FAILED": (UpdateRefusedError, _UPDATE),
    "COMMIT_FAILED": (UpdateRefusedError, _UPDATE),
    "DIGEST_MISMATCH": (DigestMismatchError, _UPDATE),
    "TRANSPORT_FAILED": (TransferError, _UPDATE),
    "TRANSPORT_TIMEOUT": (TransferError, _UPDATE),
}

# What a status without a known reason becomes, such as one of a proxy, or of a later release.
_BY_CODE: Mapping[int, tuple[type[RollwireError], ErrorScope]] = {
    code.value[0]: told
    for code, told in {
        grpc.StatusCode.INVALID_ARGUMENT: (InvalidRequestError, _SEQUENCE),
        grpc.StatusCode.NOT_FOUND: (RefusedError, _SEQUENCE),
        grpc.StatusCode.ALREADY_EXISTS: (RefusedError, _SEQUENCE),
        grpc.StatusCode.PERMISSION_DENIED: (RefusedError, _CONFIGURATION),
        grpc.StatusCode.UNAUTHENTICATED: (RefusedError, _CONFIGURATION),
        grpc.StatusCode.FAILED_PRECONDITION: (RefusedError, _SEQUENCE),
        grpc.StatusCode.OUT_OF_RANGE: (RefusedError, _SEQUENCE),
        grpc.StatusCode.UNIMPLEMENTED: (RefusedError, _CONFIGURATION),
        grpc.StatusCode.DEADLINE_EXCEEDED: (TimedOutError, _SEQUENCE),
        grpc.StatusCode.UNAVAILABLE: (ServerUnreachableError, _SERVER),
        grpc.StatusCode.CANCELLED: (ServerUnreachableError, _SERVER),  # by the other: it shuts down
    }.items()
}
_OTHERWISE = ServerFailedError, _SERVER


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
    kind, scope = _BY_REASON.get(details.reason) or _BY_CODE.get(code, _OTHERWISE)
    if kind is ServerUnreachableError:
        message = f"cannot be reached: {explain(message, server)}"
    reason = f" ({details.reason})" if details.reason else ""
    error = kind(
        f"{server}: {message}{reason}",
        server=server,
        reason=details.reason,
        retry_after=details.retry_after,
        violations=details.violations,
        metadata=details.metadata,
    )
    error.scope = scope
    return error


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

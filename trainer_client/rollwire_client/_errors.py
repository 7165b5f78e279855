"""Every error that the library raises.

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

from typing import TYPE_CHECKING, Any

from rollwire.reasons import ErrorScope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
        trajectory: Of a rollout: the ``Trajectory`` of what was sampled before the error. Else
            None.
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
        # A Trajectory, or None. Naming the type would close a circle: a trajectory's to_tensors
        # raises MissingDependencyError.
        self.trajectory: Any = None

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

"""Every error that the library raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollwire.reasons import ErrorScope

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class RollwireError(Exception):
    """The root of every error of this library.

    Attributes:
        server: Address of the server that failed; None if the error is not about one.
        reason: Name of the reason in the API's table, such as "DRAINING"; "" if the server gave
            none.
        scope: What the error concerns.
        elsewhere: Whether the same request may succeed on another server, or later.
        retry_after: Seconds after which the server suggests a retry; None if it suggests none.
        violations: The wrong fields of the request, each with a description.
        metadata: Further facts from the server, for programs.
        trajectory: The ``Trajectory`` of a failed rollout so far; None for other errors.
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
        """Whether the same request may succeed on another server, or later."""
        return self.scope is ErrorScope.SERVER

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the error with all its attributes, to be sent between processes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[RollwireError], args: tuple[Any, ...], state: Any) -> RollwireError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class RefusedError(RollwireError):
    """The request cannot succeed as it is."""

    scope = ErrorScope.SEQUENCE


class InvalidRequestError(RefusedError):
    """A field of the request is wrong; ``violations`` names it."""


class StaleAttemptError(RefusedError):
    """The server has seen a newer attempt of this request."""


class PrefixMismatchError(RefusedError):
    """The output tokens in the request are not those that the server sampled."""


class WeightVersionError(RefusedError):
    """The server's weights stayed older than ``min_weight_version``, or are newer than
    ``max_weight_version``. From a fleet: the weights of every server are newer.
    """

    scope = ErrorScope.CONFIGURATION


class UnavailableError(RollwireError):
    """The server cannot serve the request now; another server, or this one later, may."""

    scope = ErrorScope.SERVER


class ServerUnreachableError(UnavailableError):
    """Nothing answers at the address, or the connection to it is lost."""


class ServerNotReadyError(UnavailableError):
    """The server drains, sleeps, awaits weights or is quarantined."""


class QueueFullError(UnavailableError):
    """More sequences wait, or more streams are open, than the server allows."""


class ServerFailedError(RollwireError):
    """The server failed; another one may succeed."""

    scope = ErrorScope.SERVER


class NotFiniteError(ServerFailedError):
    """NaN or infinity in the sequence's logits; the same would happen on another server."""

    scope = ErrorScope.SEQUENCE


class StepFailedError(ServerFailedError):
    """The engine's step raised for this sequence alone, on each server that a fleet tried."""

    scope = ErrorScope.SEQUENCE


class ProtocolError(ServerFailedError):
    """The server broke the API's contract."""

    scope = ErrorScope.SEQUENCE


class TimedOutError(RollwireError):
    """The caller's timeout has passed."""

    scope = ErrorScope.SEQUENCE


class RolloutFailedError(RollwireError):
    """A fleet gave a sequence up: after too many attempts, or too long without a free server.

    Attributes:
        causes: The error of each attempt since the last new token.
        scope: ``SEQUENCE`` after too many attempts: servers were ready for each. ``SERVER`` if no
            server had room for the sequence.
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
        """Whether every attempt ended because its server failed."""
        return bool(self.causes) and all(isinstance(c, ServerFailedError) for c in self.causes)


class PublishError(RollwireError):
    """A publish cannot continue."""

    scope = ErrorScope.UPDATE


class UpdateRefusedError(PublishError):
    """A server refused the update, or its commit."""


class StalePublisherError(UpdateRefusedError):
    """A publisher with a higher term took over; this one cannot publish any more."""


class FrozenError(UpdateRefusedError):
    """The server accepts no updates."""


class TransferError(PublishError):
    """The transport between the trainer and the servers failed."""


class DigestMismatchError(PublishError):
    """A server received other bytes than were sent, or the tensors of a catch-up are not those that
    the fleet serves.
    """


class SourceError(PublishError):
    """The trainer did not provide its tensors: its source raised (see ``__cause__``) or took too
    long, or a process of a sharded trainer failed.
    """


class TensorsChangedError(PublishError):
    """The trainer changed tensors in place before ``released``: a mixture of two steps was sent."""


class SchemaMismatchError(PublishError):
    """The trainer's tensors do not match the servers' schema; the message names the differences."""


class PublishInProgressError(PublishError):
    """Another publish of this publisher is under way."""


class PublishFailedError(PublishError):
    """No server committed.

    Attributes:
        errors: The error of each server, by address.
    """

    def __init__(self, message: str, errors: Mapping[str, RollwireError]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class PublishIncompleteError(PublishError):
    """Servers that should have the new version did not commit it; others did.

    Attributes:
        report: The ``PublishReport``; ``report.failed`` has the servers that did not commit.
    """

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class FleetCallError(RollwireError):
    """Servers of a fleet did not sleep, wake up, pause or resume as asked; others may have.

    Attributes:
        report: The ``FleetReport``: ``report.answers`` has the servers that did as asked, and
            ``report.errors`` the others.
    """

    scope = ErrorScope.SERVER

    def __init__(self, message: str, report: Any) -> None:
        super().__init__(message)
        self.report = report


class CallbackError(RollwireError):
    """A callback of the caller raised (see ``__cause__``), returned an invalid value, or took too
    long.

    Attributes:
        callback: Name of the argument: "rollout", "reward", "decide", "stop" or "prompts".
    """

    scope = ErrorScope.SEQUENCE

    def __init__(self, message: str, *, callback: str) -> None:
        super().__init__(message)
        self.callback = callback


class StalenessError(RollwireError):
    """No server serves weights as new as the batch's ``max_lag`` asks for."""


class BufferFileError(RollwireError):
    """A file to load is not a saved buffer, is damaged, or belongs to another run."""


class GroupFileError(RollwireError):
    """A file to read is not what ``append_groups`` wrote; the message names the line."""


class ClosedError(RollwireError):
    """The client or fleet is not open yet, or was closed."""


class NotOpenHereError(ClosedError):
    """It was opened in another event loop, or in another process of which this one is a fork."""


class MissingDependencyError(RollwireError, ImportError):
    """An extra is not installed; the message says how to install it."""

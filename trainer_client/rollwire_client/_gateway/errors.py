"""Errors of the gateway's HTTP API, in OpenAI's shape."""

from __future__ import annotations

import re
from http import HTTPStatus as Status
from typing import Any

from rollwire_client._errors import (
    ClosedError,
    InvalidRequestError,
    MissingDependencyError,
    NotFiniteError,
    PublishError,
    QueueFullError,
    RefusedError,
    RolloutFailedError,
    RollwireError,
    SchemaMismatchError,
    SourceError,
    StepFailedError,
    TimedOutError,
    UnavailableError,
    UpdateRefusedError,
    WeightVersionError,
)

_TYPES = {
    Status.UNAUTHORIZED: "authentication_error",
    Status.FORBIDDEN: "permission_error",
    Status.TOO_MANY_REQUESTS: "rate_limit_error",
    Status.GATEWAY_TIMEOUT: "timeout_error",
}
_RETRY_AFTER = 1.0  # seconds, where a server says nothing else

# The first of these that an error is says how it is answered.
_STATUSES: tuple[tuple[type[RollwireError], Status], ...] = (
    (InvalidRequestError, Status.BAD_REQUEST),
    (WeightVersionError, Status.CONFLICT),
    (RefusedError, Status.CONFLICT),
    (QueueFullError, Status.TOO_MANY_REQUESTS),
    (UnavailableError, Status.SERVICE_UNAVAILABLE),
    (ClosedError, Status.SERVICE_UNAVAILABLE),
    (TimedOutError, Status.GATEWAY_TIMEOUT),
    (MissingDependencyError, Status.NOT_IMPLEMENTED),
    (SourceError, Status.BAD_REQUEST),
    (SchemaMismatchError, Status.BAD_REQUEST),
    (UpdateRefusedError, Status.CONFLICT),
    (PublishError, Status.BAD_GATEWAY),
)
_REASON_STATUSES = {
    "UNAUTHENTICATED": Status.BAD_GATEWAY,  # it is the gateway's token that the servers refuse
    "PERMISSION_DENIED": Status.BAD_GATEWAY,
}
_CODES = {"CONTEXT_EXCEEDED": "context_length_exceeded"}  # as OpenAI's API has them

# Clients of OpenAI's API send a request again after a 408, 409, 429 and 5xx, unless they are told
# not to. Another attempt helps only in these cases.
_RETRY = {Status.TOO_MANY_REQUESTS, Status.SERVICE_UNAVAILABLE}


class HttpError(Exception):
    """What a client gets instead of an answer.

    Attributes:
        status: Of the response; none if the response has begun.
        headers: Of the response.
    """

    def __init__(
        self,
        status: Status,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers: dict[str, str] = {}
        if status in _RETRY:
            self.headers["Retry-After"] = f"{retry_after or _RETRY_AFTER:.0f}"
        elif status >= Status.INTERNAL_SERVER_ERROR or status is Status.CONFLICT:
            self.headers["x-should-retry"] = "false"
        if status is Status.UNAUTHORIZED:
            self.headers["WWW-Authenticate"] = "Bearer"

    def body(self) -> dict[str, Any]:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": str(self),
                "type": _TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> HttpError:
    return HttpError(Status.BAD_REQUEST, message, code=code, param=param)


def bug(error: Exception) -> HttpError:
    """What nobody has foreseen."""
    message = f"a bug of the gateway: {type(error).__name__}: {error}"
    return HttpError(Status.INTERNAL_SERVER_ERROR, message, code="internal")


def http_error(error: RollwireError) -> HttpError:
    """How an error of the fleet is answered."""
    message, last = str(error), _last(error)
    if last.reason == "CONTEXT_EXCEEDED":
        message += " (the maximum context length)"  # words that clients look for
    return HttpError(
        _status(last),
        message,
        code=_CODES.get(last.reason, last.reason.lower()) or _snake_case(type(last).__name__),
        param=next((name.removeprefix("sampling.") for name in last.violations), None),
        retry_after=last.retry_after,
    )


def _snake_case(name: str) -> str:
    return re.sub("(?<!^)([A-Z])", r"_\1", name).lower()


def _last(error: RollwireError) -> RollwireError:
    """The failure that ended a sequence, of one that was given up."""
    causes = error.causes if isinstance(error, RolloutFailedError) else ()
    return causes[-1] if causes else error


def _status(error: RollwireError) -> Status:
    if error.reason in _REASON_STATUSES:
        return _REASON_STATUSES[error.reason]
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    if isinstance(error, NotFiniteError | StepFailedError) or not error.elsewhere:
        return Status.INTERNAL_SERVER_ERROR
    return Status.SERVICE_UNAVAILABLE

"""The exception that carries an error of the API to the caller, and how a call ends with it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NoReturn

from rollwire.reasons import DETAILS_KEY, Reason, encode_status

from rollwire_server.engines.base import NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from rollwire_server.engines.base import EngineError

MESSAGE_BYTES = 1500


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


def from_engine_error(
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


def float_text(value: float) -> str:
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


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """Ends a call with an error."""
    status = encode_status(error.reason, error.message, field=error.field, metadata=error.metadata)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(error.reason.code, error.message, trailing)
    raise AssertionError("abort raises")

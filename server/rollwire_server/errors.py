"""The exception that becomes an error of the API."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NoReturn

from rollwire.reasons import DETAILS_KEY, Reason, encode_status

from rollwire_server.engines.base import NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import grpc

    from rollwire_server.engines.base import EngineError

MAX_MESSAGE_BYTES = 1500  # longer ones do not pass as gRPC metadata, in which errors travel


class ServiceError(Exception):
    """Ends a call or a sequence with an error.

    Args:
        reason: Why.
        message: What happened, what state things are in, what to do.
        field: The field of the request that is wrong.
        metadata: Facts for programs.
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
    """The error for the caller of what an engine raised.

    Args:
        error: What the engine raised.
        state: What state things are in, and what to do.
        no_memory: The reason for a ``NoMemoryError``.
    """
    reason = no_memory if isinstance(error, NoMemoryError) else Reason.ENGINE_FAILED
    return ServiceError(reason, f"{error}; {state}" if state else str(error))


def float_text(value: float) -> str:
    """The shortest decimal that identifies a float32: usually what its sender wrote."""
    single = struct.pack("f", value)
    for digits in range(1, 9):
        text = f"{value:.{digits}g}"
        if struct.pack("f", float(text)) == single:
            return text
    return f"{value:.9g}"


def _cut(message: str) -> str:
    encoded = message.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return message
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + " …"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    status = encode_status(error.reason, error.message, field=error.field, metadata=error.metadata)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(error.reason.code, error.message, trailing)
    raise AssertionError("abort raises")

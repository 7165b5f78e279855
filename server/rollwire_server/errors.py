"""The exception that becomes an error of the API, and tasks whose failure is their result."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import structlog
from rollwire.reasons import DETAILS_KEY, Reason, encode_status

from rollwire_server.engines.base import EngineError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    import grpc

log = structlog.get_logger()

T = TypeVar("T")

MAX_MESSAGE_BYTES = 1500  # longer ones do not pass as gRPC metadata, in which errors travel


class ServiceError(Exception):
    """Ends a call or a sequence with an error.

    Args:
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


def bad_request(field: str, message: str) -> ServiceError:
    return ServiceError(Reason.BAD_REQUEST, message, field=field)


def from_engine_error(
    error: EngineError, state: str = "", *, no_memory: Reason = Reason.NO_MEMORY
) -> ServiceError:
    """The error for the caller; ``state`` says what state things are in, and what to do."""
    reason = no_memory if isinstance(error, NoMemoryError) else Reason.ENGINE_FAILED
    return ServiceError(reason, f"{error}; {state}" if state else str(error))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    status = encode_status(error.reason, error.message, field=error.field, metadata=error.metadata)
    trailing = ((DETAILS_KEY, status.SerializeToString()),)
    await context.abort(error.reason.code, error.message, trailing)
    raise AssertionError("abort raises")


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


# Work that continues when its caller goes away.


def spawn(
    tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T], name: str
) -> asyncio.Task[T | ServiceError]:
    """Starts work whose failure does not end its task group; ``result_of`` waits for it."""
    return tasks.create_task(_with_error_as_value(work), name=name)


async def result_of(task: asyncio.Task[T | ServiceError]) -> T:
    """Waits for a spawned task, which continues when its waiter is cancelled."""
    result = await asyncio.shield(task)
    if isinstance(result, ServiceError):
        try:
            raise result
        finally:
            del result  # break the cycle: an error's traceback refers to this frame
    return result


async def _with_error_as_value(work: Coroutine[Any, Any, T]) -> T | ServiceError:
    try:
        return await work
    except ServiceError as error:
        return _without_tracebacks(error)
    except EngineError as error:
        return from_engine_error(error)
    except Exception as error:
        log.exception("a bug: something under way failed")
        return ServiceError(Reason.INTERNAL, f"{type(error).__name__}: {error}")


def _without_tracebacks(error: ServiceError) -> ServiceError:
    # The frames of a traceback may keep the memory of an update alive.
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error

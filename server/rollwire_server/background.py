"""Work that goes on when its caller goes away, and whose failure does not end its task group."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from rollwire.reasons import Reason

from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, from_engine_error

if TYPE_CHECKING:
    from collections.abc import Coroutine

log = structlog.get_logger()

T = TypeVar("T")


def spawn(
    tasks: asyncio.TaskGroup, work: Coroutine[Any, Any, T], name: str
) -> asyncio.Task[T | ServiceError]:
    """Starts work as a task; ``result_of`` waits for it."""
    return tasks.create_task(_with_error_as_value(work), name=name)


async def result_of(task: asyncio.Task[T | ServiceError]) -> T:
    """Waits for a spawned task, which goes on when its waiter is cancelled."""
    result = await asyncio.shield(task)
    if isinstance(result, ServiceError):
        try:
            raise result
        finally:
            del result  # break the cycle: an error's traceback refers to this frame
    return result


async def _with_error_as_value(work: Coroutine[Any, Any, T]) -> T | ServiceError:
    # A task that raises would cancel all other tasks of its group.
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

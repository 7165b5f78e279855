"""Work that goes on when its caller goes away, and whose refusals fail nobody else."""

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


async def outcome(work: Coroutine[Any, Any, T]) -> T | ServiceError:
    """A task's result or refusal as a value: neither a refusal nor a bug ends the task's group."""
    try:
        return await work
    except ServiceError as error:
        return _without_frames(error)
    except EngineError as error:
        return from_engine_error(error)
    except Exception as error:
        log.exception("a bug: something under way failed")
        return ServiceError(Reason.INTERNAL, f"{type(error).__name__}: {error}")


async def result(task: asyncio.Task[T | ServiceError]) -> T:
    """Waits for a task that goes on when its waiter goes away."""
    told = await asyncio.shield(task)
    if isinstance(told, ServiceError):
        try:
            raise told
        finally:
            del told  # an error that its own frames know is not freed with its last user
    return told


def _without_frames(error: ServiceError) -> ServiceError:
    """What an error's frames hold, be it the memory of an update, is not kept with it."""
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error

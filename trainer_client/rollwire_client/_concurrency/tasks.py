"""Tasks that end with whoever owns them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

T = TypeVar("T")


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs, and waits for it; what it raises does not matter any more.

    Each task is cancelled once: it may need a while to clean up, undisturbed. When the caller is
    cancelled meanwhile, that is raised once all have ended.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await _wait(tasks)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs what has to be done, in bounded time; a cancellation is raised only after it."""
    task = asyncio.create_task(work)
    await _wait([task])
    return task.result()


async def _wait(tasks: list[asyncio.Task[Any]]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved
    if cancelled is not None:
        raise cancelled

"""Tasks that end with whoever owns them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs, and waits for it; what it raises is not of interest any more."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

"""Waiting for what has no event."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

SECONDS = 120


async def until(condition: Callable[[], bool]) -> None:
    """Lets the event loop go on until it is so."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)

"""What the tests of the trainer's library share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio
from client.scripted import ScriptedServer, scripted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest_asyncio.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as servers:
        yield servers[0]


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[list[ScriptedServer]]:
    async with scripted(2) as servers:
        yield servers

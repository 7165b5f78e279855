"""Server-sent events, read as they come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import httpx


async def data_of(response: httpx.Response) -> AsyncIterator[Any]:
    """The JSON of each event; "[DONE]" as text."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)

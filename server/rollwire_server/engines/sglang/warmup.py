"""First sequences, before the server is ready: what they compile takes SGLang minutes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.sglang.messages import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_server.engines.sglang.bridge import Bridge
    from rollwire_server.engines.sglang.messages import Chunk

SECONDS = 1200.0
PROMPT_TOKENS = 128
NEW_TOKENS = 8
AT_ONCE = 24
"""Kernels are compiled apart for one sequence, for few, and for many."""


class WarmUp:
    """The receiver of a bridge until that is done."""

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._event = asyncio.Event()
        self._error: EngineError | None = None

    async def run(self, bridge: Bridge, *, context_length: int, at_once: int) -> None:
        """Samples one sequence, then some side by side; raises EngineError if SGLang dies of it."""
        tokens = min(PROMPT_TOKENS, context_length - NEW_TOKENS)
        rounds = [1, min(AT_ONCE, at_once)] if tokens > 0 else []
        try:
            async with asyncio.timeout(SECONDS):
                for number, count in enumerate(rounds):
                    for i in range(count):
                        rid = f"warm-{number:02}-{i:08}"  # as long as all others
                        await self._send(bridge, rid, max(1, tokens - i))
                    await self._ended()
        except TimeoutError:
            raise EngineError(f"SGLang's first sequences took more than {SECONDS:g} s") from None

    async def _send(self, bridge: Bridge, rid: str, tokens: int) -> None:
        self._left.add(rid)
        request = Request(
            rid=rid,
            input_ids=[0] * tokens,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            top_p=0.9 if rid.endswith("1") else 1.0,
            top_k=0,
            min_p=0.0,
            seed=1,
            stop_token_ids=frozenset(),
            cache_key="warm-up",
            top_logprobs=0,
            prompt_logprobs=False,
            routed_experts=False,
        )
        await bridge.send(request)

    async def _ended(self) -> None:
        while self._left:
            if self._error is not None:
                raise self._error
            self._event.clear()
            await self._event.wait()

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """See ``Receiver``."""
        self._left -= {chunk.rid for chunk in chunks if chunk.ended is not None}
        self._event.set()

    def on_death(self, error: EngineError) -> None:
        """See ``Receiver``."""
        self._error = error
        self._event.set()

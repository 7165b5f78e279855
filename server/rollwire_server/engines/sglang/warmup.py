"""Samples some sequences before the server is ready, since SGLang compiles kernels for minutes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.sglang.messages import SchedulerRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_server.engines.sglang.bridge import Bridge
    from rollwire_server.engines.sglang.messages import SchedulerOutput

SECONDS = 1200.0
PROMPT_TOKENS = 128
NEW_TOKENS = 8
AT_ONCE = 24
"""SGLang compiles kernels separately for one sequence, for few, and for many."""


class WarmUp:
    """Receives the outputs of the bridge until the warm-up is over."""

    def __init__(self) -> None:
        self._left: set[str] = set()
        self._event = asyncio.Event()
        self._error: EngineError | None = None

    async def run(self, bridge: Bridge, *, context_length: int, at_once: int) -> None:
        """Samples one sequence, then some at once; raises EngineError if SGLang dies."""
        tokens = min(PROMPT_TOKENS, context_length - NEW_TOKENS)
        rounds = [1, min(AT_ONCE, at_once)] if tokens > 0 else []
        try:
            async with asyncio.timeout(SECONDS):
                for number, count in enumerate(rounds):
                    for i in range(count):
                        rid = f"warm-{number:02}-{i:08}"  # of the same length as all ids
                        await self._send(bridge, rid, max(1, tokens - i))
                    await self._ended()
        except TimeoutError:
            raise EngineError(f"SGLang's first sequences took more than {SECONDS:g} s") from None

    async def _send(self, bridge: Bridge, rid: str, tokens: int) -> None:
        self._left.add(rid)
        request = SchedulerRequest(
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

    def on_outputs(self, outputs: Sequence[SchedulerOutput]) -> None:
        self._left -= {output.rid for output in outputs if output.ended is not None}
        self._event.set()

    def on_death(self, error: EngineError) -> None:
        self._error = error
        self._event.set()

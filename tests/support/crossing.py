"""Sequences that are under way on a server whatever happens, and what each of their tokens says."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollwire_client import RolloutClient, Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from rollwire_client import Chunk, WeightTag

PROMPT = (3, 1, 4, 1, 5)
SAMPLING = Sampling(seed=7, ignore_eos=True)  # to the context's end: thousands of tokens
SECONDS = 120


@dataclass
class Sampled:
    """One sequence: its tokens and the weights that sampled each."""

    tokens: list[int] = field(default_factory=list)
    tags: list[WeightTag] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        assert chunk.offset == len(self.tokens), "a gap or an overlap"
        assert len(chunk.token_ids) == len(chunk.logprobs)
        if self.tags:
            assert chunk.weights.revision >= self.tags[-1].revision, "back to older weights"
            assert chunk.weights.server_id == self.tags[-1].server_id
        self.tokens += chunk.token_ids
        self.tags += [chunk.weights] * len(chunk.token_ids)

    def under(self, version: int | None) -> list[int]:
        """The tokens before the first of another version."""
        versions = [tag.version for tag in self.tags]
        own = next((i for i, v in enumerate(versions) if v != version), len(versions))
        return self.tokens[:own]


class Crossing:
    """The same seeded sequence on a server, over and over, so that one is always under way.

    Attributes:
        sequences: All of them, the one under way last.
        digests: What each version was that sampled a token, in the order of their first tokens.
    """

    def __init__(self) -> None:
        self.sequences: list[Sampled] = []
        self.digests: dict[int | None, set[int]] = {}
        self._tokens = 0
        self._change = asyncio.Event()

    @property
    def versions(self) -> list[int | None]:
        """Each version that sampled a token, in order."""
        return list(self.digests)

    async def reaches(self, version: int | None) -> None:
        """Returns when it has a token of this version."""
        await self._until(lambda: version in self.digests)

    async def goes_on(self) -> None:
        """Returns when it has a token that was not there before."""
        before = self._tokens
        await self._until(lambda: self._tokens > before)

    async def run(self, address: str) -> None:
        """Until it is cancelled."""
        async with RolloutClient(address) as client:
            while True:
                self.sequences.append(Sampled())
                chunks = client.stream(PROMPT, SAMPLING)
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        self._take(chunk)

    def _take(self, chunk: Chunk) -> None:
        self.sequences[-1].take(chunk)
        if chunk.token_ids:
            self.digests.setdefault(chunk.weights.version, set()).add(chunk.weights.digest)
            self._tokens += len(chunk.token_ids)
            self._change.set()

    async def _until(self, so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not so():
                self._change.clear()
                await self._change.wait()


@contextlib.asynccontextmanager
async def crossing(*addresses: str) -> AsyncIterator[list[Crossing]]:
    """Sequences on each server, of which one has begun; they end with the context."""
    crossings = [Crossing() for _ in addresses]
    tasks = [
        asyncio.create_task(c.run(address)) for c, address in zip(crossings, addresses, strict=True)
    ]
    try:
        for one in crossings:
            await one.goes_on()
        yield crossings
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results


def assert_equal_under(version: int | None, crossings: list[Crossing]) -> None:
    """What was sampled under one version from the start is the same everywhere."""
    runs = [s.under(version) for c in crossings for s in c.sequences]
    longest = max(runs, key=len)
    assert longest
    assert all(run == longest[: len(run)] for run in runs)

"""A fake server whose sequences end when a test says so, and prompts for it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from client.scripted import until
from rollwire_client import Batcher, Fleet, Prompt, Retries, Sampling, Timeouts
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from rollwire_client import DropReason, Part

STOP = 7
SAMPLING = Sampling(stop_token_ids=[STOP])
QUICK = Retries(attempts=1, seconds=5, first_delay=0.001)


class HeldServer(FakeServer):
    """A sequence whose prompt is [number] ends once ``number`` is in ``let_go``; its output is the
    positions of its tokens, after 100, and STOP.
    """

    def __init__(self, let_go: set[int], *, version: int | None = None) -> None:
        super().__init__(self._choose, version=version, tokens_per_second=500)
        self.let_go = let_go

    def _choose(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        return STOP if prompt[0] in self.let_go and output else 100 + len(output)


def prompts(first: int = 1) -> Iterator[Prompt]:
    """Numbers, for ever."""
    number = first
    while True:
        yield Prompt(str(number), [number], info={"answer": number})
        number += 1


def fleet_of(*servers: FakeServer, **options: object) -> Fleet:
    options.setdefault("timeouts", Timeouts(close=0.2))
    return Fleet([server.address for server in servers], **options)


def batcher_of(fleet: Fleet, **options: object) -> Batcher:
    options = {"seed": 1, "group_size": 2, "sampling": SAMPLING, **options}
    return Batcher(fleet, **options)


@contextlib.asynccontextmanager
async def held(
    *let_go: int, version: int | None = None, **options: object
) -> AsyncIterator[tuple[HeldServer, Batcher]]:
    async with (
        HeldServer(set(let_go), version=version) as server,
        fleet_of(server) as fleet,
        batcher_of(fleet, **options) as batcher,
    ):
        yield server, batcher


def ids(part: Part) -> list[str]:
    return [group.prompt.id for group in part.groups]


def fates(part: Part) -> list[tuple[str, DropReason | None]]:
    return [(group.prompt.id, group.dropped) for group in part.groups]


async def begun(batcher: Batcher, *names: str) -> None:
    """Returns once each sample of the groups of these prompts has a token."""

    def so() -> bool:
        groups = {group.prompt.id: group for group in batcher._buffer.groups.values()}
        return all(
            name in groups and all(s.trajectory.token_ids for s in groups[name].snapshot().samples)
            for name in names
        )

    await until(so)

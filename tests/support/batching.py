"""A trainer that collects batches from synthetic servers; and one that waits to be killed.

python -m support.batching BUFFER ADDRESS…
"""

from __future__ import annotations

import asyncio
import sys
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollwire_client import Batcher, Carry, Fleet, Prompt, Publisher, Sampling

from support.synthetic import PROMPT, VOCABULARY, start_synthetic, until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import Batch, Group, Trajectory

    from support.servers import ServerProcess, StartServer

SEED, GROUP, LAG = 7, 4, 2
RATE = 200  # tokens a second of each sequence
# A token in 64 ends a sequence: most are short, and some are very long.
SAMPLING = Sampling(max_new_tokens=600, stop_token_ids=range(VOCABULARY // 64))
# Many minutes: it is under way whatever happens to servers, trainers and the machine.
ENDLESS = Sampling(max_new_tokens=200_000)
CONTEXT = 250_000


def start_one(start: StartServer, *flags: str) -> ServerProcess:
    """A server that has room for what is endless."""
    return start_synthetic(start, RATE, "--context-length", str(CONTEXT), *flags)


def prompts(first: int = 0) -> Iterator[Prompt]:
    number = first
    while True:
        yield Prompt(str(number), PROMPT)
        number += 1


def endless(name: str) -> Prompt:
    """One whose samples do not end while a test lasts."""
    return Prompt(name, PROMPT, sampling=ENDLESS)


def under_way(batcher: Batcher, name: str) -> Group:
    """What there is by now of the group of a prompt, which was not handed out or dropped."""
    (group,) = (g for g in batcher._buffer.groups.values() if g.prompt.id == name)
    return group.snapshot()


async def begun(batcher: Batcher, name: str) -> Group:
    """Returns once each sample of a group has a token."""
    await until(lambda: all(s.trajectory.token_ids for s in under_way(batcher, name).samples))
    return under_way(batcher, name)


def length(prompt: Prompt, trajectory: Trajectory) -> float:
    return float(len(trajectory.token_ids))


def batcher_of(fleet: Fleet) -> Batcher:
    return Batcher(
        fleet, seed=SEED, group_size=GROUP, sampling=SAMPLING, reward=length, max_lag=LAG
    )


async def trained(
    fleet: Fleet, batcher: Batcher, source: Iterator[Prompt], versions: range
) -> list[Batch]:
    """The batches of a trainer that publishes a policy for each."""
    publisher, batches = Publisher(fleet), []
    for version in versions:
        weights = {"weight": torch.full((1024,), float(version))}
        await (await publisher.publish(version, weights)).committed
        batches.append(await batcher.collect(source, 8, over_sample=1.5, tail=Carry(), prefetch=4))
    return batches


async def saves_and_waits(buffer: Path, addresses: list[str]) -> None:
    """Says which groups its batch has, once the others are saved, an endless one among them."""
    async with Fleet(addresses) as fleet, batcher_of(fleet) as batcher:
        source = chain(islice(prompts(), 15), [endless("endless")])
        (batch,) = await trained(fleet, batcher, source, range(1, 2))
        await begun(batcher, "endless")
        batcher.save(buffer)
        print(*(group.prompt.id for group in batch.groups), flush=True)  # noqa: T201
        await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(saves_and_waits(Path(sys.argv[1]), sys.argv[2:]))

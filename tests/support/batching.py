"""A trainer that collects batches from synthetic servers; and one that waits to be killed.

python -m support.batching BUFFER ADDRESS…
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollwire_client import Batcher, Carry, Fleet, Prompt, Publisher, Sampling

from support.synthetic import VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import Batch, Trajectory

SEED, GROUP, LAG = 7, 4, 2
RATE = 200  # tokens a second of each sequence
# A token in 64 ends a sequence: most are short, and some are very long.
SAMPLING = Sampling(max_new_tokens=600, stop_token_ids=range(VOCABULARY // 64))


def prompts(first: int = 0) -> Iterator[Prompt]:
    number = first
    while True:
        yield Prompt(str(number), [3, 1, 4])
        number += 1


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
    """Says which groups its batch has, once the others are saved."""
    async with Fleet(addresses) as fleet, batcher_of(fleet) as batcher:
        (batch,) = await trained(fleet, batcher, prompts(), range(1, 2))
        await asyncio.sleep(0.3)  # what is carried goes on meanwhile
        batcher.save(buffer)
        print(*(group.prompt.id for group in batch.groups), flush=True)  # noqa: T201
        await asyncio.sleep(1000)


if __name__ == "__main__":
    asyncio.run(saves_and_waits(Path(sys.argv[1]), sys.argv[2:]))

"""What waiting for the longest sequences costs, and what not waiting does to a batch.

    python benchmarks/tail.py --batches 12

Two servers with the synthetic engine sample groups whose lengths have a long tail: a prompt's mean
length is drawn from a log-normal distribution, and its samples end with each token by chance. Each
way of collecting gets the same prompts with the same seeds, so that it meets the same sequences.

Batch time is told against waiting for all. Bias is how much shorter the sequences that were handed
out are than those of the same prompts as a whole; what was carried is part of later batches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common import machine, print_table, servers
from rollwire_client import Batcher, Carry, Drop, Fleet, Prompt, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import Batch, Tail

VOCABULARY = 512
GROUP = 8
MEDIAN_LENGTH, SIGMA, LONGEST = 80, 0.9, 1000  # tokens


@dataclass(frozen=True, slots=True)
class Way:
    """How batches are collected."""

    name: str
    over_sample: float = 1.0
    tail: Tail = Drop()  # noqa: RUF009 - it cannot change
    prefetch: int = 0


WAYS = (
    Way("wait for all"),
    Way("drop", 1.25),
    Way("drop, patience 1.5", 1.25, Drop(patience=1.5)),
    Way("carry", 1.25, Carry()),
    Way("carry, begin ahead", 1.25, Carry(), prefetch=8),
)


def prompts() -> Iterator[Prompt]:
    """The same for each way."""
    drawn, number = random.Random(0), 0  # noqa: S311 - no secret
    while True:
        mean = MEDIAN_LENGTH * drawn.lognormvariate(0, SIGMA)
        ends = range(max(round(VOCABULARY / mean), 1))
        sampling = Sampling(max_new_tokens=LONGEST, stop_token_ids=ends)
        yield Prompt(str(number), [1, 2, 3], sampling=sampling)
        number += 1


async def collected(addresses: list[str], way: Way, target: int, batches: int) -> list[Batch]:
    """The batches, one after the other."""
    async with Fleet(addresses) as fleet, Batcher(fleet, seed=0, group_size=GROUP) as batcher:
        source = prompts()
        return [
            await batcher.collect(
                source, target, over_sample=way.over_sample, tail=way.tail, prefetch=way.prefetch
            )
            for _ in range(batches)
        ]


async def true_length(addresses: list[str], count: int) -> float:
    """The mean length of the first prompts' sequences, all of them."""
    async with Fleet(addresses) as fleet, Batcher(fleet, seed=0, group_size=GROUP) as batcher:
        batch = await batcher.collect(prompts(), count)
    return statistics.fmean(batch.finished.lengths)


def row(way: Way, batches: list[Batch], floor: float, true: float) -> list[str]:
    """Of the table."""
    seconds = statistics.fmean(batch.seconds for batch in batches)
    lengths = [length for batch in batches for length in batch.finished.lengths]
    dropped = sum(sum(batch.dropped.lengths) for batch in batches)
    return [
        way.name,
        f"{seconds:.2f} s",
        f"{seconds / floor:.2f}x",
        f"{statistics.fmean(lengths):.0f}",
        f"{statistics.fmean(lengths) / true - 1:+.0%}",
        f"{dropped / (dropped + sum(lengths)):.0%}",
    ]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--target", type=int, default=16, help="groups of a batch")
    parser.add_argument("--rate", type=float, default=400, help="tokens a second of a sequence")
    options = parser.parse_args()
    flags = ["--engine", "synthetic", "--model", "none", "--max-running", "1024"]
    flags += ["--engine-arg", f"tokens-per-second={options.rate}"]
    rows = [["collecting", "a batch", "time", "mean length", "bias", "tokens dropped"]]
    floor = 0.0
    with tempfile.TemporaryDirectory() as folder, servers([flags] * 2, Path(folder)) as addresses:
        true = asyncio.run(true_length(addresses, options.target * options.batches))
        for way in WAYS:
            batches = asyncio.run(collected(addresses, way, options.target, options.batches))
            floor = floor or statistics.fmean(batch.seconds for batch in batches)
            rows.append(row(way, batches, floor, true))
    print(
        f"{options.batches} batches of {options.target} groups of {GROUP}, {options.rate:g} tokens "
        f"a second of each sequence, {true:.0f} tokens on average; {machine('cpu')}"
    )
    print_table(rows)


if __name__ == "__main__":
    main()

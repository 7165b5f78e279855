"""What it takes to sample many prompts: one after the other, or at once.

    python benchmarks/generate_many.py --prompts 64 --tokens 64

Two servers with the built-in engine sample the same prompts with the same seeds: by one
``generate`` after the other, by ``generate_many``, and by ``generate_many`` with a stop string that
never comes, so that each token is detokenized. All must give the same tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from common import machine, print_table, servers
from rollwire_client import Detokenizer, Fleet, Sampling

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client import Trajectory


def text(token_ids: list[int]) -> str:
    """A byte each, as far as that goes."""
    return bytes(token % 256 for token in token_ids).decode("utf-8", "replace")


async def run(addresses: list[str], options: argparse.Namespace) -> None:
    """Measures each way and prints a table."""
    prompts = [[1 + number % 500, 2, 3] for number in range(options.prompts)]
    sampling = Sampling(max_new_tokens=options.tokens, ignore_eos=True, seed=1)
    async with Fleet(addresses) as fleet:

        async def one_by_one() -> list[Trajectory]:
            seeds = (replace(sampling, seed=1 + number) for number in range(len(prompts)))
            return [await fleet.generate(p, s) for p, s in zip(prompts, seeds, strict=True)]

        async def at_once() -> list[Trajectory]:
            return [t for (t,) in await fleet.generate_many(prompts, sampling)]

        async def with_stop_strings() -> list[Trajectory]:
            stop = Detokenizer(text, ["a string that never comes"])
            return [t for (t,) in await fleet.generate_many(prompts, sampling, detokenizer=stop)]

        ways: dict[str, Callable[[], Awaitable[list[Trajectory]]]] = {
            "one after the other": one_by_one,
            "generate_many": at_once,
            "generate_many, stop strings": with_stop_strings,
        }
        await at_once()  # warm
        rows, sampled = [["way", "seconds", "worst", "this process's CPU"]], set()
        for name, way in ways.items():
            seconds, cpu = [], []
            for _ in range(options.runs):
                began, used = time.perf_counter(), time.process_time()
                done = await way()
                seconds.append(time.perf_counter() - began)
                cpu.append(time.process_time() - used)
                sampled.add(tuple(trajectory.token_ids for trajectory in done))
            median = f"{statistics.median(seconds):.2f}"
            rows.append([name, median, f"{max(seconds):.2f}", f"{statistics.median(cpu):.2f}"])
    print(f"{machine('cpu')}: {options.prompts} prompts of {options.tokens} tokens, 2 servers")
    print_table(rows)
    print("the same tokens each time" if len(sampled) == 1 else "THE TOKENS DIFFER")


def main() -> None:
    """Starts the servers and measures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    flags = ["--model", "builtin:tiny"]
    with tempfile.TemporaryDirectory() as folder, servers([flags] * 2, Path(folder)) as addresses:
        asyncio.run(run(addresses, options))


if __name__ == "__main__":
    main()

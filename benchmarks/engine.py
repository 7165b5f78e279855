"""Tokens a second through a rollwire-server, against SGLang alone with the same flags.

    python benchmarks/engine.py --device cuda                     7B shape, bf16
    python benchmarks/engine.py --device cpu --shape tiny --streams 1 16

Everything runs side by side on one device and is asked in turns, so that a machine that changes its
pace changes it for all. SGLang alone returns each sequence whole at its end, or streams it
("streamed"); rollwire streams every token with its log-probability and weights over gRPC. KV caches
are as large as the streams need, so that several models fit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from typing import TYPE_CHECKING

from common import add_shape, checkpoint, machine, parse, print_table, servers
from rollwire_client import RolloutClient, Sampling
from rollwire_server.engines import parse_arguments
from rollwire_server.engines.sglang import SglangConfig
from sglang_alone import alone, answer, arguments

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection
    from pathlib import Path

# Of each: whether rollwire is between, and what SGLang is told beyond --engine-arg.
VARIANTS: dict[str, tuple[bool, list[str]]] = {
    "rollwire": (True, []),
    "alone": (False, []),
    "rollwire-serial": (True, ["disable-overlap-schedule=true"]),
    "alone-serial": (False, ["disable-overlap-schedule=true"]),
    "rollwire-deterministic": (True, ["enable-deterministic-inference=true"]),
    "alone-deterministic": (False, ["enable-deterministic-inference=true"]),
}
SLACK = 64  # KV entries a stream beyond its tokens
PREFIX = "streamed "


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    add_shape(parser)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["rollwire", "alone"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-arg", action="append", default=[], help="for SGLang, all alike")
    options = parse(parser)
    most = max(options.streams)
    kv = most * (options.prompt + options.new_tokens + SLACK)
    options.engine_arg.append(f"max-total-tokens={kv}")
    with checkpoint(options, options.device) as folder, contextlib.ExitStack() as stack:
        through = [name for name in options.variants if VARIANTS[name][0]]
        pipes = {
            name: stack.enter_context(alone(arguments(_config(name, folder, options))))
            for name in options.variants
            if not VARIANTS[name][0]
        }
        addresses = stack.enter_context(
            servers([_flags(name, folder, options) for name in through], folder)
        )
        for pipe in pipes.values():
            answer(pipe)
        rows = asyncio.run(
            measure(dict(zip(through, addresses, strict=True)), pipes, options),
        )
    print(f"{machine(options.device)}, tokens a second, median of {options.repeats}")
    print_table(rows)


def _flags(name: str, folder: Path, options: argparse.Namespace) -> list[str]:
    flags = ["--engine", "sglang", "--model", str(folder), "--device", options.device]
    flags += ["--dtype", options.dtype, "--max-running", str(max(options.streams))]
    flags += ["--staging", "host"]
    return flags + [f"--engine-arg={text}" for text in [*options.engine_arg, *VARIANTS[name][1]]]


def _config(name: str, folder: Path, options: argparse.Namespace) -> SglangConfig:
    return SglangConfig(
        model=str(folder),
        dtype=options.dtype,
        device=options.device,
        max_running_sequences=max(options.streams),
        arguments=parse_arguments([*options.engine_arg, *VARIANTS[name][1]]),
    )


async def measure(
    addresses: dict[str, str], pipes: dict[str, Connection], options: argparse.Namespace
) -> list[list[str]]:
    """A row a number of streams: tokens a second of each, and the first one's share of the rest."""
    generator = random.Random(0)  # noqa: S311
    async with contextlib.AsyncExitStack() as stack:
        run: dict[str, Callable[[list[list[int]]], Awaitable[float]]] = {}
        for name, address in addresses.items():
            client = await stack.enter_async_context(RolloutClient(address))
            run[name] = _through(client, options.new_tokens)
        for name, pipe in pipes.items():
            run[name] = _asking(pipe, options.new_tokens, streamed=False)
            run[PREFIX + name] = _asking(pipe, options.new_tokens, streamed=True)
        first, *others = run
        rows = [["streams", *run, *(f"{first} / {name}" for name in others)]]
        for streams in options.streams:
            rates: dict[str, list[float]] = {name: [] for name in run}
            for turn in range(options.repeats + 1):
                for name, sample in run.items():
                    prompts = [
                        [generator.randrange(options.vocab) for _ in range(options.prompt)]
                        for _ in range(streams)
                    ]
                    seconds = await sample(prompts)
                    if turn:  # the first warms up
                        rates[name].append(streams * options.new_tokens / seconds)
            rate = {name: statistics.median(some) for name, some in rates.items()}
            shares = [f"{rate[first] / rate[name]:.3f}" for name in others]
            rows.append([str(streams), *(f"{rate[name]:.0f}" for name in run), *shares])
            print("  ".join(rows[-1]), flush=True)
    return rows


def _through(client: RolloutClient, tokens: int) -> Callable[[list[list[int]]], Awaitable[float]]:
    async def one(prompt: list[int]) -> int:
        count = 0
        async for chunk in client.stream(prompt, Sampling(max_new_tokens=tokens)):
            count += len(chunk.token_ids)
        return count

    async def sample(prompts: list[list[int]]) -> float:
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(prompt) for prompt in prompts))
        seconds = time.perf_counter() - began
        if sum(counts) != tokens * len(prompts):
            raise SystemExit(f"{sum(counts)} tokens came of {tokens * len(prompts)}")
        return seconds

    return sample


def _asking(
    pipe: Connection, tokens: int, *, streamed: bool
) -> Callable[[list[list[int]]], Awaitable[float]]:
    async def sample(prompts: list[list[int]]) -> float:
        pipe.send(("sample", (prompts, tokens, streamed)))
        return float(await asyncio.to_thread(answer, pipe))

    return sample


if __name__ == "__main__":
    main()

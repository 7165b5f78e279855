"""What a publish takes, and what it costs the sequences under way, through real servers.

    python benchmarks/publish.py --backends nccl ucx --trainer cuda:0 --servers cuda:1
    python benchmarks/publish.py --engine sglang --own-path …      the same on SGLang, and beside it
    python benchmarks/publish.py --shape tiny                      on a CPU, over gloo
    python benchmarks/publish.py --trainer cuda:0 --servers cuda:0 …    one GPU for both

Random weights are published again and again while streams decode, over each backend and under each
KV policy. The floor is a bare broadcast of the same bytes by torch.distributed, in the same run,
before the servers start; ``--own-path`` adds SGLang's own updates of one engine, after they have
ended. Decode lost: seconds of undisturbed decoding that the tokens missing in a window take.
Recomputed: how many tokens' keys and values the server computes again. Where a GPU is shared, NCCL
goes by sockets, and its kernels take the GPU from decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from typing import TYPE_CHECKING

import torch
from arrivals import FIRST_SECONDS, SETTLE_SECONDS, Arrivals
from bare import bare_broadcast, host
from common import add_kv_policies, add_shape, checkpoint, machine, parse, print_table, servers
from rollwire_client import Fleet, Publisher, Sampling, Timeouts

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

HEADER = ["", "seconds", "staged s", "paused ms", "gap ms", "lost ms", "recomputed", "GB/s"]


class Prompts:
    """The same for every measurement, each of its own."""

    def __init__(self, length: int, vocab: int) -> None:
        self._length, self._vocab = length, vocab

    def __call__(self, number: int) -> list[int]:
        """Token ids of one."""
        generator = random.Random(number)  # noqa: S311
        return [generator.randrange(self._vocab) for _ in range(self._length)]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--backends", nargs="+", default=["gloo"])
    add_kv_policies(parser)
    parser.add_argument("--trainer", dest="device", default="cpu", help="the trainer's device")
    parser.add_argument(
        "--servers", nargs="+", default=["cpu"], help="the first device of each server"
    )
    parser.add_argument("--engine", choices=["embedded", "sglang"], default="embedded")
    parser.add_argument("--engine-arg", action="append", default=[], help="for sglang")
    parser.add_argument("--staging", default="auto")
    parser.add_argument("--log-level", default="warning", help="of the servers")
    parser.add_argument("--own-path", action="store_true", help="SGLang's own updates, too")
    parser.add_argument("--streams", type=int, default=64, help="on each server")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=3000)
    parser.add_argument("--bucket-mib", type=int, help="default: the transport's")
    parser.add_argument("--publishes", type=int, default=5, help="over each backend and policy")
    parser.add_argument("--window", type=float, default=2.0, help="seconds before and after")
    options = parse(parser)
    options.prompts = Prompts(options.prompt, options.vocab)
    devices = [options.device, *options.servers]
    with checkpoint(options, options.device) as folder:
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        seconds = bare_broadcast(devices, size)
        rate = f"{seconds:.3f} s, {size / seconds / 1e9:.1f} GB/s"
        print(f"bare broadcast of {size / 1e9:.2f} GB: {rate}")
        commands = [_flags(device, folder, options) for device in options.servers]
        hosts = [host(devices, rank) for rank in range(1, len(devices))]
        with servers(commands, folder, hosts) as at:
            rows, specs = asyncio.run(measure(at, options))
        if options.own_path:
            torch.cuda.empty_cache()  # it takes as much again
            rows += _own_rows(folder, specs, size, options)
    print(
        f"{machine(options.device)}, {options.engine}, {len(at)} servers, {options.streams} "
        f"streams on each after prompts of {options.prompt} tokens"
    )
    print_table([HEADER, *rows])


def _flags(device: str, folder: Path, options: argparse.Namespace) -> list[str]:
    flags = ["--engine", options.engine, "--model", str(folder), "--device", device]
    flags += ["--dtype", options.dtype, "--max-running", str(options.streams)]
    flags += ["--context-length", str(options.prompt + options.new_tokens + 1)]
    flags += ["--staging", options.staging, "--log-level", options.log_level]
    return flags + [f"--engine-arg={text}" for text in options.engine_arg]


async def measure(
    addresses: list[str], options: argparse.Namespace
) -> tuple[list[list[str]], list[tuple[str, str, list[int]]]]:
    """A row a publish and one of their medians but for the first; and what was published."""
    arrivals, rows = Arrivals(), []

    async def decode(fleet: Fleet, prompt: list[int]) -> None:
        sampling = Sampling(max_new_tokens=options.new_tokens)
        while True:
            async with contextlib.aclosing(fleet.stream(prompt, sampling)) as chunks:
                async for chunk in chunks:
                    arrivals.all.append((time.perf_counter(), len(chunk.token_ids)))

    async with Fleet(addresses, timeouts=Timeouts(call=60)) as fleet:
        schema = [spec for spec in await Publisher(fleet).schema() if spec.alias_of is None]
        generator = torch.Generator(options.device).manual_seed(1)
        tensors = {
            spec.name: torch.empty(
                spec.shape, dtype=getattr(torch, spec.dtype), device=options.device
            ).normal_(0, 0.02, generator=generator)
            for spec in schema
        }
        streams = [
            asyncio.create_task(decode(fleet, options.prompts(i)))
            for i in range(options.streams * len(addresses))
        ]
        version = 0
        try:
            async with asyncio.timeout(FIRST_SECONDS):
                while not arrivals.flowing(len(streams)):
                    await asyncio.sleep(0.1)
                    check(streams)
            for backend in options.backends:
                for policy, max_kv_lag in options.policies:
                    publisher = Publisher(
                        fleet,
                        backend=backend,
                        max_kv_lag=max_kv_lag,
                        bucket_bytes=options.bucket_mib and options.bucket_mib << 20,
                    )
                    results = []
                    for _ in range(options.publishes):
                        version += 1
                        results.append(
                            await one_publish(
                                publisher,
                                SETTLE_SECONDS["keep" if max_kv_lag is None else "recompute"],
                                version,
                                tensors,
                                arrivals,
                                options,
                            )
                        )
                        check(streams)
                    rows += _rows(f"{backend} {policy}", results)
                    for row in rows[-len(results) - 1 :]:
                        print("  ".join(row), flush=True)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    return rows, [(spec.name, spec.dtype, list(spec.shape)) for spec in schema]


def check(streams: list[asyncio.Task[None]]) -> None:
    """Raises what ended one of them."""
    for stream in streams:
        if stream.done():
            stream.result()


async def one_publish(
    publisher: Publisher,
    settle: float,
    version: int,
    tensors: dict[str, Tensor],
    arrivals: Arrivals,
    options: argparse.Namespace,
) -> tuple[float, ...]:
    """What ``HEADER`` names, in its units; the slowest server's where servers differ."""
    await asyncio.sleep(options.window)
    began = time.perf_counter()
    report = await (await publisher.publish(version, tensors)).committed
    committed = time.perf_counter()
    if report.failed:
        raise SystemExit(f"a server did not commit: {report.failed[0].error}")
    await asyncio.sleep(settle)
    settled = time.perf_counter()
    await asyncio.sleep(options.window)
    return (
        committed - began,
        max(server.staging_seconds for server in report.servers),
        max(server.paused_seconds for server in report.servers) * 1e3,
        arrivals.longest_gap(began, committed) * 1e3,
        arrivals.lost(began, settled, options.window) * 1e3,
        max(server.kv_tokens_to_recompute for server in report.servers),
        report.bytes / (committed - began) / 1e9,
    )


def _own_rows(
    folder: Path, specs: list[tuple[str, str, list[int]]], size: int, options: argparse.Namespace
) -> list[list[str]]:
    from rollwire_server.engines import parse_arguments
    from rollwire_server.engines.sglang import SglangConfig
    from sglang_alone import arguments
    from sglang_own_path import own_path

    config = SglangConfig(
        model=str(folder),
        dtype=options.dtype,
        device=options.servers[0],
        max_running_sequences=options.streams,
        arguments=parse_arguments(options.engine_arg),
    )
    measured = own_path(arguments(config), specs, len(config.devices), options)
    return [
        [
            name,
            f"{seconds:.3f}",
            "",
            "",
            f"{gap * 1e3:.1f}",
            f"{lost * 1e3:.0f}",
            "",
            f"{size / seconds / 1e9:.1f}",
        ]
        for name, seconds, gap, lost in measured
    ]


def _rows(name: str, results: list[tuple[float, ...]]) -> list[list[str]]:
    named = [(f"{name} {i}", row) for i, row in enumerate(results, start=1)]
    if warm := results[1:]:
        named.append((f"{name} warm", tuple(map(statistics.median, zip(*warm, strict=True)))))
    formats = ("{:.3f}", "{:.3f}", "{:.1f}", "{:.1f}", "{:.0f}", "{:,.0f}", "{:.1f}")
    return [
        [name, *(text.format(value) for text, value in zip(formats, row, strict=True))]
        for name, row in named
    ]


if __name__ == "__main__":
    main()

"""What a publish takes, and what it costs the sequences under way, through real servers.

    python benchmarks/publish.py --backend nccl --trainer cuda:0 --servers cuda:1     7B shape, bf16
    python benchmarks/publish.py --backend gloo --layers 2 --hidden 256 --vocab 512 --dtype float32

Random weights of a Qwen2 shape are published again and again while streams decode. The floor is a
bare broadcast of the same bytes by torch.distributed, in the same run, before the servers start.
Decode lost: seconds of undisturbed decoding that the tokens missing in a window take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from commit import machine, write_checkpoint
from rollwire_client import Fleet, KvPolicy, Publisher, Sampling

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 180
FLOOR_BYTES = 64 << 20


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--trainer", dest="device", default="cpu", help="the trainer's device")
    parser.add_argument("--servers", nargs="+", default=["cpu"], help="a device for each server")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--intermediate", type=int, default=18944)
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--streams", type=int, default=64, help="on each server")
    parser.add_argument("--new-tokens", type=int, default=3000)
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--publishes", type=int, default=5)
    parser.add_argument("--window", type=float, default=2.0, help="seconds around a publish")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), options)
        size = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors"))
        devices = [options.device, *options.servers]
        mp.spawn(floor, (devices, options.backend, size, f"{folder}/store"), len(devices))
        with servers(Path(folder), options) as addresses:
            rows = asyncio.run(measure(addresses, options))
    print(f"{machine(options.device)}, {len(addresses)} servers, {options.streams} streams on each")
    header = ["", "publish s", "staged s", "paused ms", "decode lost ms", "GB/s"]
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    for row in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def floor(rank: int, devices: list[str], backend: str, size: int, store: str) -> None:
    """A bare broadcast, warm, by one process a device."""
    device = torch.device(devices[rank])
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=len(devices)
    )
    piece = torch.empty(min(size, FLOOR_BYTES), dtype=torch.uint8, device=device)
    times = []
    for _ in range(3):
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
        began = time.perf_counter()
        for _ in range(-(-size // piece.numel())):
            dist.broadcast(piece, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    if rank == 0:
        rate = size / min(times) / 1e9
        print(f"bare broadcast of {size / 1e9:.2f} GB: {min(times):.3f} s, {rate:.1f} GB/s")
    dist.destroy_process_group()


@contextlib.contextmanager
def servers(folder: Path, options: argparse.Namespace) -> Iterator[list[str]]:
    """A rollwire-server on each device; gives their addresses."""
    with contextlib.ExitStack() as stack:
        ready = []
        for number, device in enumerate(options.servers):
            ready.append(folder / f"server-{number}.json")
            command = [sys.executable, "-m", "rollwire_server.main", "--model", str(folder)]
            command += ["--listen", "127.0.0.1:0", "--ready-file", str(ready[-1])]
            command += ["--device", device, "--dtype", options.dtype, "--log-level", "warning"]
            process = stack.enter_context(subprocess.Popen(command))
            stack.callback(process.terminate)
        deadline = time.monotonic() + START_SECONDS
        while not all(path.exists() for path in ready):
            if time.monotonic() > deadline:
                raise SystemExit(f"the servers did not start within {START_SECONDS} s")
            time.sleep(0.1)
        yield [json.loads(path.read_text())["listen"] for path in ready]


async def measure(addresses: list[str], options: argparse.Namespace) -> list[list[str]]:
    """A row a publish, and one of their medians but for the first."""
    arrivals: list[tuple[float, int]] = []

    async def decode(fleet: Fleet, prompt: list[int]) -> None:
        sampling = Sampling(max_new_tokens=options.new_tokens)
        while True:
            async with contextlib.aclosing(fleet.stream(prompt, sampling)) as chunks:
                async for chunk in chunks:
                    arrived(len(chunk.token_ids))

    def arrived(count: int) -> None:
        arrivals.append((time.perf_counter(), count))

    def tokens(start: float, end: float) -> int:
        return sum(count for at, count in arrivals if start <= at < end)

    results = []
    async with Fleet(addresses) as fleet:
        publisher = Publisher(
            fleet,
            backend=options.backend,
            kv_policy=KvPolicy.KEEP,
            bucket_bytes=options.bucket_mib << 20,
        )
        generator = torch.Generator(options.device).manual_seed(1)
        tensors = {
            spec.name: torch.empty(
                spec.shape, dtype=getattr(torch, spec.dtype), device=options.device
            ).normal_(0, 0.02, generator=generator)
            for spec in await publisher.schema()
        }
        streams = [
            asyncio.create_task(decode(fleet, [1 + i % 100, 2, 3]))
            for i in range(options.streams * len(addresses))
        ]
        try:
            await asyncio.sleep(options.window)
            for version in range(1, options.publishes + 1):
                await asyncio.sleep(options.window)
                began = time.perf_counter()
                handle = await publisher.publish(version, tensors)
                report = await handle.committed
                taken = time.perf_counter() - began
                await asyncio.sleep(options.window)
                end = time.perf_counter()
                for stream in streams:
                    if stream.done():
                        stream.result()
                rate = tokens(began - options.window, began) / options.window
                lost = (end - began) - tokens(began, end) / rate
                staged = max(server.staging_seconds for server in report.servers)
                paused = max(server.paused_seconds for server in report.servers)
                speed = report.bytes / taken / 1e9
                results.append((taken, staged, paused * 1e3, lost * 1e3, speed))
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.wait(streams)
    named = [(f"publish {i}", row) for i, row in enumerate(results, start=1)]
    if warm := results[1:]:
        named.append(("median, warm", tuple(map(statistics.median, zip(*warm, strict=True)))))
    return [
        [name, f"{row[0]:.3f}", f"{row[1]:.3f}", f"{row[2]:.1f}", f"{row[3]:.0f}", f"{row[4]:.1f}"]
        for name, row in named
    ]


if __name__ == "__main__":
    main()

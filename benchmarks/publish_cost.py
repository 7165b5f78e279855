"""What a publish of a tiny model costs the trainer: CPU time and seconds, by the number of servers.

    python benchmarks/publish_cost.py --servers 1 12 --publishes 30
    python benchmarks/publish_cost.py --servers 12 --profile /tmp/publish.prof

The weights are so small that what is left is the price of the calls and of forming a transport
group. The servers live in another process; the CPU time is this process's, all threads included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from common import ended, machine, print_table
from rollwire_client import Fleet, Publisher

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 300
WARM_UP = 3  # publishes
HEADER = ["servers", "seconds", "CPU ms", "CPU ms a server", "idle CPU ms a s", "threads"]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 12])
    parser.add_argument("--publishes", type=int, default=30)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--delta", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--profile", type=Path, help="of the event loop's thread, for pstats")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [HEADER]
    for count in options.servers:
        with hosted(count, options.model) as addresses:
            rows.append(asyncio.run(measure(addresses, options)))
    print(machine("cpu"))
    print_table(rows)


@contextlib.contextmanager
def hosted(count: int, model: str) -> Iterator[list[str]]:
    """The addresses of so many servers with the embedded engine, in one process."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, str(Path(__file__).parent / "many.py"), str(count), str(ready)]
        process = subprocess.Popen([*command, "--model", model, "--device", "cpu"])
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the servers did not start")
                time.sleep(0.1)
            yield json.loads(ready.read_text())
        finally:
            ended(process)


async def measure(addresses: list[str], options: argparse.Namespace) -> list[str]:
    """A row of the table."""
    started = 0
    start = threading.Thread.start

    def count_start(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        start(thread)

    async with Fleet(addresses, probe_interval=60) as fleet:
        publisher = Publisher(fleet, backend=options.backend, delta=options.delta)
        tensors = {
            spec.name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in await publisher.schema()
            if spec.alias_of is None
        }

        async def publish(version: int) -> float:
            for tensor in tensors.values():
                tensor.view(-1)[version % tensor.numel()] = version
            began = time.perf_counter()
            report = await (await publisher.publish(version, tensors)).committed
            if report.failed:
                raise SystemExit(f"a server did not commit: {report.failed[0].error}")
            return time.perf_counter() - began

        for version in range(1, WARM_UP + 1):
            await publish(version)
        await asyncio.sleep(0.5)
        before = time.process_time()
        await asyncio.sleep(1)
        idle = time.process_time() - before
        profile = cProfile.Profile()
        threading.Thread.start = count_start  # type: ignore[method-assign]
        if options.profile:
            profile.enable()
        seconds, cpu = [], []
        for number in range(options.publishes):
            before = time.process_time()
            seconds.append(await publish(WARM_UP + 1 + number))
            await asyncio.sleep(0.05)  # links close beside what comes next
            cpu.append(time.process_time() - before - 0.05 * idle)
        # On a busy machine everything costs more; the least disturbed quarter says most.
        quartile = statistics.quantiles(cpu, n=4)[0]
        threading.Thread.start = start  # type: ignore[method-assign]
        if options.profile:
            profile.disable()
            profile.dump_stats(options.profile)
    return [
        str(len(addresses)),
        f"{statistics.median(seconds):.3f}",
        f"{quartile * 1e3:.1f}",
        f"{quartile * 1e3 / len(addresses):.2f}",
        f"{idle * 1e3:.1f}",
        f"{started / options.publishes:.1f}",
    ]


if __name__ == "__main__":
    main()

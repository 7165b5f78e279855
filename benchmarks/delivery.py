"""What delivering tokens costs each side, in tokens a CPU-second, with an engine that costs little.

    python benchmarks/delivery.py --streams 256 --tokens 2000

A server with the synthetic engine samples as fast as it can; a client in this process streams all
sequences over one connection and reads every token, its log-probability and its weights. The
engine alone, driven without a server, is the floor: what it takes is taken off the server's side.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from common import machine
from rollwire_client import RolloutClient, Sampling
from rollwire_server.engines.base import SamplingParams, SequenceSpec, Step
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 60
TICK = os.sysconf("SC_CLK_TCK")


class Counter:
    """A Sink that counts tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended: set[int] = set()
        self.changed = asyncio.Event()

    def on_step(self, step: Step) -> None:
        """See ``Sink``."""
        self.tokens += len(step.keys)
        if step.ends:
            self.ended.update(end.key for end in step.ends)
            self.changed.set()

    def on_failure(self, error: BaseException) -> None:
        """See ``Sink``."""
        raise SystemExit(f"the engine died: {error}")


async def engine_alone(streams: int, tokens: int) -> float:
    """CPU seconds a token."""
    sink = Counter()
    config = SyntheticConfig("none", max_running_sequences=streams, tokens_per_second=0)
    engine = SyntheticEngine(config)
    await engine.start("server", sink)
    before = time.process_time()
    for key in range(streams):
        engine.submit(SequenceSpec(key, (1, 2, 3), SamplingParams(tokens, seed=key)))
    while len(sink.ended) < streams:
        sink.changed.clear()
        await sink.changed.wait()
    spent = time.process_time() - before
    await engine.stop()
    return spent / sink.tokens


async def delivered(address: str, pid: int, streams: int, tokens: int) -> tuple[float, float]:
    """CPU seconds a token of the server and of the client."""

    async def read(client: RolloutClient, seed: int) -> int:
        count = 0
        sampling = Sampling(max_new_tokens=tokens, seed=seed)
        async for chunk in client.stream([1, 2, 3], sampling):
            count += len(chunk.token_ids)
        return count

    async with RolloutClient(address) as client:
        await read(client, 0)  # opens the connection
        server, own = cpu_seconds(pid), time.process_time()
        counts = await asyncio.gather(*(read(client, seed) for seed in range(streams)))
        server, own = cpu_seconds(pid) - server, time.process_time() - own
    if (total := sum(counts)) != streams * tokens:
        raise SystemExit(f"{total} tokens came of {streams * tokens}")
    return server / total, own / total


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@contextlib.contextmanager
def server(streams: int) -> Iterator[tuple[str, int]]:
    """The address and the process of a server."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        flags = ["--engine", "synthetic", "--model", "none", "--max-running", str(streams)]
        flags += ["--engine-arg", "tokens-per-second=0"]
        flags += ["--listen", "127.0.0.1:0", "--ready-file", str(ready), "--log-level", "warning"]
        process = subprocess.Popen([sys.executable, "-m", "rollwire_server.main", *flags])
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("the server did not come up")
                time.sleep(0.05)
            yield json.loads(ready.read_text())["listen"], process.pid
        finally:
            process.terminate()
            process.wait(30)


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2000, help="of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = []
    with server(options.streams) as (address, pid):
        for _ in range(options.repeats):
            alone = asyncio.run(engine_alone(options.streams, options.tokens))
            both = asyncio.run(delivered(address, pid, options.streams, options.tokens))
            rows.append((alone, *both))
    alone, served, client = (statistics.median(column) for column in zip(*rows, strict=True))
    load = os.getloadavg()[0]
    print(f"{machine('cpu')}, {os.cpu_count()} cores, load {load:.1f}; {options.streams} streams")
    print(f"engine alone          {1 / alone / 1e3:8.0f} k tokens a CPU-second")
    print(f"server, engine within {1 / served / 1e3:8.0f} k")
    print(f"server, engine off    {1 / max(served - alone, 1e-12) / 1e3:8.0f} k")
    print(f"client                {1 / client / 1e3:8.0f} k")
    print(
        f"client's memory       {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10:8d} MiB"
    )


if __name__ == "__main__":
    main()

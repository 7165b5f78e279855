"""What delivering tokens costs each side, in tokens a CPU-second, with an engine that costs little.

    python benchmarks/delivery.py --streams 256,4096 --tokens 2000,500
    python benchmarks/delivery.py --servers 100 --each 4 --rate 20

A server with the synthetic engine samples as fast as it can, or at a ``--rate``; a client in this
process takes all sequences over one connection, each token with its log-probability and its
weights: as they come (``stream``), or each sequence as a whole (``generate``). The engine alone,
driven without a server, is the floor: what it takes is taken off the server's side. The peer is the
same engine behind server-sent events (``sse.py``): a connection for each sequence, an event for
each of its tokens, and a client that collects them.

With ``--servers`` a fleet of so many servers, in two processes, samples ``--each`` sequences on
each of them at ``--rate``, all taken whole, once for each of ``--intervals``: how long a server
collects tokens before it sends them (0: it sends every step). At last nothing is sampled: what it
costs to know how the servers are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import sse
from common import ended, machine, print_table
from rollwire_client import Fleet, RolloutClient, Sampling
from rollwire_client._rpc.rollout_stream import Stream
from rollwire_server.engines.base import SamplingParams, SequenceSpec, Step
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


async def engine_alone(streams: int, tokens: int, rate: float) -> float:
    """CPU seconds a token."""
    sink = Counter()
    config = SyntheticConfig("none", max_running_sequences=streams, tokens_per_second=rate)
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


async def delivered(address: str, pid: int, streams: int, tokens: int, *, whole: bool) -> Costs:
    """What rollwire takes."""

    async def read(client: RolloutClient, seed: int) -> int:
        count = 0
        sampling = Sampling(max_new_tokens=tokens, seed=seed)
        if whole:
            return len((await client.generate([1, 2, 3], sampling)).token_ids)
        async for chunk in client.stream([1, 2, 3], sampling):
            count += len(chunk.token_ids)
        return count

    async with RolloutClient(address) as client:
        await read(client, 0)  # opens the connection
        with measured(pid, streams * tokens) as costs:
            counts = await asyncio.gather(*(read(client, seed) for seed in range(streams)))
    check(sum(counts), streams * tokens)
    return costs


async def sent_as_events(address: list[object], pid: int, streams: int, tokens: int) -> Costs:
    """What server-sent events take."""
    readings = await sse.connected(address, streams)
    with measured(pid, streams * tokens) as costs:
        count = await sse.read(readings, tokens)
    check(count, streams * tokens)
    return costs


@dataclass
class Costs:
    """CPU seconds a token of the server and of the client, and seconds from start to end."""

    server: float = 0.0
    client: float = 0.0
    seconds: float = 0.0


@contextlib.contextmanager
def measured(pid: int, tokens: int) -> Iterator[Costs]:
    """What a server's process and this one use meanwhile; told at the end."""
    costs = Costs()
    server, own, began = cpu_seconds(pid), time.process_time(), time.monotonic()
    yield costs
    costs.server = (cpu_seconds(pid) - server) / tokens
    costs.client = (time.process_time() - own) / tokens
    costs.seconds = time.monotonic() - began


def check(came: int, expected: int) -> None:
    """Ends the benchmark if a token was lost."""
    if came != expected:
        raise SystemExit(f"{came} tokens came of {expected}")


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


@contextlib.contextmanager
def process(command: list[str], ready: Path) -> Iterator[tuple[Any, int]]:
    """What a server writes into ``ready`` once it is up, and its process."""
    ready.unlink(missing_ok=True)
    started = subprocess.Popen([sys.executable, *command])
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready.exists():
            if started.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not come up")
            time.sleep(0.05)
        yield json.loads(ready.read_text()), started.pid
    finally:
        ended(started)


def rows_of(streams: int, tokens: int, rate: float, repeats: int, folder: Path) -> list[list[str]]:
    """The rows of so many streams."""
    flags = ["--engine", "synthetic", "--model", "none", "--max-running", str(streams)]
    flags += ["--engine-arg", f"tokens-per-second={rate}", "--log-level", "warning"]
    ready = folder / "rollwire.json"
    ours = ["-m", "rollwire_server", *flags, "--listen", "127.0.0.1:0"]
    ours += ["--ready-file", str(ready)]
    peer = [str(Path(__file__).parent / "sse.py"), str(streams), str(rate)]
    peer += [str(folder / "sse.json")]
    figures: dict[str, list[tuple[float, Costs]]] = {"stream": [], "generate": [], "events": []}
    with process(ours, ready) as (told, pid), process(peer, folder / "sse.json") as (there, other):
        for _ in range(repeats):
            alone = asyncio.run(engine_alone(streams, tokens, rate))
            for way, whole in (("stream", False), ("generate", True)):
                got = asyncio.run(delivered(told["listen"], pid, streams, tokens, whole=whole))
                figures[way].append((alone, got))
            got = asyncio.run(sent_as_events(there, other, streams, tokens))
            figures["events"].append((alone, got))
    return [cells(streams, way, figures[way]) for way in figures]


def cells(streams: int, way: str, figures: list[tuple[float, Costs]]) -> list[str]:
    """A row of the table: medians, in thousands of tokens a CPU-second."""

    def thousands(costs: list[float]) -> str:
        cost = statistics.median(costs)
        # On a noisy machine the engine alone can cost more than a server with it.
        return f"{1 / cost / 1e3:.0f} k" if cost > 0 else "noise"

    return [
        f"{streams:,}",
        way,
        thousands([got.client for _, got in figures]),
        thousands([got.server - alone for alone, got in figures]),
        thousands([got.server for _, got in figures]),
        thousands([alone for alone, _ in figures]),
        f"{statistics.median(got.seconds for _, got in figures):.1f}",
    ]


PROCESSES = 2
SETTLE_SECONDS = 3


async def many(addresses: list[str], pids: list[int], options: argparse.Namespace) -> None:
    """Prints what many servers cost, at each interval and idle."""
    rows = [["a fleet of", "messages", "client CPU s", "servers CPU s", "seconds", "client CPU"]]
    tokens = int(options.rate * options.seconds)
    asked = len(addresses) * options.each
    async with Fleet(addresses) as fleet:
        for interval in map(float, options.intervals.split(",")):
            with counted() as messages, spent(pids) as costs:
                rollouts = [
                    fleet.generate(
                        [1, 2, 3],
                        Sampling(max_new_tokens=tokens, seed=seed),
                        delivery_interval=interval,
                    )
                    for seed in range(asked)
                ]
                done = await asyncio.gather(*rollouts)
            check(sum(len(rollout.token_ids) for rollout in done), asked * tokens)
            how = f"told every {interval * 1e3:g} ms" if interval else "told every step"
            rows.append([how, f"{messages[0]:,}", *figures(costs)])
        await asyncio.sleep(SETTLE_SECONDS)
        with spent(pids) as costs:
            await asyncio.sleep(options.seconds)
        rows.append(["idle", "0", *figures(costs)])
    print(
        f"{len(addresses)} servers, {asked} sequences of {tokens} tokens, {options.rate:g} a second"
    )
    print_table(rows)


@contextlib.contextmanager
def spent(pids: list[int]) -> Iterator[Costs]:
    """CPU seconds that processes and this one use meanwhile; told at the end."""
    costs = Costs()
    before, own, began = [cpu_seconds(pid) for pid in pids], time.process_time(), time.monotonic()
    yield costs
    costs.server = sum(cpu_seconds(pid) for pid in pids) - sum(before)
    costs.client = time.process_time() - own
    costs.seconds = time.monotonic() - began


def figures(costs: Costs) -> list[str]:
    """The last cells of a row."""
    share = f"{costs.client / costs.seconds:.1%}"
    return [f"{costs.client:.2f}", f"{costs.server:.2f}", f"{costs.seconds:.1f}", share]


@contextlib.contextmanager
def counted() -> Iterator[list[int]]:
    """Messages that come meanwhile."""
    count = [0]
    deliver: Callable[[Stream, Any], None] = vars(Stream)["_deliver"]

    def counting(self: Stream, message: Any) -> None:
        count[0] += 1
        deliver(self, message)

    with mock.patch.object(Stream, "_deliver", counting):
        yield count


def fleet_of(options: argparse.Namespace) -> None:
    """Starts many servers, and measures."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses: list[str] = []
        pids = []
        for number in range(PROCESSES):
            count = (options.servers + number) // PROCESSES
            ready = Path(folder) / f"{number}.json"
            hosts = [str(Path(__file__).parent / "many.py"), str(count), str(ready)]
            hosts += ["--engine", "synthetic", "--model", "none"]
            hosts += ["--engine-arg", f"tokens-per-second={options.rate}"]
            told, pid = stack.enter_context(process(hosts, ready))
            addresses += told
            pids.append(pid)
        asyncio.run(many(addresses, pids, options))


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="256,4096", help="at once; several with commas")
    parser.add_argument("--tokens", default="2000,500", help="of each stream, in the same order")
    parser.add_argument("--rate", type=float, default=0, help="tokens a second of each stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--servers", type=int, default=0, help="a fleet of so many, in place of it")
    parser.add_argument("--each", type=int, default=4, help="sequences of each of those")
    parser.add_argument("--seconds", type=float, default=10, help="that each of them takes")
    parser.add_argument("--intervals", default="0,0.1,0.25,1", help="seconds, with commas")
    options = parser.parse_args()
    if options.servers:
        if not options.rate:
            parser.error("--servers need a --rate")
        print(f"{machine('cpu')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        fleet_of(options)
        return
    streams, tokens = ([int(n) for n in o.split(",")] for o in (options.streams, options.tokens))
    if len(streams) != len(tokens):
        parser.error("--streams and --tokens name as many numbers each")
    rows = [["streams", "as", "client", "server", "with engine", "engine", "seconds"]]
    with tempfile.TemporaryDirectory() as folder:
        for width, length in zip(streams, tokens, strict=True):
            rows += rows_of(width, length, options.rate, options.repeats, Path(folder))
    load = os.getloadavg()[0]
    print(f"{machine('cpu')}, {os.cpu_count()} cores, load {load:.1f}; tokens a CPU-second")
    print_table(rows)


if __name__ == "__main__":
    main()

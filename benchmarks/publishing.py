"""What benchmarks of publishes share: real servers that decode, and publishes to them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from arrivals import FIRST_SECONDS, Arrivals
from bare import bare_broadcast, host
from common import machine, servers
from rollwire_client import Fleet, Publisher, Sampling, Timeouts

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from rollwire_client import PublishReport
    from sglang_own_path import Row, Spec
    from torch import Tensor


CHANGED_SECONDS = 0.5  # from a change of the weights until decoding is undisturbed
_FLIPPED_ELEMENTS = 1 << 26  # at a time


class Prompts:
    """The same for every measurement, each of its own."""

    def __init__(self, length: int, vocab: int) -> None:
        self._length, self._vocab = length, vocab

    def __call__(self, number: int) -> list[int]:
        """Token ids of one."""
        generator = random.Random(number)  # noqa: S311
        return [generator.randrange(self._vocab) for _ in range(self._length)]


def add_serving(parser: argparse.ArgumentParser) -> None:
    """What ``serving`` and ``decoding`` go by; ``add_shape`` adds the rest."""
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
    parser.add_argument("--publishes", type=int, default=5, help="of each kind")
    parser.add_argument("--window", type=float, default=2.0, help="seconds before and after")


@dataclass(frozen=True, slots=True)
class Measured:
    """A publish, and what it cost the sequences under way, in seconds."""

    report: PublishReport
    seconds: float
    longest_gap: float
    lost: float

    @property
    def staged(self) -> float:
        """The slowest server's, as all that follow."""
        return max(server.staging_seconds for server in self.report.servers)

    @property
    def applied(self) -> float:
        return max(server.apply_seconds for server in self.report.servers)

    @property
    def paused(self) -> float:
        return max(server.paused_seconds for server in self.report.servers)

    @property
    def recomputed(self) -> int:
        """Tokens whose keys and values are computed again."""
        return max(server.kv_tokens_to_recompute for server in self.report.servers)


class Decoding:
    """Servers with streams under way, and the weights that are published to them."""

    def __init__(self, fleet: Fleet, options: argparse.Namespace) -> None:
        self.fleet = fleet
        self.tensors: dict[str, Tensor] = {}
        self._arrivals = Arrivals()
        self._streams: list[asyncio.Task[None]] = []
        self._options = options
        self._generator = torch.Generator(options.device).manual_seed(1)
        self._version = 0

    @property
    def specs(self) -> list[Spec]:
        """Of the tensors."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in self.tensors.items()
        ]

    async def start(self) -> None:
        """Makes random weights, and waits until all streams decode."""
        options = self._options
        for spec in await Publisher(self.fleet).schema():
            if spec.alias_of is None:
                dtype = getattr(torch, spec.dtype)
                tensor = torch.empty(spec.shape, dtype=dtype, device=options.device)
                self.tensors[spec.name] = tensor.normal_(0, 0.02, generator=self._generator)
        self._streams = [
            asyncio.create_task(self._decode(options.prompts(number)))
            for number in range(options.streams * len(options.servers))
        ]
        async with asyncio.timeout(FIRST_SECONDS):
            while not self._arrivals.flowing(len(self._streams)):
                await asyncio.sleep(0.1)
                self._check()

    async def change(self, share: float) -> None:
        """Changes this share of the elements of each tensor, as an optimizer would in place."""
        for tensor in self.tensors.values():
            flip_bits(tensor, share, self._generator)
        if torch.device(self._options.device).type == "cuda":
            torch.cuda.synchronize(self._options.device)
        await asyncio.sleep(CHANGED_SECONDS)

    async def publish(self, publisher: Publisher, settle: float) -> Measured:
        """Publishes the tensors. Decoding is as it was ``settle`` seconds after the commit."""
        window = self._options.window
        self._version += 1
        await asyncio.sleep(window)
        began = time.perf_counter()
        report = await (await publisher.publish(self._version, self.tensors)).committed
        committed = time.perf_counter()
        if report.failed:
            raise SystemExit(f"a server did not commit: {report.failed[0].error}")
        await asyncio.sleep(settle)
        settled = time.perf_counter()
        await asyncio.sleep(window)
        self._check()
        gap = self._arrivals.longest_gap(began, committed)
        return Measured(report, committed - began, gap, self._arrivals.lost(began, settled, window))

    async def close(self) -> None:
        """Ends the streams."""
        for stream in self._streams:
            stream.cancel()
        if self._streams:
            await asyncio.wait(self._streams)

    async def _decode(self, prompt: list[int]) -> None:
        sampling = Sampling(max_new_tokens=self._options.new_tokens)
        while True:
            async with contextlib.aclosing(self.fleet.stream(prompt, sampling)) as chunks:
                async for chunk in chunks:
                    self._arrivals.all.append((time.perf_counter(), len(chunk.token_ids)))

    def _check(self) -> None:
        """Raises what ended a stream."""
        for stream in self._streams:
            if stream.done():
                stream.result()


def flip_bits(tensor: Tensor, share: float, generator: torch.Generator) -> None:
    """Flips the lowest bit of this share of the elements, of two or four bytes, drawn at random."""
    bits = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).flatten()
    for part in torch.split(bits, _FLIPPED_ELEMENTS):
        drawn = torch.empty_like(part).random_(0, 10_000, generator=generator)
        part.bitwise_xor_(drawn.lt_(round(share * 10_000)))


@contextlib.asynccontextmanager
async def decoding(addresses: list[str], options: argparse.Namespace) -> AsyncIterator[Decoding]:
    """A fleet of the servers, with all streams under way."""
    async with Fleet(addresses, timeouts=Timeouts(call=60)) as fleet:
        running = Decoding(fleet, options)
        try:
            await running.start()
            yield running
        finally:
            await running.close()


@contextlib.contextmanager
def serving(folder: Path, options: argparse.Namespace) -> Iterator[list[str]]:
    """The addresses of the servers; prints the floor before they start."""
    devices = [options.device, *options.servers]
    size = checkpoint_bytes(folder)
    seconds = bare_broadcast(devices, size)
    rate = f"{seconds:.3f} s, {size / seconds / 1e9:.1f} GB/s"
    print(f"bare broadcast of {size / 1e9:.2f} GB: {rate}", flush=True)
    commands = [_flags(device, folder, options) for device in options.servers]
    hosts = [host(devices, rank) for rank in range(1, len(devices))]
    with servers(commands, folder, hosts) as addresses:
        yield addresses


def checkpoint_bytes(folder: Path) -> int:
    """Of its weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def own_updates(folder: Path, specs: list[Spec], options: argparse.Namespace) -> list[Row]:
    """SGLang's own, of one engine, under the KV policies of ``options.policies``."""
    from rollwire_server.engines import parse_arguments
    from rollwire_server.engines.sglang import SglangConfig
    from sglang_alone import arguments
    from sglang_own_path import own_path

    gc.collect()
    torch.cuda.empty_cache()  # it takes as much again
    config = SglangConfig(
        model=str(folder),
        dtype=options.dtype,
        device=options.servers[0],
        max_running_sequences=options.streams,
        arguments=parse_arguments(options.engine_arg),
    )
    return own_path(arguments(config), specs, len(config.devices), options)


def setting(options: argparse.Namespace) -> str:
    """What a table is of."""
    return (
        f"{machine(options.device)}, {options.engine}, {len(options.servers)} servers, "
        f"{options.streams} streams on each after prompts of {options.prompt} tokens"
    )


def _flags(device: str, folder: Path, options: argparse.Namespace) -> list[str]:
    flags = ["--engine", options.engine, "--model", str(folder), "--device", device]
    flags += ["--dtype", options.dtype, "--max-running", str(options.streams)]
    flags += ["--context-length", str(options.prompt + options.new_tokens + 1)]
    flags += ["--staging", options.staging, "--log-level", options.log_level]
    return flags + [f"--engine-arg={text}" for text in options.engine_arg]

"""What a commit costs the sequences under way, on the embedded engine.

    python benchmarks/commit.py --device cuda                      7B shape, bf16, 64 streams
    python benchmarks/commit.py --shape tiny                       on a CPU
    python benchmarks/commit.py --shape tiny --every 1.3 --streams 8 --prompt 1500

Random weights of a Qwen2 shape are written as a checkpoint, loaded, and committed again and again
while streams decode. Printed for each KV policy: how long sampling was held, what putting the
weights in place took of that, the longest gap between two steps, and decode lost (seconds of
undisturbed decoding that the tokens missing in a window around the commit would have taken). The
floor is one bare copy of as many bytes, in the same run; beside it, two ways to copy all tensors.

With ``--every`` it prints what is left of decoding when weights are committed so often (seconds):
tokens a second without commits, and under each KV policy.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch
from common import add_kv_policies, add_shape, checkpoint, machine, parse, print_table
from rollwire.types import WeightTag
from rollwire_server.engines.base import SamplingParams, SequenceSpec, StagedUpdate, Step
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_server.engines.memory import copy_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Recorder:
    """When steps came, and how many tokens each brought."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []

    def on_step(self, step: Step) -> None:
        """See ``Sink``."""
        self.steps.append((time.perf_counter(), len(step.keys)))

    def on_failure(self, error: BaseException) -> None:
        """See ``Sink``."""
        raise SystemExit(f"the engine died: {error}")

    def tokens(self, start: float, end: float) -> int:
        """Sampled between two moments."""
        return sum(count for at, count in self.steps if start <= at < end)

    def longest_gap(self, start: float, end: float) -> float:
        """Seconds between two steps around a window, at most."""
        times = [at for at, count in self.steps if count and start - 1 <= at <= end + 1]
        return max(b - a for a, b in itertools.pairwise(times))


async def measure(options: argparse.Namespace, folder: Path) -> list[list[str]]:
    """A row a KV policy."""
    recorder = Recorder()
    config = EmbeddedConfig(
        model=str(folder),
        device=options.device,
        dtype=options.dtype,
        max_running_sequences=options.streams,
        context_length=options.prompt + options.new_tokens,
    )
    engine = EmbeddedEngine(config)
    began = time.perf_counter()
    tag = await engine.start("benchmark", recorder)
    print(f"loaded in {time.perf_counter() - began:.1f} s", flush=True)
    try:
        manifest = transport.plan([spec for spec in engine.schema() if spec.alias_of is None])
        staged = await engine.stage(manifest)
        for name, tensor in staged.items():
            tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)
        size = sum(t.nbytes for t in staged.values())
        print(f"{size / 1e9:.2f} GB in {len(staged)} tensors", flush=True)
        update = StagedUpdate(staged, {})  # this engine digests what serves itself
        if options.every:
            return await sustained(engine, recorder, update, tag, options)
        rows = [
            [name, f"{seconds * 1e3:.1f}", f"{seconds * 1e3:.1f}", "", "", ""]
            for name, seconds in bare_copies(staged).items()
        ]
        keys = iter(range(1, 10_000))
        for policy, max_kv_lag in options.policies:
            live = submitted(engine, keys, options)
            await decoding(recorder, options)
            results = []
            for _ in range(options.commits):
                tag = WeightTag((tag.version or 0) + 1, tag.revision + 1, tag.server_id, tag.digest)
                results.append(await one_commit(engine, recorder, update, tag, max_kv_lag, options))
            await engine.abort(live)
            held, applied, gap, lost, rate = (
                statistics.median(r[i] for r in results) for i in range(5)
            )
            rows.append(
                [
                    policy,
                    f"{held * 1e3:.1f}",
                    f"{applied * 1e3:.1f}",
                    f"{gap * 1e3:.1f}",
                    f"{lost * 1e3:.0f}",
                    f"{rate:.0f}",
                ]
            )
    finally:
        await engine.stop()
    return rows


def submitted(
    engine: EmbeddedEngine, keys: Iterator[int], options: argparse.Namespace
) -> list[int]:
    """Starts all streams; the same prompts each time."""
    generator = torch.Generator().manual_seed(1)
    live = []
    for _ in range(options.streams):
        prompt = torch.randint(0, options.vocab, (options.prompt,), generator=generator)
        live.append(next(keys))
        params = SamplingParams(max_new_tokens=options.new_tokens, seed=live[-1])
        engine.submit(SequenceSpec(live[-1], prompt.tolist(), params))
    return live


async def sustained(
    engine: EmbeddedEngine,
    recorder: Recorder,
    update: StagedUpdate,
    tag: WeightTag,
    options: argparse.Namespace,
) -> list[list[str]]:
    """A row without commits, and one a KV policy."""
    keys = iter(range(1, 10_000))
    rows = []
    for policy, max_kv_lag in ((None, None), *options.policies):
        live = submitted(engine, keys, options)
        await decoding(recorder, options)
        began = time.perf_counter()
        recomputed: list[int] = []
        while (now := time.perf_counter()) < began + options.seconds:
            if policy is not None:
                tag = WeightTag((tag.version or 0) + 1, tag.revision + 1, tag.server_id, tag.digest)
                await engine.hold()
                applied = await engine.commit(update, tag, max_kv_lag)
                await engine.release()
                recomputed.append(applied.kv_tokens_to_recompute)
            await asyncio.sleep(now + options.every - time.perf_counter())
        ended = time.perf_counter()
        rate = recorder.tokens(began, ended) / (ended - began)
        again = f"{statistics.mean(recomputed):,.0f}" if recomputed else ""
        rows.append([policy or "no commits", f"{rate:,.0f}", again])
        await engine.abort(live)
    return rows


async def decoding(recorder: Recorder, options: argparse.Namespace) -> None:
    """Returns when every stream decodes, and has done so for a moment."""
    full = 0
    while full < 20:
        seen = len(recorder.steps)
        await asyncio.sleep(0.05)
        full += sum(count == options.streams for _, count in recorder.steps[seen:])


async def one_commit(
    engine: EmbeddedEngine,
    recorder: Recorder,
    update: StagedUpdate,
    tag: WeightTag,
    max_kv_lag: int | None,
    options: argparse.Namespace,
) -> tuple[float, float, float, float, float]:
    """Seconds held, applying, of the longest gap, of decode lost; tokens a second undisturbed."""
    await asyncio.sleep(options.window)
    asked = time.perf_counter()
    await engine.hold()
    held_at = time.perf_counter()
    applied = await engine.commit(update, tag, max_kv_lag)
    await engine.release()
    released = time.perf_counter()
    await asyncio.sleep(options.window)
    await decoding(recorder, options)
    end = time.perf_counter()
    before = recorder.tokens(asked - options.window, asked) / options.window
    lost = (end - asked) - recorder.tokens(asked, end) / before
    gap = recorder.longest_gap(asked, released)
    return released - held_at, applied.apply_ns / 1e9, gap, lost, before


def bare_copies(staged: dict[str, torch.Tensor]) -> dict[str, float]:
    """Seconds of each way to copy the same bytes, or as many in one, warm."""
    sources = list(staged.values())
    whole = torch.empty(
        sum(source.nbytes for source in sources), dtype=torch.uint8, device=sources[0].device
    )
    return {
        "one bare copy": bare_copy(copy_tensors, [whole]),
        "torch's grouped copy": bare_copy(torch._foreach_copy_, sources),
        "large ones each, as commits do": bare_copy(copy_tensors, sources),
    }


def bare_copy(copy: Callable[..., object], sources: list[torch.Tensor]) -> float:
    """The least seconds that ``copy(targets, sources)`` takes."""
    targets = [torch.empty_like(source) for source in sources]
    times = []
    for _ in range(5):
        synchronize(sources[0])
        began = time.perf_counter()
        copy(targets, sources)
        synchronize(sources[0])
        times.append(time.perf_counter() - began)
    return min(times)


def synchronize(tensor: torch.Tensor) -> None:
    """Waits for the device of a tensor."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    add_shape(parser)
    add_kv_policies(parser)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=3000)
    parser.add_argument("--commits", type=int, default=5)
    parser.add_argument(
        "--window", type=float, default=1.0, help="seconds measured before a commit"
    )
    parser.add_argument("--every", type=float, help="seconds from commit to commit")
    parser.add_argument("--seconds", type=float, default=10.0, help="with --every: of each line")
    options = parse(parser)
    with checkpoint(options, options.device) as folder:
        rows = asyncio.run(measure(options, folder))
    load = f"{options.streams} streams after prompts of {options.prompt} tokens"
    print(f"{machine(options.device)}, {load}")
    header = ["", "held ms", "apply ms", "longest gap ms", "decode lost ms", "tokens/s before"]
    if options.every:
        header = [f"a commit every {options.every:g} s", "tokens/s", "computed again, each time"]
    print_table([header, *rows])


if __name__ == "__main__":
    main()

"""What a publish takes, and what it costs the sequences under way, through real servers.

    python benchmarks/publish.py --backends nccl ucx --trainer cuda:0 --servers cuda:1
    python benchmarks/publish.py --engine sglang --own-path …      the same on SGLang, and beside it
    python benchmarks/publish.py --shape tiny                      on a CPU, over gloo
    python benchmarks/publish.py --trainer cuda:0 --servers cuda:0 …    one GPU for both

Random weights are published again and again while streams decode, over each backend and under each
KV policy. With ``--delta`` they are published in deltas, after a bit of so many percent of the
elements was flipped on the device; ``delta.py`` measures these more closely. The floor is a bare
broadcast of the same bytes by torch.distributed, in the same run, before the servers start;
``--own-path`` adds SGLang's own updates of one engine, after they have ended. Decode lost: seconds
of undisturbed decoding that the tokens missing in a window take. Recomputed: how many tokens' keys
and values the server computes again. Where a GPU is shared, NCCL goes by sockets, and its kernels
take the GPU from decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import TYPE_CHECKING

from arrivals import SETTLE_SECONDS
from common import add_kv_policies, add_shape, checkpoint, parse, print_table
from publishing import (
    Prompts,
    add_serving,
    checkpoint_bytes,
    decoding,
    own_updates,
    serving,
    setting,
)
from rollwire_client import Publisher

if TYPE_CHECKING:
    from publishing import Measured
    from sglang_own_path import Spec

HEADER = ["", "seconds", "staged s", "paused ms", "gap ms", "lost ms", "recomputed", "GB/s"]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    add_serving(parser)
    parser.add_argument("--backends", nargs="+", default=["gloo"])
    add_kv_policies(parser)
    parser.add_argument(
        "--delta", type=float, metavar="PERCENT", help="of elements changed each time"
    )
    options = parse(parser)
    options.prompts = Prompts(options.prompt, options.vocab)
    with checkpoint(options, options.device) as folder:
        with serving(folder, options) as addresses:
            rows, specs = asyncio.run(measure(addresses, options))
        if options.own_path:
            size = checkpoint_bytes(folder)
            rows += [
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
                for name, seconds, gap, lost in own_updates(folder, specs, options)
            ]
    print(setting(options))
    print_table([HEADER, *rows])


async def measure(
    addresses: list[str], options: argparse.Namespace
) -> tuple[list[list[str]], list[Spec]]:
    """A row a publish and one of their medians but for the first; and what was published."""
    rows: list[list[str]] = []
    async with decoding(addresses, options) as running:
        for backend in options.backends:
            for policy, max_kv_lag in options.policies:
                publisher = Publisher(
                    running.fleet,
                    backend=backend,
                    max_kv_lag=max_kv_lag,
                    delta=options.delta is not None,
                    bucket_bytes=options.bucket_mib and options.bucket_mib << 20,
                )
                settle = SETTLE_SECONDS["keep" if max_kv_lag is None else "recompute"]
                results = []
                for _ in range(options.publishes):
                    if options.delta is not None:
                        await running.change(options.delta / 100)
                    results.append(await running.publish(publisher, settle))
                measured = _rows(f"{backend} {policy}", results)
                for row in measured:
                    print("  ".join(row), flush=True)
                rows += measured
        return rows, running.specs


def _rows(name: str, results: list[Measured]) -> list[list[str]]:
    figures = [
        (
            one.seconds,
            one.staged,
            one.paused * 1e3,
            one.longest_gap * 1e3,
            one.lost * 1e3,
            one.recomputed,
            one.report.bytes / one.seconds / 1e9,
        )
        for one in results
    ]
    named = [(f"{name} {i}", row) for i, row in enumerate(figures, start=1)]
    if warm := figures[1:]:
        named.append((f"{name} warm", tuple(map(statistics.median, zip(*warm, strict=True)))))
    formats = ("{:.3f}", "{:.3f}", "{:.1f}", "{:.1f}", "{:.0f}", "{:,.0f}", "{:.1f}")
    return [
        [name, *(text.format(value) for text, value in zip(formats, row, strict=True))]
        for name, row in named
    ]


if __name__ == "__main__":
    main()

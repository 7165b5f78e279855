"""What a publish in deltas takes, by how much of the weights has changed, beside a full publish.

    python benchmarks/delta.py --backend ucx --trainer cuda:0 --servers cuda:1 --publishes 11
    python benchmarks/delta.py --engine sglang --own-path …    on SGLang, its own updates beside it
    python benchmarks/delta.py --trainer cuda:0 --servers cuda:0 …     one GPU for both
    python benchmarks/delta.py --shape tiny                    on a CPU, over gloo

Random weights are published to real servers while streams decode: some times in full, then in
deltas, where before each publish a bit of a random share of the elements is flipped on the device.
The publisher's first publish in deltas is a full one, after a copy of the weights; it has a row of
its own. The floor is a bare broadcast of all bytes by torch.distributed, in the same run, before
the servers start; ``--own-path`` adds SGLang's own updates of one engine, after they have ended.

Printed is each publish, and the medians of a kind, its first one left out. MB: sent to each server.
Changed: what the publisher found, in percent of 16-bit words. Find: reading the tensors into the
publisher's copy, and comparing them with it. Staged: from the announcement until the update was
received and verified. Apply: putting it in place, while sampling is paused. Decode lost: seconds of
undisturbed decoding that the tokens missing in a window take. Where servers differ, the slowest
counts. Keys and values are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from typing import TYPE_CHECKING

from arrivals import SETTLE_SECONDS
from common import add_shape, checkpoint, kv_policy, parse, print_table
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
    from publishing import Decoding, Measured
    from sglang_own_path import Spec

UNITS = {
    "seconds": "{:.3f}",
    "MB": "{:,.2f}",
    "changed %": "{:.3f}",
    "find ms": "{:.1f}",
    "staged ms": "{:.1f}",
    "apply ms": "{:.1f}",
    "paused ms": "{:.1f}",
    "gap ms": "{:.1f}",
    "lost ms": "{:.0f}",
}
HEADER = ["", "sent", *UNITS]


def main() -> None:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    add_serving(parser)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument(
        "--unchanged", type=float, nargs="+", default=[99.9, 99, 97, 90], help="percent of elements"
    )
    options = parse(parser)
    options.prompts = Prompts(options.prompt, options.vocab)
    options.policies = [kv_policy("keep")]
    with checkpoint(options, options.device) as folder:
        with serving(folder, options) as addresses:
            rows, specs = asyncio.run(measure(addresses, options))
        if options.own_path:
            rows += _own_rows(own_updates(folder, specs, options), checkpoint_bytes(folder))
    print(setting(options))
    print_table([HEADER, *rows])


async def measure(
    addresses: list[str], options: argparse.Namespace
) -> tuple[list[list[str]], list[Spec]]:
    """A row for each kind of publish; and what was published."""
    async with decoding(addresses, options) as running:

        def publisher(*, delta: bool) -> Publisher:
            return Publisher(
                running.fleet,
                backend=options.backend,
                delta=delta,
                bucket_bytes=options.bucket_mib and options.bucket_mib << 20,
            )

        changed = 1 - min(options.unchanged) / 100
        full = await _publishes(running, publisher(delta=False), "full", changed, options.publishes)
        deltas = publisher(delta=True)
        rows = [full, await _publishes(running, deltas, "first with deltas", changed, 1)]
        for unchanged in options.unchanged:
            name, changed = f"{unchanged:g} % unchanged", 1 - unchanged / 100
            rows += [await _publishes(running, deltas, name, changed, options.publishes)]
        return rows, running.specs


async def _publishes(
    running: Decoding, publisher: Publisher, name: str, changed: float, count: int
) -> list[str]:
    figures, sent = [], ""
    for number in range(1, count + 1):
        await running.change(changed)
        measured = await running.publish(publisher, SETTLE_SECONDS["keep"])
        sent = "+".join(measured.report.encodings)
        figures.append(_figures(measured))
        print("  ".join(_row(f"{name} {number}", sent, figures[-1])), flush=True)
    warm = figures[1:] or figures
    return _row(name, sent, tuple(map(statistics.median, zip(*warm, strict=True))))


def _figures(measured: Measured) -> tuple[float, ...]:
    report = measured.report
    return (
        measured.seconds,
        report.bytes / 1e6,
        math.nan if report.changed_share is None else 100 * report.changed_share,
        report.find_seconds * 1e3,
        measured.staged * 1e3,
        measured.applied * 1e3,
        measured.paused * 1e3,
        measured.longest_gap * 1e3,
        measured.lost * 1e3,
    )


def _row(name: str, sent: str, figures: tuple[float, ...]) -> list[str]:
    return [
        name,
        sent,
        *(
            "" if math.isnan(value) else text.format(value)
            for text, value in zip(UNITS.values(), figures, strict=True)
        ),
    ]


def _own_rows(measured: list[tuple[str, float, float, float]], size: int) -> list[list[str]]:
    texts = [UNITS[name].format for name in ("seconds", "MB", "gap ms", "lost ms")]
    return [
        [
            name,
            "full",
            texts[0](seconds),
            texts[1](size / 1e6),
            *[""] * 5,
            texts[2](gap * 1e3),
            texts[3](lost * 1e3),
        ]
        for name, seconds, gap, lost in measured
    ]


if __name__ == "__main__":
    main()

"""``rollwire trace``: a timeline of a fleet, for https://ui.perfetto.dev or chrome://tracing.

Slices of one version have one name, and so one colour.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rollwire.types import version_text, weights_text

from rollwire_client._cli import shared
from rollwire_client._data import Sampling, ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import WeightTag

_PAUSE = 0.1  # seconds without a token that are drawn as a gap
_TOKENS = 0.02  # seconds that the tokens after a gap are drawn with
_SEQUENCES = 0  # the group of the command's own sequences; servers are numbered from 1


@shared.command
async def trace(
    context: typer.Context,
    servers: shared.FleetServers,
    output: Annotated[Path, typer.Option(dir_okay=False, help="File to write.")] = Path(
        "trace.json"
    ),
    seconds: Annotated[float, shared.seconds_option("Seconds to watch.")] = 10.0,
    interval: Annotated[float, shared.seconds_option("Seconds between two polls.", 0.01)] = 0.05,
    sequences: Annotated[
        int, typer.Option(min=0, help="Sequences that the command samples at a time, to show them.")
    ] = 4,
    prompt_ids: Annotated[
        Any, shared.token_ids_option("Token ids of the sequences' prompt.")
    ] = "1,2,3",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 256,
    timeout: shared.AnswerTimeout = 5.0,
) -> int:
    """Watch a fleet and write a timeline for Perfetto: states, updates, sequences by version."""
    addresses = shared.fleet_addresses(servers)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    timeline = _Timeline()
    timeouts = Timeouts(start=timeout, probe=timeout, call=timeout)
    try:
        async with Fleet(addresses, timeouts=timeouts, credentials=context.obj) as fleet:
            samplers = [
                asyncio.create_task(_sample(timeline, fleet, number, prompt_ids, sampling))
                for number in range(sequences)
            ]
            try:
                async with asyncio.timeout(seconds):
                    await _watch(timeline, fleet, interval)
            except TimeoutError:
                pass
            finally:
                for task in samplers:
                    task.cancel()
                failures = await asyncio.gather(*samplers, return_exceptions=True)
    finally:  # interrupted, it writes what it has seen until then
        with output.open("w") as file:
            json.dump({"traceEvents": timeline.events, "displayTimeUnit": "ms"}, file)
        sys.stderr.write(f"{output}: open it at https://ui.perfetto.dev\n")
    for failure in failures:
        if isinstance(failure, RollwireError):
            raise failure
    return 0


class _Timeline:
    """Events in Chrome's trace format; times are those of ``time.monotonic``."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._slices: dict[tuple[int, int], dict[str, Any]] = {}  # the last of each row

    def name_group(self, group: int, name: str) -> None:
        self._add("M", "process_name", group, 0, args={"name": name})

    def name_row(self, group: int, row: int, name: str) -> None:
        self._add("M", "thread_name", group, row, args={"name": name})

    def instant(self, group: int, row: int, name: str, at: float) -> None:
        self._add("i", name, group, row, ts=self._micros(at), s="p")

    def counter(self, group: int, name: str, at: float, **values: int) -> None:
        self._add("C", name, group, 0, ts=self._micros(at), args=values)

    def cover(
        self, group: int, row: int, name: str, begin: float, end: float, *, tokens: int = 0
    ) -> None:
        """Adds a slice, or stretches an equal one that ends where it begins."""
        start = self._micros(begin)
        last = self._slices.get((group, row))
        if last is None or last["name"] != name or last["ts"] + last["dur"] != start:
            last = self._add("X", name, group, row, ts=start, args={})
            self._slices[group, row] = last
        last["dur"] = self._micros(end) - last["ts"]
        if tokens:
            last["args"]["tokens"] = last["args"].get("tokens", 0) + tokens

    def _add(self, phase: str, name: str, group: int, row: int, **more: Any) -> dict[str, Any]:
        event = {"ph": phase, "name": name, "pid": group, "tid": row, **more}
        self.events.append(event)
        return event

    def _micros(self, at: float) -> int:
        return round((at - self._began) * 1e6)


async def _watch(timeline: _Timeline, fleet: Fleet, interval: float) -> None:
    groups: dict[str, int] = {}  # of servers
    tags: dict[str, WeightTag] = {}  # at the last poll
    before = time.monotonic()
    while True:
        answers = await fleet.info()
        now = time.monotonic()
        for address, answer in answers.items():
            if address not in groups:
                groups[address] = group = len(groups) + 1
                timeline.name_group(group, address)
                timeline.name_row(group, 1, "state")
                timeline.name_row(group, 2, "weights")
            group = groups[address]
            if isinstance(answer, ServerInfo):
                _draw(timeline, group, answer, tags.get(address), before, now)
                tags[address] = answer.weights
            else:
                timeline.cover(group, 1, "no answer", before, now)
        before = now
        await asyncio.sleep(interval)


def _draw(
    timeline: _Timeline,
    group: int,
    info: ServerInfo,
    was: WeightTag | None,
    before: float,
    now: float,
) -> None:
    """What a server answers now; at the poll before, the weights were ``was``."""
    tag, name = info.weights, version_text(info.weights.version)
    timeline.cover(group, 1, info.state.value, before, now)
    timeline.cover(group, 2, name, before, now)
    if was is not None and tag != was:
        what = "commit" if tag.server_id == was.server_id else "new process"
        sent = "" if info.last_update is None else f" ({info.last_update})"
        timeline.instant(group, 2, f"{what}: {weights_text(tag)}{sent}", now)
    timeline.counter(
        group, "sequences", now,
        running=info.running_sequences, waiting=info.waiting_sequences, held=info.held_sequences,
    )  # fmt: skip
    timeline.counter(group, "KV tokens", now, used=info.kv_tokens_used)


async def _sample(
    timeline: _Timeline, fleet: Fleet, row: int, prompt_ids: Sequence[int], sampling: Sampling
) -> None:
    """One sequence after the other, in a row of its own."""
    if row == 0:
        timeline.name_group(_SEQUENCES, "sequences")
    timeline.name_row(_SEQUENCES, row, f"row {row + 1}")
    for count in itertools.count(1):
        before = time.monotonic()
        timeline.instant(_SEQUENCES, row, f"sequence {count} starts", before)
        async for chunk in fleet.stream(prompt_ids, sampling):
            now = time.monotonic()
            if chunk.token_ids:
                if now - before > _PAUSE:
                    timeline.cover(_SEQUENCES, row, "no tokens", before, now - _TOKENS)
                    before = now - _TOKENS
                name = version_text(chunk.weights.version)
                tokens = len(chunk.token_ids)
                timeline.cover(_SEQUENCES, row, name, before, now, tokens=tokens)
                before = now

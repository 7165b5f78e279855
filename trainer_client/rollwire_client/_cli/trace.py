"""``rollwire trace``: a timeline of a fleet, for https://ui.perfetto.dev or chrome://tracing.

It shows what a client can see: each server's state, weights and load, polled, and the sequences
that the command samples itself. Slices of one version have one name, and so one colour.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollwire_client._cli import shared
from rollwire_client._data import Sampling
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.client import Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import WeightTag

    from rollwire_client._data import ServerInfo

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
    seconds: Annotated[float, shared.seconds("Seconds to watch.")] = 10.0,
    interval: Annotated[float, shared.seconds("Seconds between two polls.", 0.01)] = 0.05,
    sequences: Annotated[
        int, typer.Option(min=0, help="Sequences that the command samples at a time, to show them.")
    ] = 4,
    prompt_ids: Annotated[Any, shared.token_ids("Token ids of the sequences' prompt.")] = "1,2,3",
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

    def name_group(self, group: int, name: str) -> None:
        self._add("M", "process_name", group, 0, args={"name": name})

    def name_row(self, group: int, row: int, name: str) -> None:
        self._add("M", "thread_name", group, row, args={"name": name})

    def slice(self, group: int, row: int, name: str, begin: float) -> dict[str, Any]:
        """A slice that begins; ``stretch`` sets its end."""
        return self._add("X", name, group, row, ts=self._micros(begin), dur=0, args={})

    def stretch(self, bar: dict[str, Any], end: float) -> None:
        bar["dur"] = self._micros(end) - bar["ts"]

    def instant(self, group: int, row: int, name: str, at: float) -> None:
        self._add("i", name, group, row, ts=self._micros(at), s="p")

    def counter(self, group: int, name: str, at: float, **values: int) -> None:
        self._add("C", name, group, 0, ts=self._micros(at), args=values)

    def _add(self, phase: str, name: str, group: int, row: int, **more: Any) -> dict[str, Any]:
        event = {"ph": phase, "name": name, "pid": group, "tid": row, **more}
        self.events.append(event)
        return event

    def _micros(self, at: float) -> int:
        return round((at - self._began) * 1e6)


@dataclass(slots=True)
class _SliceRow:
    """A row of slices; equal ones that follow each other are merged."""

    timeline: _Timeline
    group: int
    row: int
    _last: dict[str, Any] | None = None
    _end: float = 0.0

    def cover(self, name: str, begin: float, end: float, *, tokens: int = 0) -> None:
        last = self._last
        if last is None or last["name"] != name or self._end != begin:
            last = self._last = self.timeline.slice(self.group, self.row, name, begin)
        self.timeline.stretch(last, end)
        if tokens:
            last["args"]["tokens"] = last["args"].get("tokens", 0) + tokens
        self._end = end


class _ServerTrack:
    """The rows of one server: its state, its weights, and counters."""

    def __init__(self, timeline: _Timeline, group: int, address: str) -> None:
        self._timeline, self._group = timeline, group
        timeline.name_group(group, address)
        timeline.name_row(group, 1, "state")
        timeline.name_row(group, 2, "weights")
        self._states, self._weights = _SliceRow(timeline, group, 1), _SliceRow(timeline, group, 2)
        self._tag: WeightTag | None = None

    def add(self, answer: ServerInfo | RollwireError, begin: float, end: float) -> None:
        """What it answered at ``end``; the answer before was at ``begin``."""
        if isinstance(answer, RollwireError):
            self._states.cover("no answer", begin, end)
            return
        tag, name = answer.weights, shared.version_name(answer.weights)
        self._states.cover(answer.state.value, begin, end)
        self._weights.cover(name, begin, end)
        if self._tag is not None and tag != self._tag:
            what = "commit" if tag.server_id == self._tag.server_id else "new process"
            self._timeline.instant(self._group, 2, f"{what}: {name}, revision {tag.revision}", end)
        self._tag = tag
        self._timeline.counter(
            self._group, "sequences", end,
            running=answer.running_sequences, waiting=answer.waiting_sequences,
            held=answer.held_sequences,
        )  # fmt: skip
        self._timeline.counter(self._group, "KV tokens", end, used=answer.kv_tokens_used)


async def _watch(timeline: _Timeline, fleet: Fleet, interval: float) -> None:
    tracks: dict[str, _ServerTrack] = {}
    before = time.monotonic()
    while True:
        answers = await fleet.info()
        now = time.monotonic()
        for address, answer in answers.items():
            if address not in tracks:
                tracks[address] = _ServerTrack(timeline, len(tracks) + 1, address)
            tracks[address].add(answer, before, now)
        before = now
        await asyncio.sleep(interval)


async def _sample(
    timeline: _Timeline, fleet: Fleet, number: int, prompt_ids: Sequence[int], sampling: Sampling
) -> None:
    """One sequence after the other, in a row of its own."""
    if number == 0:
        timeline.name_group(_SEQUENCES, "sequences")
    row = _SliceRow(timeline, _SEQUENCES, number)
    timeline.name_row(_SEQUENCES, number, f"row {number + 1}")
    for count in itertools.count(1):
        before = time.monotonic()
        timeline.instant(_SEQUENCES, number, f"sequence {count} starts", before)
        async for chunk in fleet.stream(prompt_ids, sampling):
            now = time.monotonic()
            if chunk.token_ids:
                if now - before > _PAUSE:
                    row.cover("no tokens", before, now - _TOKENS)
                    before = now - _TOKENS
                name = shared.version_name(chunk.weights)
                row.cover(name, before, now, tokens=len(chunk.token_ids))
                before = now

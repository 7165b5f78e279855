"""``rollwire generate``: one sequence, its tokens shown as they come."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.text import Text
from rollwire.types import FinishReason, WeightTag

from rollwire_client._concurrency.tasks import cancel_all
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._fleet.rollout import Retries
from rollwire_client._rpc.client import Timeouts

if TYPE_CHECKING:
    from rollwire.types import Finish

    from rollwire_client._data import Chunk, Sampling
    from rollwire_client._rpc.channels import Credentials

# Told apart on dark and on light ground; versions beyond these begin again.
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


async def generate_tokens(
    server: str,
    prompt_ids: list[int],
    sampling: Sampling,
    credentials: Credentials,
    *,
    timeout: float,
    as_json: bool,
) -> int:
    """Samples a sequence and shows it; 0 if it came to its own end.

    A server that is not up, or not ready, is waited for, ``timeout`` seconds each, and one that is
    paused until it goes on.
    """
    finish: Finish | None = None
    fleet = Fleet(
        [server],
        timeouts=Timeouts(start=timeout, call=timeout, probe=timeout),
        retries=Retries(attempts=1, seconds=timeout),
        credentials=credentials,
    )
    view = _view(as_json=as_json)
    waiting = asyncio.create_task(_tell_waits(fleet, view))
    try:
        async with fleet:
            async for chunk in fleet.stream(prompt_ids, sampling):
                view.show(chunk)
                finish = chunk.finish
    finally:
        await cancel_all([waiting])
        view.end(finish)
    complete = finish is not None and finish.reason in {FinishReason.STOP, FinishReason.LENGTH}
    return 0 if complete else 1


async def _tell_waits(fleet: Fleet, view: _View) -> None:
    """Says what it waits for, when that lasts for a second; until it is cancelled."""
    told: str | None = None
    while True:
        await asyncio.sleep(1)
        if (why := fleet.unavailable_reason()) is not None and why != told:
            view.wait(why)
        told = why


class _View(Protocol):
    def show(self, chunk: Chunk) -> None: ...

    def wait(self, why: str) -> None:
        """Nothing comes now."""

    def end(self, finish: Finish | None) -> None:
        """With None, an error ended it, which is told elsewhere."""


def _view(*, as_json: bool) -> _View:
    if as_json:
        return _JsonView()
    return _TerminalView() if sys.stdout.isatty() else _PlainView()


class _JsonView:
    """One JSON object a chunk; the last one has the finish."""

    def show(self, chunk: Chunk) -> None:
        told: dict[str, Any] = asdict(chunk)
        told["weights"]["digest"] = f"{chunk.weights.digest:016x}"  # JSON's numbers are too small
        if chunk.finish is not None:
            told["finish"]["reason"] = chunk.finish.reason.value
        _write(json.dumps(told) + "\n")

    def wait(self, why: str) -> None:
        pass

    def end(self, finish: Finish | None) -> None:
        pass


class _PlainView:
    """Token ids on one line of stdout, a summary on stderr."""

    def __init__(self) -> None:
        self._summary = _Summary()

    def show(self, chunk: Chunk) -> None:
        self._summary.add(chunk)
        _write("".join(f"{token} " for token in chunk.token_ids))

    def wait(self, why: str) -> None:
        self._summary.waited = True
        sys.stderr.write(f"waiting: {why}\n")

    def end(self, finish: Finish | None) -> None:
        if self._summary.counts:
            _write("\n")
        if finish is not None:
            sys.stderr.write(f"{self._summary.told(finish)}\n")


class _TerminalView:
    """Token ids coloured by the weights that sampled them, then a legend and a summary."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._summary = _Summary()
        self._column = 0

    def show(self, chunk: Chunk) -> None:
        self._summary.add(chunk)
        style = self._summary.colour(chunk.weights)
        for token in chunk.token_ids:
            word = f"{token} "
            if self._column + len(word) > self._console.width:
                self._console.print()
                self._column = 0
            self._console.print(Text(word, style=style), end="")
            self._column += len(word)

    def wait(self, why: str) -> None:
        self._summary.waited = True
        if self._column:
            self._console.print()
            self._column = 0
        sys.stderr.write(f"waiting: {why}\n")

    def end(self, finish: Finish | None) -> None:
        if self._summary.counts:
            self._console.print()
        for tag, count in self._summary.counts.items():
            version = "no version" if tag.version is None else f"version {tag.version}"
            line = Text("■ ", style=self._summary.colour(tag))
            line.append(f"{version}, revision {tag.revision}: {count} tokens", style="default")
            self._console.print(line)
        if finish is not None:
            self._console.print(Text(self._summary.told(finish), style="dim"))


class _Summary:
    """What came so far, by weights, in the order in which those came."""

    def __init__(self) -> None:
        self.counts: dict[WeightTag, int] = {}
        self.waited = False
        self._logprob = 0.0
        self._began = time.monotonic()
        self._first = 0.0  # seconds until the first token

    def add(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            if not self.counts:
                self._first = time.monotonic() - self._began
            self.counts[chunk.weights] = self.counts.get(chunk.weights, 0) + len(chunk.token_ids)
            self._logprob += sum(chunk.logprobs)

    def colour(self, weights: WeightTag) -> str:
        order = list(self.counts).index(weights) if weights in self.counts else 0
        return COLOURS[order % len(COLOURS)]

    def told(self, finish: Finish) -> str:
        count = sum(self.counts.values())
        seconds = time.monotonic() - self._began
        pace = f"{count / seconds:.0f} a second"
        if self.waited:  # so that this says nothing of the server's pace
            pace = f"the first after {self._first:.2f} s"
        mean = f", mean log-probability {self._logprob / count:.3f}" if count else ""
        why = f" ({finish.message})" if finish.message else ""
        return f"{count} tokens in {seconds:.2f} s, {pace}{mean}; {finish.reason.value}{why}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

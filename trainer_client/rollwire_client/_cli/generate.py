"""``rollwire generate``: one sequence, its tokens shown as they come."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from rollwire.types import FinishReason, WeightTag, weights_text

from rollwire_client._cli import shared
from rollwire_client._concurrency import cancel_all
from rollwire_client._data import Sampling
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._fleet.rollout import Retries
from rollwire_client._rpc.timeouts import Timeouts

if TYPE_CHECKING:
    from rollwire.types import Finish

    from rollwire_client._trajectory import Chunk


@shared.command
async def generate(
    context: typer.Context,
    server: Annotated[
        str,
        typer.Option(parser=shared.parse_address, metavar="HOST:PORT", help="The server."),
    ],
    prompt_ids: Annotated[Any, shared.token_ids_option("Token ids of the prompt.")],
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens to sample; the context may allow fewer.")
    ] = 32,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the likeliest tokens whose probabilities add up to this."),
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=-1, help="Sample from the k likeliest tokens; 0 or -1: all.")
    ] = 0,
    min_p: Annotated[
        float,
        typer.Option(help="Lowest probability of a token, relative to the likeliest token's."),
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed; the same seed samples the same tokens.")
    ] = None,
    *,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Do not stop at an end-of-sequence token.")
    ] = False,
    timeout: Annotated[
        float, shared.seconds_option("Seconds to wait until the server is up.")
    ] = 60.0,
    as_json: shared.Json = False,
) -> int:
    """Sample one sequence and show its tokens as they arrive, coloured by weight version."""
    sampling = Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    # A server that is not up, or not ready, is waited for, ``timeout`` seconds each; one that is
    # paused, until it is resumed.
    fleet = Fleet(
        [server],
        timeouts=Timeouts(start=timeout, call=timeout, probe=timeout),
        retries=Retries(attempts=1, seconds=timeout),
        credentials=context.obj,
    )
    finish: Finish | None = None
    view = _TextView()
    waiting = [] if as_json else [asyncio.create_task(_report_waiting(fleet, view))]
    try:
        async with fleet:
            async for chunk in fleet.stream(prompt_ids, sampling):
                if as_json:
                    _write_json(chunk)
                else:
                    view.show(chunk)
                finish = chunk.finish
    finally:
        await cancel_all(waiting)
        if not as_json:
            view.end(finish)
    complete = finish is not None and finish.reason in {FinishReason.STOP, FinishReason.LENGTH}
    return 0 if complete else 1


async def _report_waiting(fleet: Fleet, view: _TextView) -> None:
    """Says what the command waits for, when that lasts for a second; until it is cancelled."""
    reported: str | None = None
    while True:
        await asyncio.sleep(1)
        if (reason := fleet.unavailable_reason()) is not None and reason != reported:
            view.wait(reason)
        reported = reason


def _write_json(chunk: Chunk) -> None:
    fields = asdict(chunk)
    fields["weights"]["digest"] = shared.hex_digest(chunk.weights.digest)
    if chunk.finish is not None:
        fields["finish"]["reason"] = chunk.finish.reason.value
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


class _TextView:
    """Token ids and a summary.

    On a terminal the tokens have the colour of the weights that sampled them, and a legend. Off it
    they are one line of stdout, and the summary goes to stderr.
    """

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._terminal = sys.stdout.isatty()
        self._column = 0
        self._counts: dict[WeightTag, int] = {}  # tokens, in the order in which the weights came
        self._logprob = 0.0
        self._waited = False
        self._began = time.monotonic()
        self._first = 0.0  # seconds until the first token

    def show(self, chunk: Chunk) -> None:
        if chunk.token_ids:
            if not self._counts:
                self._first = time.monotonic() - self._began
            self._counts[chunk.weights] = self._counts.get(chunk.weights, 0) + len(chunk.token_ids)
            self._logprob += sum(chunk.logprobs)
        words = [f"{token} " for token in chunk.token_ids]
        if not self._terminal:
            sys.stdout.write("".join(words))
            sys.stdout.flush()
            return
        for word in words:
            if self._column + len(word) > self._console.width:
                self._break_line()
            self._console.print(Text(word, style=self._colour(chunk.weights)), end="")
            self._column += len(word)

    def wait(self, reason: str) -> None:
        self._waited = True
        self._break_line()
        sys.stderr.write(f"waiting: {reason}\n")

    def end(self, finish: Finish | None) -> None:
        """Without a finish an error ended it, which is reported elsewhere."""
        if self._counts:
            self._console.print()
        if self._terminal:
            for tag, count in self._counts.items():
                line = Text("■ ", style=self._colour(tag))
                line.append(f"{weights_text(tag)}: {count} tokens", style="default")
                self._console.print(line)
        if finish is not None and self._terminal:
            self._console.print(Text(self._summary(finish), style="dim"))
        elif finish is not None:
            sys.stderr.write(f"{self._summary(finish)}\n")

    def _break_line(self) -> None:
        if self._column:
            self._console.print()
            self._column = 0

    def _colour(self, weights: WeightTag) -> str:
        colours = shared.VERSION_COLOURS
        return colours[list(self._counts).index(weights) % len(colours)]

    def _summary(self, finish: Finish) -> str:
        count = sum(self._counts.values())
        seconds = time.monotonic() - self._began
        pace = f"{count / seconds:.0f} a second"
        if self._waited:  # then a rate would say nothing of the server
            pace = f"the first after {self._first:.2f} s"
        mean = f", mean log-probability {self._logprob / count:.3f}" if count else ""
        message = f" ({finish.message})" if finish.message else ""
        return f"{count} tokens in {seconds:.2f} s, {pace}{mean}; {finish.reason.value}{message}"

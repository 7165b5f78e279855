"""``rollwire top``: a fleet, live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer  # noqa: TC002 - typer reads the annotations
from rich.live import Live
from rich.text import Text

from rollwire_client._arguments import servers_text
from rollwire_client._cli import options, output
from rollwire_client._data import ServerInfo
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.client import Timeouts

if TYPE_CHECKING:
    from rich.table import Table

_RATE_WINDOW = 5  # answers that a rate is taken over

Answers = dict[str, output.Answer]


@options.command
async def top(
    context: typer.Context,
    servers: options.FleetServers,
    *,
    interval: Annotated[float, options.seconds("Seconds between two polls.")] = 1.0,
    timeout: options.AnswerTimeout = 5.0,
    as_json: options.Json = False,
) -> int:
    """Watch a fleet live. With --json, or if the output is no terminal, show it once."""
    addresses = options.fleet_addresses(servers)
    timeouts = Timeouts(start=0, call=timeout, probe=timeout, close=0)
    recent = RecentAnswers()
    async with Fleet(
        addresses, timeouts=timeouts, credentials=context.obj, resolve_interval=interval
    ) as fleet:
        answers = await _ask(fleet, recent)
        if sys.stdout.isatty() and not as_json:
            with Live(_table(answers, recent), auto_refresh=False, screen=True) as screen:
                while True:
                    await asyncio.sleep(interval)
                    answers = await _ask(fleet, recent)
                    screen.update(_table(answers, recent), refresh=True)
        await asyncio.sleep(interval)  # a rate takes two answers
        answers = await _ask(fleet, recent)
    if as_json:
        output.print_json([_as_json(*item, recent) for item in answers.items()])
    else:
        output.print_table(_table(answers, recent))
    return output.print_errors(list(answers.values()))


@dataclass(frozen=True, slots=True)
class Rates:
    """What changed between a server's answers.

    Attributes:
        tokens: Sampled a second.
        commits: Weight updates a minute.
    """

    tokens: float
    commits: float


class RecentAnswers:
    """The last answers of each server process."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[tuple[float, ServerInfo]]] = {}

    def add(self, answers: Answers, now: float) -> None:
        for address, answer in answers.items():
            known = self._answers.setdefault(address, deque(maxlen=_RATE_WINDOW))
            if not isinstance(answer, ServerInfo) or (
                known and known[-1][1].server_id != answer.server_id
            ):
                known.clear()
            if isinstance(answer, ServerInfo):
                known.append((now, answer))

    def rates(self, address: str) -> Rates | None:
        """Of a server; None before its second answer."""
        known = self._answers.get(address)
        if known is None or len(known) < 2 or (seconds := known[-1][0] - known[0][0]) <= 0:
            return None
        first, last = known[0][1], known[-1][1]
        return Rates(
            (last.sampled_tokens - first.sampled_tokens) / seconds,
            (last.weights.revision - first.weights.revision) / seconds * 60,
        )


async def _ask(fleet: Fleet, recent: RecentAnswers) -> Answers:
    answers = await fleet.info()
    recent.add(answers, time.monotonic())
    return answers


def _table(answers: Answers, recent: RecentAnswers) -> Table:
    infos = [answer for answer in answers.values() if isinstance(answer, ServerInfo)]
    processes = list({info.server_id: info for info in reversed(infos)}.values())
    newest = _newest(processes)
    table = output.table(
        "server", "state", ">version", ">lag", ">running", ">waiting", ">held", ">KV",
        ">tokens/s", ">commits/min",
    )  # fmt: skip
    for address, answer in answers.items():
        if isinstance(answer, ServerInfo):
            table.add_row(address, *_row(answer, recent.rates(address), newest))
        else:
            table.add_row(address, Text("no answer", style="red"))
    table.add_section()
    count = len(processes) + len(answers) - len(infos)
    table.add_row(servers_text(count), *_sums(processes, recent), style="bold")
    return table


def _newest(infos: list[ServerInfo]) -> int | None:
    """The newest version that serves, but for those from which a server was rolled back."""
    versions = {i.weights.version for i in infos if i.weights.version is not None}
    left = {
        version
        for version in versions
        for info in infos
        if info.weights.version is not None and info.highest_version is not None
        if info.weights.version < version <= info.highest_version
    }
    return max(versions - left, default=None)


def _row(info: ServerInfo, rates: Rates | None, newest: int | None) -> list[str]:
    version = info.weights.version
    lag = "-" if version is None or newest is None else str(newest - version)
    if version is not None and newest is not None and version > newest:
        lag = "missed rollback"
    return [
        output.state_text(info.state),
        "-" if version is None else str(version),
        lag,
        f"{info.running_sequences}/{info.max_running_sequences}",
        str(info.waiting_sequences),
        str(info.held_sequences),
        _percentage(info.kv_tokens_used, info.kv_tokens_total),
        "-" if rates is None else f"{rates.tokens:.0f}",
        "-" if rates is None else f"{rates.commits:.1f}",
    ]


def _sums(infos: list[ServerInfo], recent: RecentAnswers) -> list[str]:
    rates = [r for info in infos if (r := recent.rates(info.address)) is not None]
    return [
        "", "", "",
        str(sum(info.running_sequences for info in infos)),
        str(sum(info.waiting_sequences for info in infos)),
        str(sum(info.held_sequences for info in infos)),
        _percentage(
            sum(info.kv_tokens_used for info in infos), sum(info.kv_tokens_total for info in infos)
        ),
        f"{sum(rate.tokens for rate in rates):.0f}" if rates else "-",
        "",
    ]  # fmt: skip


def _percentage(part: int, whole: int) -> str:
    return f"{part / whole if whole else 0.0:.0%}"


def _as_json(address: str, answer: output.Answer, recent: RecentAnswers) -> dict[str, Any]:
    fields = output.as_json(address, answer)
    if isinstance(answer, ServerInfo):
        rates = recent.rates(address)
        fields["tokens_per_second"] = None if rates is None else rates.tokens
        fields["commits_per_minute"] = None if rates is None else rates.commits
    return fields

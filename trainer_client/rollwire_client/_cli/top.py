"""``rollwire top``: a fleet, live."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollwire_client._cli.info import STYLES, plain
from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.client import Timeouts
from rollwire_client._wording import servers_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_client._fleet.addresses import Addresses
    from rollwire_client._rpc.channels import Credentials

_WINDOW = 5  # answers that a rate is taken over

Answers = dict[str, ServerInfo | RollwireError]


@dataclass(frozen=True, slots=True)
class Rates:
    """What changed between a server's answers.

    Attributes:
        tokens: Sampled a second.
        commits: Weight updates a minute.
    """

    tokens: float
    commits: float


class History:
    """The last answers of each server."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[tuple[float, ServerInfo]]] = {}

    def add(self, answers: Answers, now: float) -> None:
        """What the servers said at a time, in seconds."""
        for address, answer in answers.items():
            known = self._answers.setdefault(address, deque(maxlen=_WINDOW))
            if not isinstance(answer, ServerInfo) or (
                known and known[-1][1].server_id != answer.server_id
            ):
                known.clear()  # what a process did says nothing about the next
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


async def show_top(
    servers: Addresses,
    credentials: Credentials,
    *,
    interval: float,
    timeout: float,
    as_json: bool,
) -> int:
    """Shows the servers until interrupted; off a terminal and as JSON once, after two looks.

    Then the code is 1 if one of them did not answer.
    """
    history, live = History(), sys.stdout.isatty() and not as_json
    timeouts = Timeouts(start=0, call=timeout, probe=timeout, close=0)
    async with Fleet(
        servers, timeouts=timeouts, credentials=credentials, resolve_interval=interval
    ) as fleet:
        answers = await _look(fleet, history)
        if live:
            with Live(_table(answers, history), auto_refresh=False, screen=True) as screen:
                while True:
                    await asyncio.sleep(interval)
                    answers = await _look(fleet, history)
                    screen.update(_table(answers, history), refresh=True)
        await asyncio.sleep(interval)
        answers = await _look(fleet, history)
    if as_json:
        told = [_told(address, answer, history) for address, answer in answers.items()]
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        Console(width=160).print(_table(answers, history))
    missing = [answer for answer in answers.values() if isinstance(answer, RollwireError)]
    for error in missing:
        sys.stderr.write(f"rollwire: {error}\n")
    return 1 if missing else 0


async def _look(fleet: Fleet, history: History) -> Answers:
    answers = await fleet.info()
    history.add(answers, time.monotonic())
    return answers


def _table(answers: Answers, history: History) -> Table:
    said = [answer for answer in answers.values() if isinstance(answer, ServerInfo)]
    infos = list({info.server_id: info for info in reversed(said)}.values())  # each process once
    count = len(infos) + len(answers) - len(said)
    newest = _newest(infos)
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("server")
    table.add_column("state")
    for name in (
        "version",
        "lag",
        "running",
        "waiting",
        "held",
        "KV",
        "tokens/s",
        "commits/min",
    ):
        table.add_column(name, justify="right")
    for address, answer in answers.items():
        if isinstance(answer, ServerInfo):
            table.add_row(address, *_row(answer, history.rates(address), newest))
        else:
            table.add_row(address, Text("no answer", style="red"))
    table.add_section()
    table.add_row(servers_text(count), *_sums(infos, history), style="bold")
    return table


def _newest(infos: list[ServerInfo]) -> int | None:
    """The newest version that serves; none from which another server was rolled back."""
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
        f"[{STYLES.get(info.state, 'yellow')}]{info.state.value}[/]",
        "-" if version is None else str(version),
        lag,
        f"{info.running_sequences}/{info.max_running_sequences}",
        str(info.waiting_sequences),
        str(info.held_sequences),
        f"{_share(info.kv_tokens_used, info.kv_tokens_total):.0%}",
        "-" if rates is None else f"{rates.tokens:.0f}",
        "-" if rates is None else f"{rates.commits:.1f}",
    ]


def _sums(infos: list[ServerInfo], history: History) -> list[str]:
    rates = [r for info in infos if (r := history.rates(info.address)) is not None]
    used = sum(info.kv_tokens_used for info in infos)
    total = sum(info.kv_tokens_total for info in infos)
    return [
        "", "", "",
        str(sum(info.running_sequences for info in infos)),
        str(sum(info.waiting_sequences for info in infos)),
        str(sum(info.held_sequences for info in infos)),
        f"{_share(used, total):.0%}",
        f"{sum(rate.tokens for rate in rates):.0f}" if rates else "-",
        "",
    ]  # fmt: skip


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _told(address: str, answer: ServerInfo | RollwireError, history: History) -> Mapping[str, Any]:
    if isinstance(answer, RollwireError):
        return {"address": address, "error": str(answer)}
    rates = history.rates(address)
    return {
        **plain(answer),
        "tokens_per_second": None if rates is None else rates.tokens,
        "commits_per_minute": None if rates is None else rates.commits,
    }

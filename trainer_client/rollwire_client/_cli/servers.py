"""``rollwire info`` and ``rollwire top``: servers, once and live."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated

import typer
from rich.live import Live
from rich.text import Text

from rollwire_client._arguments import servers_text
from rollwire_client._cli import shared
from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.client import RolloutClient
from rollwire_client._rpc.timeouts import Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from rollwire_client._rpc.channel import Credentials

_RATE_WINDOW = 5  # answers that a rate is taken over

Answers = dict[str, shared.Answer]


@shared.command
async def info(
    context: typer.Context,
    servers: Annotated[
        list[str],
        typer.Argument(parser=shared.parse_address, metavar="HOST:PORT...", help="The servers."),
    ],
    *,
    timeout: shared.AnswerTimeout = 5.0,
    as_json: shared.Json = False,
) -> int:
    """Show the model, state, weights and load of servers."""
    answers = await asyncio.gather(*(_ask(server, context.obj, timeout) for server in servers))
    infos = [answer for answer in answers if isinstance(answer, ServerInfo)]
    if as_json:
        shared.print_json(list(map(shared.answer_fields, servers, answers)))
    elif infos:
        shared.print_table(_info_table(infos))
    return shared.print_errors(answers)


async def _ask(server: str, credentials: Credentials, timeout: float) -> shared.Answer:
    timeouts = Timeouts(call=timeout)
    try:
        async with RolloutClient(server, timeouts=timeouts, credentials=credentials) as client:
            return await client.info()
    except RollwireError as error:
        return error


def _info_table(infos: list[ServerInfo]) -> Table:
    table = shared.table(
        "server", "state", ">version", ">revision", "digest", "engine", "model",
        ">running", ">waiting", ">held", ">KV tokens", ">context",
    )  # fmt: skip
    for info in infos:
        table.add_row(
            info.address,
            shared.state_text(info.state),
            shared.version_cell(info.weights.version),
            str(info.weights.revision),
            shared.hex_digest(info.weights.digest),
            info.engine,
            info.model,
            f"{info.running_sequences}/{info.max_running_sequences}",
            str(info.waiting_sequences),
            str(info.held_sequences),
            f"{info.kv_tokens_used}/{info.kv_tokens_total}",
            str(info.context_length),
        )
    return table


@shared.command
async def top(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    interval: Annotated[float, shared.seconds_option("Seconds between two polls.")] = 1.0,
    timeout: shared.AnswerTimeout = 5.0,
    as_json: shared.Json = False,
) -> int:
    """Watch a fleet live. With --json, or if the output is no terminal, show it once."""
    addresses = shared.fleet_addresses(servers)
    timeouts = Timeouts(start=0, call=timeout, probe=timeout, close=0)
    recent = _RecentAnswers()
    async with Fleet(
        addresses, timeouts=timeouts, credentials=context.obj, resolve_interval=interval
    ) as fleet:
        answers = recent.add(await fleet.info())
        if sys.stdout.isatty() and not as_json:
            with Live(_top_table(answers, recent), auto_refresh=False, screen=True) as screen:
                while True:
                    await asyncio.sleep(interval)
                    answers = recent.add(await fleet.info())
                    screen.update(_top_table(answers, recent), refresh=True)
        await asyncio.sleep(interval)  # a rate takes two answers
        answers = recent.add(await fleet.info())
    if as_json:
        fields = {address: shared.answer_fields(address, a) for address, a in answers.items()}
        for address, answer in answers.items():
            if isinstance(answer, ServerInfo):
                tokens, commits = recent.rates(address) or (None, None)
                fields[address] |= {"tokens_per_second": tokens, "commits_per_minute": commits}
        shared.print_json(list(fields.values()))
    else:
        shared.print_table(_top_table(answers, recent))
    return shared.print_errors(answers.values())


class _RecentAnswers:
    """The last answers of each server process."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[tuple[float, ServerInfo]]] = {}

    def add(self, answers: Answers) -> Answers:
        now = time.monotonic()
        for address, answer in answers.items():
            known = self._answers.setdefault(address, deque(maxlen=_RATE_WINDOW))
            if not isinstance(answer, ServerInfo) or (
                known and known[-1][1].server_id != answer.server_id
            ):
                known.clear()
            if isinstance(answer, ServerInfo):
                known.append((now, answer))
        return answers

    def rates(self, address: str) -> tuple[float, float] | None:
        """Tokens a second and commits a minute; None before a server's second answer."""
        known = self._answers.get(address)
        if known is None or len(known) < 2 or (seconds := known[-1][0] - known[0][0]) <= 0:
            return None
        first, last = known[0][1], known[-1][1]
        return (
            (last.sampled_tokens - first.sampled_tokens) / seconds,
            (last.weights.revision - first.weights.revision) / seconds * 60,
        )


def _top_table(answers: Answers, recent: _RecentAnswers) -> Table:
    infos = [answer for answer in answers.values() if isinstance(answer, ServerInfo)]
    processes = list({info.server_id: info for info in reversed(infos)}.values())
    newest = _newest(processes)
    table = shared.table(
        "server", "state", ">version", ">lag", ">running", ">waiting", ">held", ">KV",
        ">tokens/s", ">commits/min", "last update",
    )  # fmt: skip
    for address, answer in answers.items():
        if not isinstance(answer, ServerInfo):
            table.add_row(address, Text("no answer", style="red"))
            continue
        rates = recent.rates(address)
        table.add_row(
            address,
            shared.state_text(answer.state),
            shared.version_cell(answer.weights.version),
            _lag(answer.weights.version, newest),
            f"{answer.running_sequences}/{answer.max_running_sequences}",
            *_load([answer]),
            "-" if rates is None else f"{rates[0]:.0f}",
            "-" if rates is None else f"{rates[1]:.1f}",
            "-" if answer.last_update is None else str(answer.last_update),
        )
    table.add_section()
    rates_of_all = [r for info in processes if (r := recent.rates(info.address)) is not None]
    table.add_row(
        servers_text(len(processes) + len(answers) - len(infos)),
        "", "", "",
        str(sum(info.running_sequences for info in processes)),
        *_load(processes),
        f"{sum(tokens for tokens, _ in rates_of_all):.0f}" if rates_of_all else "-",
        "", "",
        style="bold",
    )  # fmt: skip
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


def _lag(version: int | None, newest: int | None) -> str:
    if version is None or newest is None:
        return "-"
    return "missed rollback" if version > newest else str(newest - version)


def _load(infos: Sequence[ServerInfo]) -> list[str]:
    used, total = sum(i.kv_tokens_used for i in infos), sum(i.kv_tokens_total for i in infos)
    return [
        str(sum(info.waiting_sequences for info in infos)),
        str(sum(info.held_sequences for info in infos)),
        f"{used / total if total else 0.0:.0%}",
    ]

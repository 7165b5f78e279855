"""``rollwire info``: what servers are, hold and are doing."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rollwire.types import ServerState

from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._rpc.client import RolloutClient, Timeouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._rpc.channels import Credentials

STYLES = {ServerState.SERVING: "green", ServerState.QUARANTINED: "red"}


async def show_info(
    servers: Sequence[str], credentials: Credentials, *, timeout: float, as_json: bool
) -> int:
    """Asks all servers at once and shows what they say; 1 if one of them does not answer."""
    answers = await asyncio.gather(*(_ask(server, credentials, timeout) for server in servers))
    infos = [answer for answer in answers if isinstance(answer, ServerInfo)]
    if as_json:
        told = [
            {"address": server, "error": str(answer)}
            if isinstance(answer, RollwireError)
            else plain(answer)
            for server, answer in zip(servers, answers, strict=True)
        ]
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    elif infos:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(infos))
    for answer in answers:
        if isinstance(answer, RollwireError):
            sys.stderr.write(f"rollwire: {answer}\n")
    return 0 if len(infos) == len(servers) else 1


async def _ask(server: str, credentials: Credentials, timeout: float) -> ServerInfo | RollwireError:
    try:
        async with RolloutClient(
            server, timeouts=Timeouts(call=timeout), credentials=credentials
        ) as client:
            return await client.info()
    except RollwireError as error:
        return error


def _table(infos: Sequence[ServerInfo]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("server")
    table.add_column("state")
    for name in ("version", "revision"):
        table.add_column(name, justify="right")
    table.add_column("digest")
    table.add_column("engine")
    table.add_column("model")
    for name in ("running", "waiting", "held", "KV tokens", "context"):
        table.add_column(name, justify="right")
    for info in infos:
        version = "-" if info.weights.version is None else str(info.weights.version)
        table.add_row(
            info.address,
            f"[{STYLES.get(info.state, 'yellow')}]{info.state.value}[/]",
            version,
            str(info.weights.revision),
            f"{info.weights.digest:016x}",
            info.engine,
            info.model,
            f"{info.running_sequences}/{info.max_running_sequences}",
            str(info.waiting_sequences),
            str(info.held_sequences),
            f"{info.kv_tokens_used}/{info.kv_tokens_total}",
            str(info.context_length),
        )
    return table


def plain(info: ServerInfo) -> dict[str, Any]:
    """As JSON has it."""
    told = asdict(info)
    told["state"] = info.state.value
    told["weights"]["digest"] = f"{info.weights.digest:016x}"  # JSON's numbers are too small
    told["logprob_bases"] = sorted(basis.value for basis in info.logprob_bases)
    return told

"""``rollwire info``: the model, state, weights and load of servers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from rollwire_client._cli import options, output
from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._rpc.client import RolloutClient, Timeouts

if TYPE_CHECKING:
    from rich.table import Table

    from rollwire_client._rpc.channel import Credentials


@options.command
async def info(
    context: typer.Context,
    servers: Annotated[
        list[str], typer.Argument(parser=options.parse_address, metavar="HOST:PORT...")
    ],
    *,
    timeout: options.AnswerTimeout = 5.0,
    as_json: options.Json = False,
) -> int:
    """Show the model, state, weights and load of servers."""
    answers = await asyncio.gather(*(_ask(server, context.obj, timeout) for server in servers))
    infos = [answer for answer in answers if isinstance(answer, ServerInfo)]
    if as_json:
        output.print_json(list(map(output.as_json, servers, answers)))
    elif infos:
        output.print_table(_table(infos))
    return output.print_errors(answers)


async def _ask(server: str, credentials: Credentials, timeout: float) -> output.Answer:
    timeouts = Timeouts(call=timeout)
    try:
        async with RolloutClient(server, timeouts=timeouts, credentials=credentials) as client:
            return await client.info()
    except RollwireError as error:
        return error


def _table(infos: list[ServerInfo]) -> Table:
    table = output.table(
        "server", "state", ">version", ">revision", "digest", "engine", "model",
        ">running", ">waiting", ">held", ">KV tokens", ">context",
    )  # fmt: skip
    for info in infos:
        table.add_row(
            info.address,
            output.state_text(info.state),
            "-" if info.weights.version is None else str(info.weights.version),
            str(info.weights.revision),
            output.hex_digest(info.weights.digest),
            info.engine,
            info.model,
            f"{info.running_sequences}/{info.max_running_sequences}",
            str(info.waiting_sequences),
            str(info.held_sequences),
            f"{info.kv_tokens_used}/{info.kv_tokens_total}",
            str(info.context_length),
        )
    return table

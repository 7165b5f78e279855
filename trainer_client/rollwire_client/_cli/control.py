"""``rollwire sleep``, ``wake``, ``pause`` and ``resume``: a fleet rests, and goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rollwire.types import SleepingWeights

from rollwire_client._arguments import MAX_SECONDS
from rollwire_client._cli import shared
from rollwire_client._errors import FleetCallError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._rpc.timeouts import SLEEP_TIMEOUT, Timeouts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._data import Asleep, FleetReport, Pause, Resumed, ServerInfo

T = TypeVar("T")

_Timeout = Annotated[float, shared.seconds_option("Seconds to wait for the answer of a server.")]


@shared.command
async def sleep(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    weights: Annotated[
        SleepingWeights,
        typer.Option(
            help="What becomes of the weights: they stay, move to host memory, or are discarded."
        ),
    ] = SleepingWeights.HOST_BACKUP,
    timeout: _Timeout = SLEEP_TIMEOUT,
    as_json: shared.Json = False,
) -> int:
    """Free the device memory of servers. Sequences under way are interrupted.

    Exit code 1 if a server does not sleep.
    """

    def shown(answer: Asleep) -> dict[str, Any]:
        return {
            "result": "already asleep" if answer.already_asleep else "asleep",
            "weights": answer.weights.value,
            "freed_bytes": answer.freed_bytes,
        }

    return await _call(
        context,
        servers,
        lambda fleet: fleet.sleep(weights, require="any", timeout=timeout),
        shown,
        as_json=as_json,
    )


@shared.command
async def wake(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    reload_checkpoint: Annotated[
        bool,
        typer.Option(
            "--reload-checkpoint",
            help="If the weights were discarded: load the checkpoint that the server started with, "
            "instead of awaiting an update.",
        ),
    ] = False,
    timeout: _Timeout = SLEEP_TIMEOUT,
    as_json: shared.Json = False,
) -> int:
    """Wake servers up. Exit code 1 if a server does not wake up."""

    def shown(answer: ServerInfo) -> dict[str, Any]:
        return {"result": answer.state.value, "version": answer.weights.version}

    return await _call(
        context,
        servers,
        lambda fleet: fleet.wake_up(
            reload_checkpoint=reload_checkpoint, require="any", timeout=timeout
        ),
        shown,
        as_json=as_json,
    )


@shared.command
async def pause(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    pause_id: Annotated[
        str, typer.Option(metavar="ID", help="Id of the pause. Default: a random one.")
    ] = "",
    lease: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=MAX_SECONDS,
            help="Seconds after which servers resume by themselves; 0: never. Default: the "
            "server's.",
        ),
    ] = None,
    timeout: shared.AnswerTimeout = 10.0,
    as_json: shared.Json = False,
) -> int:
    """Stop sampling on servers until they are resumed. Exit code 1 if a server does not pause."""

    def shown(answer: Pause) -> dict[str, Any]:
        return {
            "result": "paused",
            "pause_id": answer.pause_id,
            "held_sequences": answer.held_sequences,
        }

    return await _call(
        context,
        servers,
        lambda fleet: fleet.pause(pause_id, lease=lease, require="any"),
        shown,
        call_timeout=timeout,
        as_json=as_json,
    )


@shared.command
async def resume(
    context: typer.Context,
    servers: shared.FleetServers,
    *,
    pause_id: Annotated[
        str, typer.Option(metavar="ID", help="Id of the pause. Default: all pauses.")
    ] = "",
    timeout: shared.AnswerTimeout = 10.0,
    as_json: shared.Json = False,
) -> int:
    """End one pause of servers, or all. Exit code 1 if a server does not answer."""

    def shown(answer: Resumed) -> dict[str, Any]:
        return {
            "result": "still paused" if answer.remaining_pauses else "resumed",
            "resumed_sequences": answer.sequences,
            "remaining_pauses": answer.remaining_pauses,
        }

    return await _call(
        context,
        servers,
        lambda fleet: fleet.resume(pause_id, require="any"),
        shown,
        call_timeout=timeout,
        as_json=as_json,
    )


async def _call(
    context: typer.Context,
    servers: list[str],
    call: Callable[[Fleet], Awaitable[FleetReport[T]]],
    shown: Callable[[T], dict[str, Any]],
    *,
    call_timeout: float = 10.0,
    as_json: bool,
) -> int:
    """Prints a row for each server that did as asked, and an error for each other."""
    addresses = shared.fleet_addresses(servers)
    timeouts = Timeouts(start=0, call=call_timeout, close=0)
    async with Fleet(addresses, timeouts=timeouts, credentials=context.obj) as fleet:
        try:
            report = await call(fleet)
        except FleetCallError as error:
            report = error.report
    rows = {address: shown(answer) for address, answer in report.answers.items()}
    if as_json:
        done = [{"address": address, **row} for address, row in rows.items()]
        failed = [{"address": address, "error": str(e)} for address, e in report.errors.items()]
        shared.print_json([*done, *failed])
    elif rows:
        numbers = {n for row in rows.values() for n, value in row.items() if isinstance(value, int)}
        names = [
            (">" if name in numbers else "") + name.replace("_", " ")
            for name in next(iter(rows.values()))
        ]
        table = shared.table("server", *names)
        for address, row in rows.items():
            table.add_row(
                address, *("-" if value is None else str(value) for value in row.values())
            )
        shared.print_table(table)
    return shared.print_errors(report.errors.values())

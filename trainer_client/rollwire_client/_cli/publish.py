"""``rollwire publish``: a checkpoint folder becomes the policy of a fleet."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rollwire.types import KvPolicy

from rollwire_client._arguments import servers_text, update_text
from rollwire_client._cli import shared
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._publishing.checkpoint import open_checkpoint
from rollwire_client._publishing.publisher import Publisher, checked_kv_lag
from rollwire_client._rpc.timeouts import Timeouts

if TYPE_CHECKING:
    from rich.table import Table

    from rollwire_client._data import PublishReport, ServerReport
    from rollwire_client._publishing.publish_handle import PublishHandle

_REFRESH_SECONDS = 0.1


@shared.command
async def publish(
    context: typer.Context,
    checkpoint: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, metavar="CHECKPOINT", help="Folder of .safetensors files."
        ),
    ],
    servers: Annotated[
        list[str],
        typer.Option(
            "--server", metavar="HOST:PORT", help="A server, repeatable; or one dns:///NAME:PORT."
        ),
    ],
    version: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, help="The trainer's step. Default: none."),
    ] = None,
    kv_policy: Annotated[
        KvPolicy, typer.Option(help="What to do with the keys and values of running sequences.")
    ] = KvPolicy.KEEP,
    max_kv_lag: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**32 - 1,
            help="With keep: how many commits old keys and values may get before they are computed "
            "again. Default: any number.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Transport backend. Default: the first that all servers can use."),
    ] = None,
    *,
    allow_version_rollback: Annotated[
        bool,
        typer.Option(
            "--allow-version-rollback", help="Allow a lower version than the servers have."
        ),
    ] = False,
    timeout: Annotated[
        float, shared.seconds_option("Seconds to wait until a server is up.")
    ] = 10.0,
    as_json: shared.Json = False,
) -> int:
    """Make a checkpoint the policy of a fleet. Exit code 1 if a server does not commit it."""
    try:
        checked_kv_lag(kv_policy, max_kv_lag)
    except ValueError as wrong:
        raise typer.BadParameter(str(wrong)) from None
    addresses, timeouts = shared.fleet_addresses(servers), Timeouts(start=timeout)
    with open_checkpoint(checkpoint) as tensors:
        async with Fleet(addresses, timeouts=timeouts, credentials=context.obj) as fleet:
            publisher = Publisher(
                fleet, kv_policy=kv_policy, max_kv_lag=max_kv_lag, backend=backend, delta=False
            )
            handle = await publisher.publish(
                version, tensors, allow_version_rollback=allow_version_rollback
            )
            report = await _with_progress(handle)
    if as_json:
        shared.print_json(_as_json(report))
    else:
        shared.print_table(_table(report))
    for server in report.failed:
        error = str(server.error)
        where = "" if server.address in error else f"{server.address}: "
        shared.print_error(f"{where}{error}")
    return 1 if report.failed else 0


async def _with_progress(handle: PublishHandle) -> PublishReport:
    """The report; until it is there, a bar on a terminal shows how far the publish is."""
    committed = asyncio.ensure_future(handle.committed)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    try:
        with bar:
            task = bar.add_task("sending", total=handle.total_bytes)
            while not committed.done():
                phase = "committing" if handle.sent_bytes >= handle.total_bytes else "sending"
                bar.update(task, completed=handle.sent_bytes, description=phase)
                await asyncio.wait([committed], timeout=_REFRESH_SECONDS)
    except asyncio.CancelledError:
        await handle.cancel()
        raise
    return await committed


def _table(report: PublishReport) -> Table:
    table = shared.table(
        "server", "result",
        ">revision", ">received MB", ">staging s", ">paused ms", ">held",
        title=f"{update_text(report.version)}, digest {shared.hex_digest(report.digest)}: "
        f"{report.bytes / 1e6:.1f} MB to {servers_text(len(report.servers))} "
        f"in {report.seconds:.2f} s{''.join(f', {cast}' for cast in report.casts)}",
    )  # fmt: skip
    for server in report.servers:
        table.add_row(
            server.address,
            _result(server),
            "-" if server.weights is None else str(server.weights.revision),
            f"{server.received_bytes / 1e6:.1f}",
            f"{server.staging_seconds:.2f}",
            f"{server.paused_seconds * 1e3:.1f}",
            str(server.held_sequences),
        )
    return table


def _result(server: ServerReport) -> str:
    if server.weights is None:
        return "[red]failed[/]"
    return "[green]already current[/]" if server.already_current else "[green]committed[/]"


def _as_json(report: PublishReport) -> dict[str, Any]:
    fields = asdict(report)
    fields["digest"] = shared.hex_digest(report.digest)
    for server, entry in zip(report.servers, fields["servers"], strict=True):
        entry["error"] = None if server.error is None else str(server.error)
        if server.weights is not None:
            entry["weights"]["digest"] = shared.hex_digest(server.weights.digest)
    return fields

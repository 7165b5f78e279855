"""``rollwire publish``: a checkpoint folder becomes the policy of a fleet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from rollwire_client._errors import MissingDependencyError, SourceError
from rollwire_client._fleet.fleet import Fleet
from rollwire_client._publishing.publisher import Publisher
from rollwire_client._rpc.client import Timeouts
from rollwire_client._wording import servers_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rollwire.types import KvPolicy
    from torch import Tensor

    from rollwire_client._fleet.addresses import Addresses
    from rollwire_client._publishing.publish_handle import PublishHandle
    from rollwire_client._publishing.report import PublishReport, ServerReport
    from rollwire_client._rpc.channels import Credentials

_REFRESH = 0.1  # seconds between two looks at the progress


async def publish_checkpoint(
    checkpoint: Path,
    servers: Addresses,
    version: int | None,
    credentials: Credentials,
    *,
    kv_policy: KvPolicy,
    backend: str | None,
    rollback: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Publishes the tensors of a folder and shows the report; 1 if one of the servers failed."""
    with checkpoint_tensors(checkpoint) as tensors:
        async with Fleet(
            servers, timeouts=Timeouts(start=timeout), credentials=credentials
        ) as fleet:
            publisher = Publisher(fleet, kv_policy=kv_policy, backend=backend)
            handle = await publisher.publish(version, tensors, allow_version_rollback=rollback)
            report = await _followed(handle)
    if as_json:
        sys.stdout.write(json.dumps(_plain(report), indent=2) + "\n")
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(report))
    for server in report.failed:
        told = str(server.error)
        where = "" if server.address in told else f"{server.address}: "
        sys.stderr.write(f"rollwire: {where}{told}\n")
    return 1 if report.failed else 0


@contextlib.contextmanager
def checkpoint_tensors(folder: Path) -> Iterator[Mapping[str, Tensor]]:
    """The tensors of all safetensors files in a folder, each read when it is asked for.

    Raises:
        SourceError: There are none, or a file cannot be read.
        MissingDependencyError: safetensors or torch is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a checkpoint needs {error.name}: pip install 'rollwire[server]'"
        ) from error
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise SourceError(f"{folder} has no .safetensors files: it is no checkpoint folder")
    with contextlib.ExitStack() as stack:
        where: dict[str, Any] = {}
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise SourceError(f"{path} cannot be read: {error}") from error
            where |= dict.fromkeys(file.keys(), file)
        yield _Tensors(where)


class _Tensors(Mapping[str, "Tensor"]):
    """Tensors by name, in files that are open."""

    def __init__(self, where: dict[str, Any]) -> None:
        self._where = where

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


async def _followed(handle: PublishHandle) -> PublishReport:
    """The report; on a terminal a bar shows how it goes meanwhile."""
    committed = asyncio.ensure_future(handle.committed)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty(),
    )  # fmt: skip
    try:
        with bar:
            task = bar.add_task("sending", total=handle.total_bytes)
            while not committed.done():
                done = handle.sent_bytes >= handle.total_bytes
                what = "committing" if done else "sending"
                bar.update(task, completed=handle.sent_bytes, description=what)
                await asyncio.wait([committed], timeout=_REFRESH)
    except asyncio.CancelledError:
        await handle.cancel()
        raise
    return await committed


def _table(report: PublishReport) -> Table:
    version = "untagged" if report.version is None else f"version {report.version}"
    table = Table(
        box=None, header_style="bold", pad_edge=False, title_justify="left", title_style="",
        title=f"{version}, digest {report.digest:016x}: {report.bytes / 1e6:.1f} MB to "
        f"{servers_text(len(report.servers))} in {report.seconds:.2f} s",
    )  # fmt: skip
    table.add_column("server")
    table.add_column("what came of it")
    for name in ("revision", "received MB", "staging s", "paused ms", "held"):
        table.add_column(name, justify="right")
    for server in report.servers:
        table.add_row(
            server.address,
            _outcome(server),
            "-" if server.weights is None else str(server.weights.revision),
            f"{server.received_bytes / 1e6:.1f}",
            f"{server.staging_seconds:.2f}",
            f"{server.paused_seconds * 1e3:.1f}",
            str(server.held_sequences),
        )
    return table


def _outcome(server: ServerReport) -> str:
    if server.weights is None:
        return "[red]failed[/]"
    return "[green]already current[/]" if server.already_current else "[green]committed[/]"


def _plain(report: PublishReport) -> dict[str, Any]:
    told = asdict(report)
    told["digest"] = f"{report.digest:016x}"  # JSON's numbers are too small
    for server, entry in zip(report.servers, told["servers"], strict=True):
        entry["error"] = None if server.error is None else str(server.error)
        if server.weights is not None:
            entry["weights"]["digest"] = f"{server.weights.digest:016x}"
    return told

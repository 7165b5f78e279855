"""What several subcommands share: flags, and how they print tables, JSON and errors."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table
from rollwire.types import ServerState

from rollwire_client._arguments import MAX_SECONDS, server_address
from rollwire_client._data import ServerInfo
from rollwire_client._errors import RollwireError
from rollwire_client._fleet.server_pool import Addresses, AddressSource

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

P = ParamSpec("P")

Answer = ServerInfo | RollwireError

# Told apart on dark and on light ground; versions beyond these begin again.
VERSION_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
_STATE_STYLES = {ServerState.SERVING: "green", ServerState.QUARANTINED: "red"}


def command(function: Callable[P, Coroutine[Any, Any, int]]) -> Callable[P, int]:
    """Makes a coroutine function a subcommand; what it returns is the exit code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        return asyncio.run(function(*args, **kwargs))

    return run


def parse_address(value: str) -> str:
    try:
        return server_address(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_token_ids(value: str) -> list[int]:
    parts = value.replace(",", " ").split()
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{value!r} is not token ids, such as 1,2,3")
    return [int(part) for part in parts]


def fleet_addresses(values: list[str]) -> Addresses:
    """The addresses of a fleet: several servers, or one name for all."""
    servers: Addresses = values[0] if values[0].startswith("dns:") and not values[1:] else values
    try:
        AddressSource(servers)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return servers


def seconds_option(what: str, least: float = 0.1) -> Any:
    return typer.Option(min=least, max=MAX_SECONDS, help=what)


def token_ids_option(what: str) -> Any:
    return typer.Option(parser=parse_token_ids, metavar="1,2,3", help=what)


FleetServers = Annotated[
    list[str], typer.Argument(metavar="HOST:PORT...", help="The servers, or one dns:///NAME:PORT.")
]
AnswerTimeout = Annotated[float, seconds_option("Seconds to wait for an answer.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def table(*columns: str, title: str | None = None) -> Table:
    """A table without lines; a column whose name begins with ``>`` is justified right."""
    made = Table(
        box=None, header_style="bold", pad_edge=False,
        title=title, title_justify="left", title_style="",
    )  # fmt: skip
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    return made


def state_text(state: ServerState) -> str:
    return f"[{_STATE_STYLES.get(state, 'yellow')}]{state.value}[/]"


def version_cell(version: int | None) -> str:
    return "-" if version is None else str(version)


def hex_digest(digest: int) -> str:
    """As text everywhere, as numbers of JSON have too few bits."""
    return f"{digest:016x}"


def answer_fields(address: str, answer: Answer) -> dict[str, Any]:
    """A server's answer, for JSON."""
    if isinstance(answer, RollwireError):
        return {"address": address, "error": str(answer)}
    fields = asdict(answer)
    fields["state"] = answer.state.value
    fields["weights"]["digest"] = hex_digest(answer.weights.digest)
    if answer.sleeping_weights is not None:
        fields["sleeping_weights"] = answer.sleeping_weights.value
    fields["logprob_bases"] = sorted(basis.value for basis in answer.logprob_bases)
    return fields


def print_table(shown: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 160).print(shown)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_error(error: object) -> None:
    """One line on stderr."""
    sys.stderr.write(f"rollwire: {' '.join(str(error).split())}\n")


def print_errors(answers: Iterable[Answer]) -> int:
    """Prints the errors among the servers' answers; the exit code: 1 if there are any."""
    errors = [answer for answer in answers if isinstance(answer, RollwireError)]
    for error in errors:
        print_error(error)
    return 1 if errors else 0

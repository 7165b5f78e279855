"""Flags and arguments that several subcommands share."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from rollwire_client._arguments import MAX_SECONDS, server_address
from rollwire_client._fleet.addresses import Addresses, address_source

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

P = ParamSpec("P")


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
        address_source(servers)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    return servers


def seconds(what: str, least: float = 0.1) -> Any:
    return typer.Option(min=least, max=MAX_SECONDS, help=what)


def token_ids(what: str) -> Any:
    return typer.Option(parser=parse_token_ids, metavar="1,2,3", help=what)


FleetServers = Annotated[
    list[str], typer.Argument(metavar="HOST:PORT...", help="The servers, or one dns:///NAME:PORT.")
]
AnswerTimeout = Annotated[float, seconds("Seconds to wait for an answer.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

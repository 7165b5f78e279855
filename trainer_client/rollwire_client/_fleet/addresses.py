"""Where a fleet's servers are: a list of addresses, a DNS name, or a function of the user's."""

from __future__ import annotations

import asyncio
import inspect
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from rollwire_client._arguments import server_address
from rollwire_client._concurrency import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

Addresses: TypeAlias = (
    "str | Iterable[str] | Callable[[], Iterable[str]] | Callable[[], Awaitable[Iterable[str]]]"
)

_DNS = "dns:///"


@dataclass(frozen=True, slots=True)
class AddressSource:
    """Says where the servers are now.

    Attributes:
        description: What it is, for messages.
        lookup: Gives HOST:PORT of each server.
        fixed: The addresses never change.
        server_name: What the certificates of all servers say, if that is known.
    """

    description: str
    lookup: Callable[[], Awaitable[Iterable[str]]]
    fixed: bool = False
    server_name: str | None = None

    async def resolve(self, timeout: float) -> tuple[str, ...]:
        """HOST:PORT of each server, each once.

        Raises:
            LookupError: There is no answer within ``timeout`` seconds, none that can be used, or
                there are no servers.
        """
        try:
            async with asyncio.timeout(timeout):
                addresses = _checked(await self.lookup())
        except TimeoutError as error:
            raise LookupError(f"{self.description}: no answer within {timeout:g} s") from error
        except Exception as error:
            raise LookupError(f"{self.description}: {error or type(error).__name__}") from error
        if not addresses:
            raise LookupError(f"{self.description}: there are no servers")
        return addresses


def address_source(addresses: Addresses) -> AddressSource:
    if callable(addresses):
        return _from_function(addresses)
    if isinstance(addresses, str):
        if not addresses.startswith(_DNS):
            raise TypeError(
                f"addresses is the text {addresses!r}: give a list of HOST:PORT, "
                f"or {_DNS}NAME:PORT for a name that is resolved again and again"
            )
        return _from_name(server_address(addresses.removeprefix(_DNS)))
    listed = _checked(addresses)
    if not listed:
        raise ValueError("a fleet needs at least one server address")

    async def lookup() -> Iterable[str]:
        return listed

    return AddressSource(", ".join(listed), lookup, fixed=True)


def _from_name(address: str) -> AddressSource:
    """A name with an address for each server, as headless services have it."""
    name, _, port = address.rpartition(":")
    name = name.strip("[]")

    async def lookup() -> Iterable[str]:
        found = await run_in_thread(
            lambda: socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
        )
        hosts = sorted({str(address[0]) for *_, address in found})  # resolvers shuffle them
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    return AddressSource(f"{_DNS}{name}:{port}", lookup, server_name=name)


def _from_function(function: Callable[[], Any]) -> AddressSource:
    async def lookup() -> Iterable[str]:
        if inspect.iscoroutinefunction(function):
            answer = function()
        else:  # it may block
            answer = await run_in_thread(function)
        addresses: Iterable[str] = await answer if inspect.isawaitable(answer) else answer
        return addresses

    name = getattr(function, "__qualname__", repr(function))
    return AddressSource(f"the addresses that {name} gives", lookup)


def _checked(addresses: Iterable[str]) -> tuple[str, ...]:
    if isinstance(addresses, str):
        raise TypeError(f"the addresses are the text {addresses!r}: give a list of HOST:PORT")
    return tuple(dict.fromkeys(server_address(address) for address in addresses))

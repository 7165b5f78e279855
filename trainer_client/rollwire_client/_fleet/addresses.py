"""Where a fleet's servers are: a list, a name that stands for some, or whoever knows."""

from __future__ import annotations

import asyncio
import inspect
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from rollwire_client._concurrency.threads import run_in_thread
from rollwire_client._rpc.host_address import server_address

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

Addresses: TypeAlias = (
    "str | Iterable[str] | Callable[[], Iterable[str]] | Callable[[], Awaitable[Iterable[str]]]"
)

_DNS = "dns:///"


class AddressSource(Protocol):
    """Says where the servers are now."""

    @property
    def fixed(self) -> bool:
        """Whether it always says the same."""

    @property
    def server_name(self) -> str | None:
        """What the certificates of all servers say, if that is known."""

    async def now(self) -> tuple[str, ...]:
        """HOST:PORT of each server, each once; empty if there is none.

        Raises:
            Exception: It cannot say.
        """


def address_source(addresses: Addresses) -> AddressSource:
    """What a fleet was given, as the library uses it.

    Raises:
        TypeError, ValueError: It is none of the three.
    """
    if callable(addresses):
        return _Asked(addresses)
    if isinstance(addresses, str):
        if not addresses.startswith(_DNS):
            raise TypeError(
                f"addresses is the text {addresses!r}: give a list of HOST:PORT, "
                f"or {_DNS}NAME:PORT for a name that is resolved again and again"
            )
        name, _, port = server_address(addresses.removeprefix(_DNS)).rpartition(":")
        return _Resolved(name.strip("[]"), int(port))
    listed = _each_once(addresses)
    if not listed:
        raise ValueError("a fleet needs at least one server address")
    return _Listed(listed)


@dataclass(frozen=True, slots=True)
class _Listed:
    addresses: tuple[str, ...]
    fixed = True
    server_name = None

    async def now(self) -> tuple[str, ...]:
        return self.addresses

    def __str__(self) -> str:
        return ", ".join(self.addresses)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A name with an address for each server, as headless services have it."""

    name: str
    port: int
    fixed = False

    @property
    def server_name(self) -> str:
        return self.name

    async def now(self) -> tuple[str, ...]:
        found = await run_in_thread(
            lambda: socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        )
        hosts = sorted({str(address[0]) for *_, address in found})  # resolvers shuffle them
        return tuple(
            f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}" for host in hosts
        )

    def __str__(self) -> str:
        return f"{_DNS}{self.name}:{self.port}"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A function of the user's; one that is not async may block, so it gets a thread."""

    ask: Callable[[], Iterable[str]] | Callable[[], Awaitable[Iterable[str]]]
    fixed = False
    server_name = None

    async def now(self) -> tuple[str, ...]:
        ask: Callable[[], Any] = self.ask
        told = ask() if inspect.iscoroutinefunction(ask) else await run_in_thread(ask)
        return _each_once(await told if inspect.isawaitable(told) else told)

    def __str__(self) -> str:
        return f"the addresses that {getattr(self.ask, '__qualname__', repr(self.ask))} gives"


def _each_once(addresses: Iterable[str]) -> tuple[str, ...]:
    if isinstance(addresses, str):
        raise TypeError(f"the addresses are the text {addresses!r}: give a list of HOST:PORT")
    return tuple(dict.fromkeys(server_address(address) for address in addresses))


async def ask(source: AddressSource, *, timeout: float) -> tuple[str, ...]:
    """What the source says.

    Raises:
        LookupError: It says nothing within ``timeout`` seconds, nothing that can be used, or that
            there are no servers.
    """
    try:
        async with asyncio.timeout(timeout):
            addresses = await source.now()
    except TimeoutError as error:
        raise LookupError(f"{source}: no answer within {timeout:g} s") from error
    except Exception as error:
        raise LookupError(f"{source}: {error or type(error).__name__}") from error
    if not addresses:
        raise LookupError(f"{source}: there are no servers")
    return addresses

"""Addresses of servers, and the one by which they reach this machine."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+(%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")


def server_address(value: str) -> str:
    """``value``, if it is HOST:PORT; an IPv6 address is in brackets, as in [::1]:50051.

    Raises:
        TypeError: It is no text.
        ValueError: It is something else, such as a URL or a host without a port.
    """
    if not isinstance(value, str):
        raise TypeError(f"the address {value!r} is not text such as '127.0.0.1:50051'")
    if not (match := _ADDRESS.fullmatch(value)) or not 0 < int(match["port"]) < 65536:
        raise ValueError(
            f"{value!r} is not HOST:PORT, such as 127.0.0.1:50051, with a port from 1 to 65535"
        )
    return value


def local_address(servers: Iterable[str]) -> str:
    """The local address of the route to the servers (HOST:PORT each): one that is not loopback, if
    there is any, as remote servers cannot reach that. Blocks while names are resolved.

    Raises:
        OSError: There is no route to any of them.
    """
    found: list[str] = []
    problem: OSError | None = None
    for server in servers:
        host, _, port = server.rpartition(":")
        try:
            address = _route(host.strip("[]"), int(port))
        except OSError as error:
            problem = error
            continue
        if not ipaddress.ip_address(address).is_loopback:
            return address
        found.append(address)
    if not found:
        raise problem or OSError("there are no servers")
    return found[0]


def _route(host: str, port: int) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # a datagram socket: this looks up the route and sends nothing
        address: str = probe.getsockname()[0]
        return address

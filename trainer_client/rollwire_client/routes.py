"""Which of this machine's addresses a server can reach."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def local_address(servers: Iterable[str]) -> str:
    """The local address of the route to the servers; blocks while names are resolved.

    Where there are several, one that is not loopback: remote servers cannot reach that.

    Args:
        servers: HOST:PORT each, or such a gRPC target.

    Raises:
        OSError: There is no route to any of them.
    """
    found: list[str] = []
    problem: OSError | None = None
    for server in servers:
        host, _, port = server.rpartition("/")[2].rpartition(":")
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
        probe.connect(target)  # of a datagram socket: looks the route up, sends nothing
        address: str = probe.getsockname()[0]
        return address

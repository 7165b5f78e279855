"""Where the members of a group meet: "host:port"."""

from __future__ import annotations

import ipaddress
import socket

from rollwire_transport._errors import TransportError, TransportTimeout

CONNECT_SECONDS = 5.0
"""The longest that a living rank 0 may take to accept a connection."""


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Listens on an address of this machine; returns the listener and "host:port".

    Raises:
        ValueError: ``host`` names no one address.
        OSError: The address cannot be listened on.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(f"host {host!r} is no address by which the others reach this machine")
    # Bound here and handed over: a port that is found free and bound later may be taken.
    listener = socket.create_server(address[:2], family=family, backlog=512)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connect(rendezvous: str, timeout: float) -> socket.socket:
    """Connects to a meeting, in ``timeout`` or five seconds.

    Raises:
        TransportTimeout: Nothing answers there.
        TransportError: Nobody meets there.
    """
    try:
        return socket.create_connection(split(rendezvous), min(timeout, CONNECT_SECONDS))
    except OSError as error:
        kind = TransportTimeout if isinstance(error, TimeoutError) else TransportError
        raise kind(f"nobody meets at {rendezvous}: {error}", "rank 0") from error


def split(rendezvous: str) -> tuple[str, int]:
    """The host and the port of "host:port".

    Raises:
        TransportError: It is something else.
    """
    host, _, port = rendezvous.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # as the socket module does, which then raises no OSError
        number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    except UnicodeError:
        number = 0
    if not host or not 0 < number < 1 << 16:
        raise TransportError(f"rendezvous {rendezvous!r} is not host:port", "rank 0")
    return host, number

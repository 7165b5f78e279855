"""Serves metrics over HTTP on the event loop, as much of HTTP as Prometheus speaks.

Clients may be slow, silent or many: a connection lasts a few seconds, and the oldest is closed when
there are too many, so that a scrape comes through. (prometheus_client's own server starts a thread
for each connection.)
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MAX_CONNECTIONS = 64
CONNECTION_SECONDS = 5.0
REQUEST_BYTES = 16 << 10
PATHS = {"/metrics", "/"}


class MetricsServer:
    """Answers scrapes from ``open`` to ``close``, and collects the registry on the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], None] = {}  # oldest first

    async def open(self, address: str) -> str:
        """Listens on HOST:PORT; returns the address with the port that was chosen.

        Raises:
            OSError: The address cannot be listened on.
        """
        host, _, port = address.rpartition(":")
        name = host.removeprefix("[").removesuffix("]")
        family, _, _, _, bound = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0]
        both = family is socket.AF_INET6 and bound[0] == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(bound[:2], family=family, dualstack_ipv6=both)
        self._server = await asyncio.start_server(
            self._on_connection, sock=listener, limit=REQUEST_BYTES
        )
        return f"{host}:{listener.getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            oldest.cancel()
            del self._connections[oldest]
        task = asyncio.create_task(self._answer(reader, writer), name="answer a scrape")
        self._connections[task] = None
        task.add_done_callback(lambda done: self._connections.pop(done, None))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.transport.set_write_buffer_limits(0)  # ``drain`` waits until all is sent
            async with asyncio.timeout(CONNECTION_SECONDS):
                writer.write(self._response(await reader.readuntil(b"\r\n\r\n")))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client that does not ask or does not read gets no answer
        finally:
            writer.transport.abort()

    def _response(self, request: bytes) -> bytes:
        first, *lines = request.decode("latin-1").split("\r\n")
        method, _, target = first.partition(" ")
        if method != "GET":
            return _message(HTTPStatus.METHOD_NOT_ALLOWED)
        if target.split(" ")[0].partition("?")[0] not in PATHS:
            return _message(HTTPStatus.NOT_FOUND)
        headers = (line.partition(":") for line in lines)
        accepted = [value.strip() for name, _, value in headers if name.lower() == "accept"]
        encode, kind = choose_encoder(",".join(accepted))
        return _message(HTTPStatus.OK, encode(self._registry), kind)


def _message(status: HTTPStatus, body: bytes = b"", kind: str = "text/plain") -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body

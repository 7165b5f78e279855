"""HTTP/2 by hand: callers that never send the end of a message, or never take an answer."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
ACKNOWLEDGED, END_STREAM, END_HEADERS = 1, 1, 4
FIRST_WINDOW = 4  # the name of a setting: of every stream
FRAME_BYTES = 16384
USUAL_WINDOW = 65535


@dataclass
class _Call:
    unsent: memoryview
    window: int


@dataclass
class RawCalls:
    """Calls of one method over one connection.

    Args:
        method: Its path.
        calls: How many.
        message: Of each.
        whole: Whether its last byte is sent too.
        takes: Bytes of each answer, before the server has to wait.
    """

    method: str
    calls: int
    message: bytes
    whole: bool = False
    takes: int = USUAL_WINDOW
    sent: int = field(default=0, init=False)
    _calls: dict[int, _Call] = field(default_factory=dict, init=False)
    _window: int = field(default=USUAL_WINDOW, init=False)
    _first_window: int = field(default=USUAL_WINDOW, init=False)

    async def run(self, address: str, local: str | None = None) -> None:
        """Sends as much as the server takes in; until it hangs up, or for ever.

        Args:
            address: The server's.
            local: The address to come from.
        """
        host, _, port = address.rpartition(":")
        source = (local, 0) if local else None
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=source)
        framed = struct.pack(">BI", 0, len(self.message)) + self.message
        data = memoryview(framed if self.whole else framed[:-1])
        try:
            settings = struct.pack(">HI", FIRST_WINDOW, self.takes)
            writer.write(PREFACE + _frame(SETTINGS, 0, 0, settings))
            for i in range(self.calls):
                stream = 1 + 2 * i
                writer.write(_frame(HEADERS, END_HEADERS, stream, _headers(self.method)))
                self._calls[stream] = _Call(data, self._first_window)
            while True:
                self._send(writer)
                await writer.drain()
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream = int.from_bytes(head[5:]) & 0x7FFFFFFF
                self._take(writer, kind, flags, stream, await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _send(self, writer: asyncio.StreamWriter) -> None:
        for stream, call in self._calls.items():
            while call.unsent and (room := min(FRAME_BYTES, self._window, call.window)) > 0:
                data, call.unsent = call.unsent[:room], call.unsent[room:]
                ends = END_STREAM if self.whole and not call.unsent else 0
                writer.write(_frame(DATA, ends, stream, data))
                self._window -= len(data)
                call.window -= len(data)
                self.sent += len(data)

    def _take(
        self, writer: asyncio.StreamWriter, kind: int, flags: int, stream: int, said: bytes
    ) -> None:
        if kind == WINDOW:
            more = int.from_bytes(said)
            if stream == 0:
                self._window += more
            elif call := self._calls.get(stream):
                call.window += more
        elif kind == SETTINGS and not flags & ACKNOWLEDGED:
            for at in range(0, len(said), 6):
                name, value = struct.unpack(">HI", said[at : at + 6])
                if name == FIRST_WINDOW:
                    for call in self._calls.values():
                        call.window += value - self._first_window
                    self._first_window = value
            writer.write(_frame(SETTINGS, ACKNOWLEDGED, 0, b""))
        elif kind == PING and not flags & ACKNOWLEDGED:
            writer.write(_frame(PING, ACKNOWLEDGED, 0, said))
        elif kind == RESET:  # it is over
            self._calls.pop(stream, None)


async def give_up(address: str, method: str, calls: int) -> None:
    """Makes calls and gives each up at once, in bursts; returns when all are sent, or when the
    server hangs up.
    """
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    taking = asyncio.create_task(reader.read())  # so that the server never waits for us
    cancelled = (8).to_bytes(4)
    try:
        writer.write(PREFACE + _frame(SETTINGS, 0, 0, b""))
        for stream in range(1, 2 * calls, 2):
            writer.write(_frame(HEADERS, END_HEADERS, stream, _headers(method)))
            writer.write(_frame(RESET, 0, stream, cancelled))
            if stream % 200 == 1:
                await writer.drain()
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        taking.cancel()
        writer.close()
        await asyncio.gather(taking, return_exceptions=True)


def _frame(kind: int, flags: int, stream: int, data: bytes | memoryview) -> bytes:
    return b"".join((len(data).to_bytes(3), bytes([kind, flags]), stream.to_bytes(4), data))


def _headers(method: str) -> bytes:
    told = {
        ":method": "POST", ":scheme": "http", ":path": method, ":authority": "a",
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    return b"".join(b"\0" + _text(name) + _text(value) for name, value in told.items())


def _text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()  # shorter than 127

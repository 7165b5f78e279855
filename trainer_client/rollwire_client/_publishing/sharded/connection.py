"""What two processes of a sharded trainer say to each other: short messages over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import threading

_LONGEST = 1 << 20  # bytes of a message


class Word(enum.Enum):
    """What a message is about; some have a text."""

    HERE = "here"  # → rank 0: has called, and with what
    FAILED = "failed"  # → rank 0: why
    AGAIN = "again"  # rank 0 →: iterate from the beginning
    NEXT = "next"  # rank 0 →: take the next tensor; the name of the last one
    GATHER = "gather"  # rank 0 →: make the tensor of this name whole
    ALIVE = "alive"  # rank 0 →: every second
    CONFIRM = "confirm"  # rank 0 →: all is sent; are the tensors as they were?
    UNCHANGED = "unchanged"  # → rank 0: they are
    CHANGED = "changed"  # → rank 0: which are not
    RELEASED = "released"  # rank 0 →: the tensors may change again
    OVER = "over"  # rank 0 →: the publish failed; why


class Line:
    """One end of a connection. One task hears; any thread tells."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0)
        self._connection = connection
        self._heard = b""
        self._telling = threading.Lock()

    def tell(self, word: Word, text: str = "") -> None:
        """Sends a message; never waits.

        Raises:
            ConnectionError: The other end is gone, or has not listened for many messages.
        """
        message = json.dumps([word.value, text]).encode() + b"\n"
        with self._telling:
            try:
                sent = self._connection.send(message)
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if sent < len(message):
                self.close()
                raise ConnectionError("it does not listen")

    async def hear(self) -> tuple[Word, str]:
        """The next message. When this is cancelled none is lost.

        Raises:
            ConnectionError: The other end is gone, or says what makes no sense.
        """
        while b"\n" not in self._heard:
            await self._readable()
            try:
                piece = self._connection.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not piece:
                raise ConnectionError("it hung up")
            self._heard += piece
            if len(self._heard) > _LONGEST:
                raise ConnectionError("it sent a message without an end")
        message, _, self._heard = self._heard.partition(b"\n")
        return _read(message)

    def dismiss(self, why: str) -> None:
        """Hangs up; the other end hears ``OVER`` first."""
        with contextlib.suppress(ConnectionError):
            self.tell(Word.OVER, why)
        self.close()

    def close(self) -> None:
        """Hangs up. Any number of times."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    async def _readable(self) -> None:
        if (number := self._connection.fileno()) < 0:
            raise ConnectionError("it was closed")
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(number, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(number)


def _read(message: bytes) -> tuple[Word, str]:
    try:
        word, text = json.loads(message)
        return Word(word), str(text)
    except (ValueError, TypeError) as error:
        raise ConnectionError("it says what makes no sense") from error

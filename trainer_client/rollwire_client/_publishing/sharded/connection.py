"""Short messages over TCP between two processes of a sharded trainer."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import socket
import threading

_MAX_MESSAGE_BYTES = 1 << 20


class Message(enum.Enum):
    """The kind of a message; some have a text.

    To rank 0: CALLED, FAILED, UNCHANGED, CHANGED. From rank 0: the others.
    """

    CALLED = "called"  # the call that was made, with what all ranks must agree on
    FAILED = "failed"  # why
    UNCHANGED = "unchanged"  # the tensors are as they were
    CHANGED = "changed"  # which tensors are not
    RESTART = "restart"  # iterate from the beginning
    NEXT = "next"  # take the next tensor; the name of the last one
    # Cast to this dtype, if any, and take part in gathering the tensor of this name.
    GATHER = "gather"
    CHECK = "check"  # that no tensor has changed, before a source is run to its end
    HEARTBEAT = "heartbeat"
    CONFIRM = "confirm"  # all is sent: are the tensors unchanged?
    RELEASED = "released"  # the tensors may change again
    ABORTED = "aborted"  # the publish failed; why


class Connection:
    """One end of a connection. One task receives; any thread sends."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(0)
        self._socket = connection
        self._received = b""
        self._sending = threading.Lock()

    def send(self, message: Message, text: str = "") -> None:
        """Sends a message; never blocks.

        Raises:
            ConnectionError: The other end is gone, or has not read many messages.
        """
        line = json.dumps([message.value, text]).encode() + b"\n"
        with self._sending:
            try:
                sent = self._socket.send(line)
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if sent < len(line):
                self.close()
                raise ConnectionError("it does not read its messages")

    async def receive(self) -> tuple[Message, str]:
        """The next message. A cancelled call loses none.

        Raises:
            ConnectionError: The other end is gone, or sent an invalid message.
        """
        while b"\n" not in self._received:
            await self._wait_readable()
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not data:
                raise ConnectionError("it closed the connection")
            self._received += data
            if len(self._received) > _MAX_MESSAGE_BYTES:
                raise ConnectionError("it sent a message that is too long")
        line, _, self._received = self._received.partition(b"\n")
        try:
            kind, text = json.loads(line)
            return Message(kind), str(text)
        except (ValueError, TypeError) as error:
            raise ConnectionError("it sent an invalid message") from error

    def abort(self, why: str) -> None:
        """Closes the connection after an ``ABORTED`` message."""
        with contextlib.suppress(ConnectionError):
            self.send(Message.ABORTED, why)
        self.close()

    def close(self) -> None:
        """Closes the connection. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    async def _wait_readable(self) -> None:
        if (number := self._socket.fileno()) < 0:
            raise ConnectionError("it was closed")
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(number, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(number)

"""Messages over a TCP connection between two members: a type, a length, a body of a few bytes.

Bodies are fixed structs or opaque bytes: nothing that arrives is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from rollwire_transport._errors import TransportError, TransportTimeout

if TYPE_CHECKING:
    import threading

MAX_BODY_BYTES = 1 << 20  # gloo's and UCX's addresses take a few kilobytes

_PREFIX = struct.Struct("<BI")
_POLL_SECONDS = 0.05
_CHUNK_BYTES = 1 << 16


class MessageType(enum.IntEnum):
    """What members send each other; see ``rendezvous`` and ``failure_detector``."""

    HELLO = 1
    REPLY = 2
    START = 3
    VALUE = 4  # what a backend exchanges to connect
    STEP = 5
    RECEIVING = 6
    FORWARDING = 7
    WORKING = 8
    FINISHED = 9
    TIMED_OUT = 10
    PEER_LOST = 11
    ABORTED = 12


class Frame(NamedTuple):
    """One message."""

    type: int
    body: bytes


class FramedSocket:
    """One end of a connection. Used by one thread, except for ``hang_up``.

    Args:
        connection: A connected TCP socket, which this owns from now on.
        peer: Who is at the other end, for errors.
        max_body_bytes: A message that announces more is an error.

    Attributes:
        closed_by_peer: Whether the other end has hung up, and all that it sent is read.
    """

    def __init__(
        self, connection: socket.socket, peer: str, max_body_bytes: int = MAX_BODY_BYTES
    ) -> None:
        connection.settimeout(0)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.max_body_bytes = max_body_bytes
        self.closed_by_peer = False
        self._connection = connection
        self._received = b""
        self._broken = False  # perhaps half a message was sent

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def local_host(self) -> str:
        """The address at this end."""
        return str(self._connection.getsockname()[0])

    def send(self, type_: MessageType, body: bytes = b"", *, timeout: float = 0.0) -> bool:
        """Sends a message; returns whether it could be.

        A dead peer is found by reading. One that takes nothing in for so long that the system's
        buffer is full is frozen, and gets nothing more.
        """
        if self._broken:
            return False
        try:
            if timeout:
                self._connection.settimeout(timeout)
            self._connection.sendall(_PREFIX.pack(type_, len(body)) + body)
            if timeout:
                self._connection.settimeout(0)
        except OSError:
            self._broken = True
        return not self._broken

    def receive(self, deadline: float, cancelled: threading.Event) -> Frame:
        """Blocks until a message is here.

        Raises:
            TransportTimeout: ``deadline``, by ``time.monotonic``, passed.
            TransportError: The other end hung up or sent no message of this format, or
                ``cancelled`` was set.
        """
        while (frame := self._next_frame()) is None:
            if self.closed_by_peer:
                raise TransportError(f"{self.peer} hung up before the group was formed", self.peer)
            if cancelled.is_set():
                raise TransportError("joining was cancelled")
            if time.monotonic() > deadline:
                raise TransportTimeout("not all members of the group have joined in time")
            self._read(_POLL_SECONDS)
        return frame

    def receive_available(self) -> list[Frame]:
        """All messages that are here, without blocking.

        Raises:
            TransportError: The other end sent no message of this format.
        """
        self._read(0)
        frames = []
        while (frame := self._next_frame()) is not None:
            frames.append(frame)
        return frames

    def hang_up(self) -> None:
        """Tells the other end that nothing more comes. What was sent before still arrives.

        From any thread.
        """
        # Not SHUT_RDWR: what the other end sends then would reset the connection, and with it drop
        # what that end has not read yet.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.hang_up()
        self._connection.close()

    def _read(self, timeout: float) -> None:
        try:
            if timeout:
                self._connection.settimeout(timeout)
            data = self._connection.recv(_CHUNK_BYTES)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            data = b""
        finally:
            if timeout:
                with contextlib.suppress(OSError):
                    self._connection.settimeout(0)
        self._received += data
        self.closed_by_peer = not data

    def _next_frame(self) -> Frame | None:
        if len(self._received) < _PREFIX.size:
            return None
        type_, size = _PREFIX.unpack_from(self._received)
        if size > self.max_body_bytes:
            raise TransportError(
                f"{self.peer} does not speak rollwire's protocol: it announces {size} bytes",
                self.peer,
            )
        end = _PREFIX.size + size
        if len(self._received) < end:
            return None
        frame = Frame(type_, self._received[_PREFIX.size : end])
        self._received = self._received[end:]
        return frame

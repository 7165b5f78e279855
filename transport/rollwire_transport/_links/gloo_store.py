"""A store as gloo wants one, between the two ends of a pair."""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING

import torch.distributed as dist

from rollwire_transport._errors import TransportError
from rollwire_transport._links.control_channel import read

if TYPE_CHECKING:
    import socket
    import threading
    from datetime import timedelta

_WORD = struct.Struct("<HI")  # the sizes of a key and of its value
_MOST_BYTES = 1 << 20  # gloo's are a few kilobytes


class Line(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs do not export it
    """Where the two ends of a pair leave word for each other: the connection on which they met.

    Gloo asks a store for it. Torch's own, over TCP, waits for ever for a process that is frozen or
    cut off.
    """

    def __init__(self, connection: socket.socket, deadline: float, closed: threading.Event) -> None:
        super().__init__()
        self.connection = connection
        self._deadline = deadline
        self._closed = closed
        self._words: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Tells the other end."""
        self._words[key] = value
        name = key.encode()
        with contextlib.suppress(OSError):  # of one that is gone, which is found by reading
            self.connection.settimeout(1)  # a few bytes, on a connection that is empty
            self.connection.sendall(_WORD.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """What one of the ends has told."""
        while key not in self._words:
            name_size, size = _WORD.unpack(self._read(_WORD.size))
            if size > _MOST_BYTES:
                raise TransportError(f"what answers there is no member: it tells of {size} bytes")
            name = self._read(name_size).decode()
            self._words[name] = self._read(size)
        return self._words[key]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Blocks until all has been told."""
        for key in keys:
            self.get(key)

    def leave(self, rank: int, peer: int) -> None:
        """Returns when both ends have told all: what comes next is for somebody else."""
        self.set(f"left/{rank}", b"")
        self.get(f"left/{peer}")

    def _read(self, size: int) -> bytes:
        return read(self.connection, size, self._deadline, self._closed)

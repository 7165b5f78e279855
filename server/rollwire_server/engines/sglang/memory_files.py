"""Short texts from SGLang's processes to the server, in memory: no disk can be full."""

from __future__ import annotations

import os
from pathlib import Path


class MemoryFile:
    """An anonymous file.

    Attributes:
        path: Where processes of the same user find it, until it is closed.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rollwire-text")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0).decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)


def append(path: str, text: str) -> None:
    """Appends to a memory file of another process; raises OSError if that is closed."""
    with Path(path).open("a") as file:
        file.write(text)

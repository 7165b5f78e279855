"""Short texts that SGLang's processes write for the server, in memory: no disk of theirs to fill
or to be swept.
"""

from __future__ import annotations

import os
from pathlib import Path


class Note:
    """A file without a name, empty at first.

    Attributes:
        path: Where processes of the same user find it, until it is closed.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rollwire-note")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> str:
        """What has been written."""
        size = os.fstat(self._descriptor).st_size
        return os.pread(self._descriptor, size, 0).decode(errors="replace")

    def close(self) -> None:
        """Frees it; once."""
        os.close(self._descriptor)


def write(path: str, text: str) -> None:
    """Adds to a note of another process; raises OSError when it is closed."""
    with Path(path).open("a") as file:
        file.write(text)

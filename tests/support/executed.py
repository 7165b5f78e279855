"""Processes of the server that are started as users start them: by a command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def children(parent: int) -> dict[int, str]:
    """A process's own processes: their ids and command lines."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found[int(path.name)] = (path / "cmdline").read_text()
        except OSError:  # it has ended meanwhile
            continue
    return found


def lines(pid: int, text: str) -> list[str]:
    """The lines with this text of the list of what a process has in its memory."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if text in line]


class ExecutedCommand(subprocess.Popen[bytes]):
    """``rollwire-server`` with flags, started by this environment's interpreter."""

    def __init__(self, flags: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("ab") as output:
            super().__init__(
                [sys.executable, "-m", "rollwire_server", *flags],
                stdout=output,
                stderr=output,
                env=environment,
            )

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutError when it still runs after ``timeout`` seconds."""
        try:
            return super().wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s") from error

"""Processes of the server that are started as users start them: by a command."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ExecutedCommand(subprocess.Popen[bytes]):
    """``rollwire-server`` with flags, started by this environment's interpreter."""

    def __init__(self, flags: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        with log.open("ab") as output:
            super().__init__(
                [sys.executable, "-m", "rollwire_server.main", *flags],
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

"""Programs that are run as a reader runs them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from rollwire_client._cli.app import run

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

ROLLWIRE = [sys.executable, "-c", "from rollwire_client._cli import main; main()"]
SECONDS = 240  # programs that import torch, on a machine that is busy with other things


def ran(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What this environment's Python said, once it has ended well."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done


def rollwire_here(
    said: pytest.CaptureFixture[str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """The same in this process, for what does not depend on whose it is. ``said``: ``capfd``."""
    said.readouterr()
    code = run(list(arguments))
    return subprocess.CompletedProcess(arguments, code, *said.readouterr())


def rollwire(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The ``rollwire`` command, however it ended."""
    return subprocess.run(
        [*ROLLWIRE, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )

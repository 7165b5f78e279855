"""Programs that are run as a reader runs them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

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

"""The demo as its user meets it: processes, exit codes, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = [str(Path(sys.executable).with_name("rollwire")), "demo"]
SECONDS = 300  # three processes that import torch, on a machine that may be busy


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The demo's folder; no server of it may be left."""
    yield tmp_path
    for ready in tmp_path.glob("server-*.json"):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(ready.read_text())["pid"], 0)


def demo(folder: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--output", str(folder), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lines_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"the demo ended before {words!r}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_short_run_checks_its_labels_and_says_that_the_goal_was_missed(folder: Path) -> None:
    process = demo(folder, "--steps", "10", "--seed", "3")
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, told
    assert "Missed: reward at the end" in told
    assert "log-probability" not in told.partition("Missed")[2], told
    assert "Traceback" not in told
    assert (folder / "reward.png").exists()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_demo_goes_on_without_a_server_that_dies_and_ends_on_ctrl_c(folder: Path) -> None:
    process = demo(folder)
    lines_until(process, "step and version")
    os.kill(json.loads((folder / "server-0.json").read_text())["pid"], signal.SIGKILL)
    lines_until(process, "was killed by signal 9; the others go on")
    lines_until(process, "step and version")
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in told, told


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_last_server_s_death_is_one_clear_line(folder: Path) -> None:
    process = demo(folder, "--servers", "1")
    lines_until(process, "step and version")
    os.kill(json.loads((folder / "server-0.json").read_text())["pid"], signal.SIGKILL)
    told = process.communicate(timeout=SECONDS)[0].splitlines()[-1]
    assert process.returncode == 1
    assert told.startswith("rollwire: server 127.0.0.1:")
    assert told.endswith("was killed by signal 9; none is left")


def test_a_folder_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = demo(tmp_path / "file" / "folder")
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert told.startswith("rollwire: cannot make the folder")
    assert told.count("\n") == 1, told

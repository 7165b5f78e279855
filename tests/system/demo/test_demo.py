"""The demo as its user meets it: processes, exit codes, what is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollwire_client import read_groups
from rollwire_client._view.tokenizer import read_tokenizer

COMMAND = [str(Path(sys.executable).with_name("rollwire")), "demo"]
SECONDS = 300  # three processes that import torch, on a machine that may be busy


Demo = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Demo]:
    """Starts a demo; after the test neither it nor a server of it may be left."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*COMMAND, "--output", str(tmp_path), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:  # the test failed
            process.terminate()
            process.communicate(timeout=SECONDS)
    for ready in tmp_path.glob("server-*.json"):
        with pytest.raises(ProcessLookupError):
            os.kill(json.loads(ready.read_text())["pid"], 0)


def kill_server(folder: Path, number: int) -> None:
    pid = json.loads((folder / f"server-{number}.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)


def lines_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stdout is not None
    assert any(words in line for line in process.stdout), f"the demo ended before {words!r}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_a_short_run_checks_its_labels_and_says_that_the_goal_was_missed(
    demo: Demo, tmp_path: Path
) -> None:
    process = demo("--steps", "10", "--seed", "3")
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, told
    assert "Missed: reward at the end" in told
    assert "log-probability" not in told.partition("Missed")[2], told
    assert "Traceback" not in told
    assert (tmp_path / "reward.png").exists()
    groups = list(read_groups(tmp_path / "samples.jsonl"))
    assert len(groups) == 10 * 8
    assert all(reward is not None for group in groups for reward in group.rewards)
    texts = read_tokenizer(tmp_path / "checkpoint").pieces
    assert "".join(texts[token].decode() for token in groups[0].prompt.token_ids).isupper()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_demo_goes_on_without_a_server_that_dies_and_ends_on_ctrl_c(
    demo: Demo, tmp_path: Path
) -> None:
    process = demo()
    lines_until(process, "step and version")
    kill_server(tmp_path, 0)
    lines_until(process, "was killed by signal 9; the others continue its sequences")
    lines_until(process, "step and version")
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert "Traceback" not in told, told


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_sigterm_ends_servers_that_still_start(demo: Demo) -> None:
    process = demo()
    lines_until(process, "starting 2 servers")
    process.terminate()
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 143
    assert told == ""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_the_last_server_s_death_is_one_clear_line(demo: Demo, tmp_path: Path) -> None:
    process = demo("--servers", "1")
    lines_until(process, "step and version")
    kill_server(tmp_path, 0)
    told = process.communicate(timeout=SECONDS)[0].splitlines()[-1]
    assert process.returncode == 1
    assert told.startswith("rollwire: server 127.0.0.1:")
    assert told.endswith("was killed by signal 9; none is left")


def test_a_folder_that_cannot_be_made_is_one_clear_line(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = demo("--output", str(tmp_path / "file" / "folder"))
    told, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert told.startswith("rollwire: cannot make the folder")
    assert told.count("\n") == 1, told

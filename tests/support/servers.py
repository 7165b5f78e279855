"""Real server processes, started and always ended."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from support import own
from support.executed import ExecutedCommand
from support.forked import ServerCommand

START_SECONDS = 300
STOP_SECONDS = 60

# Engines with processes of their own, which they cannot start from a fork: each of them imports
# everything anew, in 15 s on two free cores.
EXECUTED = {"sglang"}
EXECUTED_START_SECONDS = 400


@dataclass
class ServerProcess:
    """A ``rollwire-server`` that is up.

    ``breaks`` is set where a test makes it fail: its log may have tracebacks then.
    """

    process: ServerCommand | ExecutedCommand
    address: str
    server_id: str
    log: Path
    ready_file: Path
    breaks: bool = False

    def listens(self, which: str) -> str:
        """One of its addresses by its name in the ready file, such as "metrics_listen"."""
        address: str = json.loads(self.ready_file.read_text())[which]
        return address

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Waits for its end; returns the exit code."""
        return self.process.wait(STOP_SECONDS)


class Failed(NamedTuple):
    """A server that did not start."""

    code: int
    said: str

    @property
    def line(self) -> str:
        """The only one that it said."""
        (line,) = self.said.strip().splitlines()
        return line


StartServer = Callable[..., ServerProcess]
COMMAND = [sys.executable, "-m", "rollwire_server"]


def _start(folder: Path, *flags: str) -> ServerProcess:
    number = len(list(folder.glob("server-*.log")))
    ready, log = folder / f"server-{number}.json", folder / f"server-{number}.log"
    arguments = ["--model", "builtin:tiny"] if "--model" not in flags else []
    arguments += ["--listen", f"{own.host()}:0"] if "--listen" not in flags else []
    log.touch()
    engine = flags[flags.index("--engine") + 1] if "--engine" in flags else "embedded"
    executed = engine in EXECUTED
    start = ExecutedCommand if executed else ServerCommand
    process = start(
        [*arguments, "--ready-file", str(ready), *flags],
        log,
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + (EXECUTED_START_SECONDS if executed else START_SECONDS)
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            with contextlib.suppress(TimeoutError):
                process.send_signal(signal.SIGABRT)  # it says where it stands
                process.wait(5)
            process.kill()
            process.wait(STOP_SECONDS)
            pytest.fail(f"the server did not come up:\n{log.read_text()}")
        time.sleep(0.02)
    told = json.loads(ready.read_text())
    return ServerProcess(process, told["listen"], told["server_id"], log, ready)


def failed_start(folder: Path, *flags: str, environment: dict[str, str] | None = None) -> Failed:
    """What comes of a server that does not start."""
    log = folder / "said"
    process = ServerCommand(flags, log, dict(os.environ) if environment is None else environment)
    try:
        return Failed(process.wait(START_SECONDS), log.read_text())
    finally:
        process.kill()


def resident_bytes(pid: int) -> int:
    """The memory that a process really has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@contextlib.contextmanager
def memory_limit(pid: int, *, spare: int) -> Iterator[None]:
    """Lets a process have so many bytes more than it has, and no more."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    unlimited = resource.prlimit(pid, resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + spare
    resource.prlimit(pid, resource.RLIMIT_AS, (most, unlimited[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, resource.RLIMIT_AS, unlimited)


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[StartServer]:
    """Starts servers on request; whatever still runs at the end is killed, and its log is read."""
    started: list[ServerProcess] = []

    def start(*flags: str) -> ServerProcess:
        started.append(_start(folder, *flags))
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            if server.process.poll() is None:
                server.process.send_signal(signal.SIGCONT)
                server.kill()
    for server in started:
        text = server.log.read_text()
        assert server.breaks or "Traceback" not in text, text
        assert "never retrieved" not in text, text

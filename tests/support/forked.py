"""Processes of the server that share one import of its libraries.

Importing torch and transformers is most of a server's start and end. They are imported once, in a
process that does nothing else (``multiprocessing``'s fork server), and each server is a fork of it:
a process of its own that runs the command with its own flags, environment and log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path

_NETWORK = 0x40000000  # CLONE_NEWNET

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",  # each fork runs the main module again, which imports it
        "rollwire_server.logs",
        "rollwire_server.settings",
        "rollwire_server.server",
        "rollwire_server.engines.embedded",
        "rollwire_server.engines.synthetic",
        "transformers.models.auto.modeling_auto",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "support.frozen",
    ]
)


def share() -> str:
    """Starts the process that is forked; returns its address, for ``adopt`` in other processes."""
    forkserver.ensure_running()
    return forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def adopt(address: str) -> None:
    """Forks what another process has started, instead of importing everything here again."""
    own = forkserver._forkserver  # type: ignore[attr-defined]
    own._forkserver_address = address
    own._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # the other one keeps it alive
    own.ensure_running = lambda: None


def interpret(code: str, standard: list[Connection]) -> int:
    """Has a fork execute what ``python -c`` would, with these as its standard input, output and
    error; returns its exit code.
    """
    process = _context.Process(target=_interpret, args=(code, standard))
    process.start()
    for connection in standard:
        connection.close()
    for descriptor in (0, 1):  # else who writes or reads there would not notice the fork's end
        os.close(descriptor)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _interpret(code: str, standard: list[Connection]) -> None:
    for descriptor, connection in enumerate(standard):
        os.dup2(connection.fileno(), descriptor)
        connection.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["-c"]
    exec(code, {"__name__": "__main__"})  # noqa: S102 - as an interpreter does


class ServerCommand:
    """``rollwire-server`` with flags, started; in the words of ``subprocess.Popen``.

    Args:
        network: A network namespace to run in, as a file; default: that of this process.
    """

    def __init__(
        self,
        flags: Sequence[str],
        log: Path,
        environment: dict[str, str],
        network: Path | None = None,
    ) -> None:
        self._process = _context.Process(
            target=_run, args=(list(flags), str(log), environment, network), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs; negative: the signal that ended it."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            TimeoutError: It still runs.
        """
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run(flags: list[str], log: str, environment: dict[str, str], network: Path | None) -> None:
    if network is not None:
        _enter(network)
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    faulthandler.enable(file=2)
    sys.argv = ["rollwire-server", *flags]
    from rollwire_server.main import main

    main()


def _enter(network: Path) -> None:
    """Moves this process into a network namespace, before it has a thread or a socket."""
    libc = ctypes.CDLL(None, use_errno=True)
    with network.open() as namespace:
        if libc.setns(namespace.fileno(), _NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")

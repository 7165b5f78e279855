"""Starts rollout servers as processes of this machine, watches them, and always ends them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollwire_client import RollwireError

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator

START_SECONDS = 120.0
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05


class DemoError(RollwireError):
    """The demo cannot go on."""


@dataclass(frozen=True, slots=True)
class Server:
    """A ``rollwire-server`` process, the HOST:PORT of its API, and its log file."""

    process: Process
    address: str
    log: Path

    async def died(self) -> str:
        """Waits for the end of the process; what happened, in one line."""
        code = await self.process.wait()
        if code < 0:
            return f"server {self.address} was killed by signal {-code}"
        return f"server {self.address} exited with code {code}{_last_line(self.log)}"


@contextlib.asynccontextmanager
async def rollout_servers(count: int, model: Path, folder: Path) -> AsyncIterator[list[Server]]:
    """Starts servers of a checkpoint at once, with their logs in ``folder``; ends them on exit.

    Raises:
        DemoError: One does not come up; in an exception group if it was started.
    """
    command = Path(sys.executable).with_name("rollwire-server")
    if not command.exists():
        raise DemoError(f"{command} does not exist: pip install 'rollwire[demo]'")
    # Flags that are not given here must not come from the environment.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROLLWIRE_")}
    environment["OMP_NUM_THREADS"] = "1"
    processes: list[Process] = []

    async def start(number: int) -> Server:
        ready, log = folder / f"server-{number}.json", folder / f"server-{number}.log"
        ready.unlink(missing_ok=True)
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                command,
                *("--model", str(model), "--listen", "127.0.0.1:0"),
                *("--ready-file", str(ready), "--drain-seconds", "0", "--log-format", "text"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
            )
        processes.append(process)
        return Server(process, await _address(process, ready, log), log)

    try:
        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(start(number)) for number in range(count)]
        yield [task.result() for task in starting]
    finally:
        await asyncio.gather(*(_end(process) for process in processes))


async def _address(process: Process, ready: Path, log: Path) -> str:
    """Waits until the server listens; its HOST:PORT."""
    try:
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():  # noqa: ASYNC240 - a local file
                if process.returncode is not None:
                    raise DemoError(f"a server did not start{_last_line(log)}")
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        raise DemoError(
            f"a server was not ready after {START_SECONDS:.0f} s{_last_line(log)}"
        ) from None
    address: str = json.loads(ready.read_text())["listen"]  # noqa: ASYNC240 - a local file
    return address


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"; its log, {log}, ends: {last[:300]}"

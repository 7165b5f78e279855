"""Many servers in one process, for benchmarks of a client that has many.

    python benchmarks/many.py 50 /tmp/many.json --engine synthetic --model none

It writes their addresses into the file, and hands the flags to each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollwire_server.logs import configure
from rollwire_server.main import raise_open_file_limit
from rollwire_server.server import RolloutServer
from rollwire_server.settings import read_settings

AT_ONCE = 10  # that start


class Hosted(RolloutServer):
    """One of several in a process, which a signal ends."""

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


async def serve(count: int, ready: Path, flags: list[str], folder: Path) -> None:
    """Serves until it is killed; writes the addresses into ``ready``."""
    flags = [*flags, "--log-level", "warning", "--listen", "127.0.0.1:0"]
    # Each server blocks some threads for as long as an update comes.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(8 * count))
    files = [folder / f"{number}.json" for number in range(count)]
    starting = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as tasks:

        async def start(file: Path) -> None:
            server = Hosted(read_settings([*flags, "--ready-file", str(file)]))
            async with starting:
                tasks.create_task(server.run())
                while not await asyncio.to_thread(file.exists):  # noqa: ASYNC110 - no event is
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(start(file) for file in files))
        addresses = [json.loads(file.read_text())["listen"] for file in files]
        written = ready.with_suffix(".partial")
        written.write_text(json.dumps(addresses))
        written.replace(ready)


if __name__ == "__main__":
    configure("text", "warning")
    raise_open_file_limit()
    with tempfile.TemporaryDirectory() as told:
        asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], Path(told)))

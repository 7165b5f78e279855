"""Many servers in one process, each with the synthetic engine: what ``delivery.py`` has many of.

python benchmarks/many.py 50 20 /tmp/many.json         50 servers, 20 tokens a second and sequence
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from pathlib import Path

from rollwire_server.command import allow_files, read_settings
from rollwire_server.logs import configure
from rollwire_server.server import RolloutServer

AT_ONCE = 10  # that start


class Hosted(RolloutServer):
    """One of several in a process, which a signal ends."""

    def _signals(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


async def serve(count: int, rate: float, ready: Path, folder: Path) -> None:
    """Serves until it is killed; writes the addresses into ``ready``."""
    files = [folder / f"{number}.json" for number in range(count)]
    starting = asyncio.Semaphore(AT_ONCE)
    async with asyncio.TaskGroup() as tasks:

        async def start(file: Path) -> None:
            flags = ["--model", "none", "--engine", "synthetic", "--log-level", "warning"]
            flags += ["--engine-arg", f"tokens-per-second={rate}"]
            flags += ["--listen", "127.0.0.1:0", "--ready-file", str(file)]
            server = Hosted(read_settings(flags))
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
    allow_files()
    with tempfile.TemporaryDirectory() as told:
        asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), Path(told)))

"""What a server holds, counted from outside, and what an update may leave behind: nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from support.calls import connected, until
from support.publishing import no_update

if TYPE_CHECKING:
    from support.servers import ServerProcess

# Of the pools for blocking work, the interpreter's and gRPC's, which are made when needed and stay.
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)
OTHER_FILES = 4  # connections of tests and of probes, which come and go


class Footprint(NamedTuple):
    """Threads and open files of a process."""

    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        proc = Path(f"/proc/{pid}")
        return cls(_count(proc / "task"), _count(proc / "fd"))


def _count(folder: Path) -> int:
    return len(list(folder.iterdir()))


async def nothing_is_left(server: ServerProcess, before: Footprint) -> None:
    """Returns when the server is idle, without an update, and holds no more than ``before``."""
    async with connected(server.address) as api:
        await api.idle()
        await no_update(api)
    await level(server, before)


async def level(server: ServerProcess, before: Footprint) -> None:
    """Returns when the server holds no more than ``before``."""

    async def is_level() -> bool:
        now = Footprint.of(server.process.pid)
        return (
            now.threads <= before.threads + POOL_THREADS and now.files <= before.files + OTHER_FILES
        )

    await until(is_level, seconds=60)

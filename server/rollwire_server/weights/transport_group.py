"""Transport groups at a server: how one is joined, and the one that is kept for the next update."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import rollwire_transport as transport

# The trainer closes an idle group earlier; this is for one that is gone.
_KEEP_SECONDS = 240.0


class JoinStep(enum.Enum):
    """A step of joining a transport group; see weights.proto."""

    PREPARE = "prepare"
    CONNECT = "connect"


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """What JoinTransport asks for; each step uses some of the fields."""

    step: JoinStep
    epoch: str
    backend: str = ""
    rank: int = 0
    world_size: int = 0
    host: str = ""
    offer: bytes = b""
    first_bucket: int = 0


class KeptGroup:
    """The transport group of the last update, which the next one may use again."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._epoch = ""
        self._link: transport.Link | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, epoch: str, link: transport.Link) -> None:
        self._epoch, self._link = epoch, link
        self._timer = asyncio.get_running_loop().call_later(
            _KEEP_SECONDS, lambda: self._tasks.create_task(self.close())
        )

    def take(self, epoch: str, transfers: int) -> transport.Link | None:
        """The group, if it is this one and has moved so many updates."""
        link = self._link
        if link is None or self._epoch != epoch or link.transfers != transfers:
            return None
        self._forget()
        return link

    async def close(self) -> None:
        if (link := self._link) is not None:
            self._forget()
            await asyncio.to_thread(link.close)

    def _forget(self) -> None:
        self._link = None
        if self._timer is not None:
            self._timer.cancel()

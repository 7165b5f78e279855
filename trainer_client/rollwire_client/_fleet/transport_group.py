"""The transport group that moved a fleet's last update, kept for the next one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollwire_client._concurrency import run_in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    import rollwire_transport as transport
    import torch

_KEEP_SECONDS = 180.0  # an idle group; a firewall may forget its connections


@dataclass(frozen=True, slots=True)
class TransportGroup:
    """A group: this end's link, and the address of each receiver, by rank."""

    epoch: str
    backend: str
    device: torch.device | None
    link: transport.Link
    members: tuple[str, ...]

    def can_serve(self, addresses: Iterable[str]) -> bool:
        """Whether it may move an update to some of these: all its members are among them."""
        return set(self.members) <= set(addresses)


class GroupKeeper:
    """Keeps one group for a while: servers keep only their last one too.

    Args:
        create_task: Runs what ends a group, until the fleet closes.
    """

    def __init__(
        self, create_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self.group: TransportGroup | None = None
        self._create_task = create_task
        self._expiring: asyncio.Task[None] | None = None

    def take(self) -> TransportGroup | None:
        """The group, whose user keeps it again or closes it."""
        group, self.group = self.group, None
        if self._expiring is not None:
            self._expiring.cancel()
        return group

    def keep(self, group: TransportGroup) -> None:
        if (other := self.take()) is not None:  # of another publisher
            self._create_task(_close(other))
        self.group = group
        self._expiring = self._create_task(self._expire(group))

    async def close(self) -> None:
        if (group := self.take()) is not None:
            await _close(group)

    async def _expire(self, group: TransportGroup) -> None:
        await asyncio.sleep(_KEEP_SECONDS)
        self.group = None  # whoever takes it cancels this
        await _close(group)


async def _close(group: TransportGroup) -> None:
    await run_in_thread(group.link.close)

"""The ranks of a sharded trainer, over real connections; here all of them live in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import rollwire_client._publishing.sharded.ranks
from client.publishing import TIMEOUTS, publishing
from client.scripted_weights import SCHEMA, policy
from rollwire_client import Ranks
from rollwire_client._publishing.sharded.connection import Connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    import pytest
    import torch.distributed as dist
    from client.scripted_weights import PublishableServer
    from rollwire_client import Publisher
    from torch import Tensor

NAMES = [spec.name for spec in SCHEMA if spec.alias_of is None]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


def connected(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, size: int, timeout: float
) -> list[Ranks]:
    """Ranks whose connections exist already: how they connect is tested with real processes."""
    ends: list[dict[int, Connection]] = [{} for _ in range(size)]
    for rank in range(1, size):
        here, there = tcp_pair()
        ends[0][rank], ends[rank][0] = Connection(here), Connection(there)
    monkeypatch.setattr(
        rollwire_client._publishing.sharded.ranks, "connect_ranks", lambda *_: ends.pop(0)
    )
    ranks = [Ranks(group, timeout=timeout) for _ in range(size)]
    for number, one in enumerate(ranks):
        one.rank = number
    return ranks


@contextlib.asynccontextmanager
async def trainer(
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    size: int = 3,
    timeout: float = 20,
    *,
    accept_deltas: bool = False,
) -> AsyncIterator[tuple[list[PublishableServer], Publisher, list[Ranks]]]:
    ranks = connected(monkeypatch, group, size, timeout)
    async with publishing(2, TIMEOUTS, accept_deltas=accept_deltas) as (servers, _, publisher):
        with contextlib.ExitStack() as stack:
            for one in ranks:
                stack.enter_context(one)
            yield servers, publisher, ranks


class Source:
    """A source that notes what it was asked for, and fails as a test says."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.taken: list[str] = []
        self.called: list[str] = []
        self.raises_at = ""
        self.error: type[BaseException] = ZeroDivisionError
        self.names = NAMES
        self._lazy = lazy

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            if name == self.raises_at:
                raise self.error("as scripted")
            self.taken.append(name)
            yield name, (lambda name=name: self._give(name)) if self._lazy else policy()[name]

    def _give(self, name: str) -> Tensor:
        self.called.append(name)
        return policy()[name]


async def on_all(
    ranks: list[Ranks], publisher: Publisher, sources: list[Source], version: int = 1
) -> list[object]:
    return await asyncio.gather(
        *(
            one.publish(publisher if one.rank == 0 else None, version, source)
            for one, source in zip(ranks, sources, strict=True)
        ),
        return_exceptions=True,
    )


def errors(outcomes: list[object]) -> list[str]:
    return [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes]

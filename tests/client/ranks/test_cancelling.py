"""The publish of a sharded trainer that one of its ranks cancels or closes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
from client.ranks.support import NAMES, Source, errors, on_all, trainer
from client.scripted import until
from client.scripted_weights import policy
from rollwire_client import PublishError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import Tensor


async def test_a_cancelled_publish_ends_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, ranks):
        for server in servers:
            server.hangs_in = "JoinTransport"
        other = asyncio.create_task(ranks[1].publish(None, 1, Source()))
        leader = asyncio.create_task(ranks[0].publish(publisher, 1, Source()))
        await until(lambda: all(server.joins for server in servers))
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        with pytest.raises(PublishError, match="the publish ended with CancelledError"):
            await other


async def test_closing_the_ranks_ends_a_publish_on_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, ranks):
        for server in servers:
            server.hangs_in = "JoinTransport"
        running = asyncio.create_task(on_all(ranks, publisher, [Source(), Source()]))
        await until(lambda: all(server.joins for server in servers))
        ranks[0].close()
        told = errors(await running)
        assert told[0].startswith("SourceError: rank 1 of the trainer is gone")
        assert told[1].startswith("SourceError: rank 0 of the trainer is gone")


@pytest.mark.parametrize("who", ["leader", "other"])
async def test_a_cancelled_publish_stops_reading_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, who: str
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        asked, go_on = threading.Event(), threading.Event()
        taken: list[str] = []
        closed: list[threading.Thread] = []

        def slow() -> Iterator[tuple[str, Tensor]]:
            try:
                for name in NAMES:
                    asked.set()
                    assert go_on.wait(60)
                    taken.append(name)
                    yield name, policy()[name]
            finally:
                closed.append(threading.current_thread())

        other = asyncio.create_task(ranks[1].publish(None, 1, slow))
        leader = asyncio.create_task(ranks[0].publish(publisher, 1, Source()))
        await asyncio.to_thread(asked.wait, 20)
        # The other falls behind: what it has to do yet is of no use any more.
        task = leader if who == "leader" else other
        task.cancel()
        if who == "other":
            with pytest.raises(asyncio.CancelledError):
                await other
        with pytest.raises((asyncio.CancelledError, SourceError)):
            await leader
        go_on.set()
        await asyncio.wait([other])
        await until(lambda: closed != [])
        assert taken == NAMES[:1]
        assert all(thread.name == "rollwire-blocking" for thread in closed)

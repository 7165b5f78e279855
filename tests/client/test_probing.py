"""How often a fleet asks its servers how they are."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from client.scripted import Sequence, scripted, until
from rollwire.v1 import common_pb2
from rollwire_client import Fleet, Sampling, Timeouts
from rollwire_client._fleet import server_pool as pool

if TYPE_CHECKING:
    import pytest

PROMPT = [1, 2, 3]
SHORT = Sampling(max_new_tokens=4)
INTERVAL = 0.05  # seconds
NEVER = 1e-9  # ready servers that are asked in an interval


async def hang(_: Sequence) -> None:
    await asyncio.Event().wait()


async def test_a_large_fleet_asks_so_many_ready_servers_in_an_interval_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_READY_PROBES", 2)
    clock = asyncio.get_running_loop().time
    count = 8
    async with scripted(count) as servers:
        began = clock()
        async with Fleet([s.address for s in servers], probe_interval=INTERVAL):
            await until(lambda: all(server.asked >= 4 for server in servers))
        intervals = (clock() - began) / INTERVAL
        at_start = 2 * count  # when it is opened, and once each by itself
        assert sum(s.asked for s in servers) <= at_start + count + 2 * intervals / 0.9


async def test_a_server_that_is_not_ready_is_asked_as_often_in_a_large_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_READY_PROBES", NEVER)
    async with scripted(2) as (ready, late):
        late.state = common_pb2.SERVER_STATE_STARTING
        async with Fleet([ready.address, late.address], probe_interval=INTERVAL) as fleet:
            await until(lambda: late.asked > 4)
            assert ready.asked <= 2
            late.state = common_pb2.SERVER_STATE_SERVING
            await until(lambda: fleet._pool.servers[1].problem is None)


async def test_a_server_that_froze_unnoticed_is_asked_when_a_sequence_starts_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_READY_PROBES", NEVER)
    timeouts = Timeouts(silence=60, probe=0.2, close=0.1)
    async with (
        scripted() as (server,),
        Fleet([server.address], probe_interval=INTERVAL, timeouts=timeouts) as fleet,
    ):
        (member,) = fleet._pool.servers
        await fleet.generate(PROMPT, SHORT)
        server.mute, server.default = True, hang
        await asyncio.sleep(2 * INTERVAL)  # nothing is heard of it
        assert member.problem is None
        rollout = asyncio.create_task(fleet.generate(PROMPT, SHORT))
        await until(lambda: member.problem is not None)
        assert "no answer" in str(member.problem)
        rollout.cancel()
        await asyncio.wait([rollout])

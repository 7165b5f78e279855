"""Versions of the trainer and of the servers: what is too old, and what is waited for."""

from __future__ import annotations

import asyncio

import pytest
from client.batches.support import (
    HeldServer,
    batcher_of,
    begun,
    fates,
    fleet_of,
    held,
    ids,
    prompts,
)
from client.scripted import until, was_published
from rollwire_client import (
    Carry,
    DropReason,
    Retries,
    RolloutFailedError,
    ServerState,
    StalenessError,
    WeightTag,
)
from rollwire_client._batches import batcher as batcher_module


async def test_a_version_that_comes_to_nothing_is_told() -> None:
    """The weights that a sequence needs were there when it was begun, and are gone."""
    async with (
        HeldServer(set(), version=5) as server,
        fleet_of(server, retries=Retries(seconds=0.5), probe_interval=0.05) as fleet,
        batcher_of(fleet, max_lag=1, refills=0) as batcher,
    ):
        assert fleet._pool.servers[0].version == 5
        server.state = ServerState.PAUSED
        collecting = asyncio.create_task(batcher.collect(prompts(), 1, version=5))
        await until(lambda: server.running == 2)
        server.commit(3)
        server.state = ServerState.SERVING
        with pytest.raises(RolloutFailedError, match="did not reach version 4"):
            await collecting


async def test_a_group_that_is_too_old_is_dropped_and_aborted() -> None:
    async with held(2, version=1, max_lag=1) as (server, batcher):
        source = prompts()
        batch = await batcher.collect(source, 1, version=1, over_sample=2.0, tail=Carry())
        assert ids(batch.carried) == ["1"]
        server.commit(3)
        server.let_go |= {3}
        batch = await batcher.collect(source, 1, version=3)
        assert ids(batch.finished) == ["3"]
        assert fates(batch.dropped) == [("1", DropReason.STALE)]
        assert 1 in batch.dropped.groups[0].versions
        await until(lambda: server.running == 0)
        assert server.requests[-1].min_weight_version == 2


async def test_what_grows_too_old_while_a_batch_is_collected_is_replaced() -> None:
    """A group that was begun under version 1 ends in a batch for version 3."""
    async with held(version=1, max_lag=2) as (server, batcher):
        source = prompts()
        collecting = asyncio.create_task(batcher.collect(source, 1, version=2))
        await begun(batcher, "1")
        collecting.cancel()
        await asyncio.wait([collecting])
        server.commit(4)
        server.let_go |= {2}
        batch = await batcher.collect(source, 1, version=4)
        assert (ids(batch.finished), fates(batch.dropped)) == (["2"], [("1", DropReason.STALE)])


async def test_a_bound_that_no_server_meets_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "_WEIGHTS_TIMEOUT", 0.2)
    async with held(1, version=1, max_lag=1) as (server, batcher):
        with pytest.raises(StalenessError, match="version 1, and none reached version 4"):
            await batcher.collect(prompts(), 1, version=5)
        assert not server.requests
        with pytest.raises(StalenessError):
            await batcher.collect(prompts(), 1, version=5)


async def test_weights_without_a_version_meet_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "_WEIGHTS_TIMEOUT", 0.1)
    async with held(1, max_lag=100) as (_, batcher):
        with pytest.raises(StalenessError, match="serve weights without a version"):
            await batcher.collect(prompts(), 1, version=0)


async def test_weights_that_are_still_coming_are_waited_for() -> None:
    async with (
        HeldServer({1}, version=1) as server,
        fleet_of(server, probe_interval=0.05) as fleet,
        batcher_of(fleet, max_lag=0) as batcher,
    ):
        collecting = asyncio.create_task(batcher.collect(prompts(), 1, version=2))
        await asyncio.sleep(0.1)
        assert not server.requests
        server.commit(2)
        assert (await collecting).groups[0].versions == {2}


async def test_carried_groups_outlive_a_rollback_and_go_on_under_it() -> None:
    """They were begun when nothing below 9 was let in, which will not come again."""
    server = HeldServer(set(), version=10)
    async with (
        server,
        fleet_of(server, probe_interval=0.02) as fleet,
        batcher_of(fleet, max_lag=1) as batcher,
    ):
        was_published(fleet, WeightTag(10, 0, "any", 0))
        collecting = asyncio.create_task(batcher.collect(prompts(), 1))
        await begun(batcher, "1")
        collecting.cancel()
        await asyncio.wait([collecting])
        assert {r.min_weight_version for r in server.requests} == {9}
        server.interrupt()
        server.commit(5)
        was_published(fleet, WeightTag(5, 1, "any", 1), rollback=True)
        server.let_go |= {1}
        batch = await batcher.collect(prompts(2), 1)
        assert (batch.version, ids(batch.finished)) == (5, ["1"])
        assert batch.groups[0].versions == {10, 5}


async def test_servers_that_somebody_else_rolled_back_let_the_version_fall() -> None:
    async with (
        HeldServer({2}, version=10) as server,
        fleet_of(server, probe_interval=0.02) as fleet,
        batcher_of(fleet, max_lag=1) as batcher,
    ):
        source = prompts()
        await batcher.collect(source, 1, version=10, over_sample=2.0, tail=Carry())
        server.commit(5)
        await until(lambda: fleet._pool.servers[0].version == 5)
        with pytest.raises(ValueError, match="unless servers are rolled back"):
            await batcher.collect(source, 1, version=4)
        server.let_go |= {1}
        batch = await batcher.collect(source, 1, version=5)
        assert ids(batch.finished) == ["1"]
        assert batch.groups[0].versions == {10, 5}


async def test_versions_rise() -> None:
    async with held(1, 2, version=9) as (_, batcher):
        source = prompts()
        await batcher.collect(source, 1, version=8)
        for lower in (7, None):
            with pytest.raises(ValueError, match="versions rise"):
                await batcher.collect(source, 1, version=lower)
        assert (await batcher.collect(source, 1, version=8)).version == 8

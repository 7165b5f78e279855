"""Servers that came late, came back, or missed a publish are caught up; the others see nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from client.publishing import holds, publish, publishing
from client.scripted import until
from client.scripted_weights import PublishableServer, policy
from rollwire.v1 import common_pb2
from rollwire_client import DigestMismatchError, PublishError, PublishFailedError

if TYPE_CHECKING:
    from rollwire_client import Publisher


async def left_behind(publisher: Publisher, server: PublishableServer) -> None:
    """A publish of version 1 that ``server`` misses."""
    server.refuse_update = ("STAGING_FAILED", {})
    report = await publish(publisher)
    assert [told.address for told in report.failed] == [server.address]
    server.refuse_update = None


async def test_only_the_one_that_is_behind_is_caught_up() -> None:
    async with publishing(3) as (servers, fleet, publisher):
        await left_behind(publisher, servers[0])
        announced = [server.announced for server in servers]
        report = await publisher.catch_up(policy())
        assert [told.address for told in report.servers] == [servers[0].address]
        assert report.failed == ()
        assert report.version == servers[0].weights.version == 1
        assert report.digest == servers[0].weights.digest
        assert holds(servers[0])
        assert [s.announced - n for s, n in zip(servers, announced, strict=True)] == [1, 0, 0]
        assert [len(server.commits) for server in servers] == [1, 1, 1]
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))


@pytest.mark.parametrize("version", [None, 0])
async def test_equal_weights_under_an_older_name_are_behind(version: int | None) -> None:
    """What they sample would be of another version than that of the fleet."""
    async with publishing(2) as (servers, _, publisher):
        await publish(publisher)
        servers[1].weights.ClearField("version")
        if version is not None:
            servers[1].weights.version = version
        report = await publisher.catch_up(policy())
        assert [told.address for told in report.servers] == [servers[1].address]
        assert servers[1].weights.version == 1


async def test_where_none_is_behind_nothing_is_done() -> None:
    async with publishing(2) as (servers, _, publisher):
        published = await publish(publisher)
        report = await publisher.catch_up(policy())
        assert (report.servers, report.bytes, report.version) == ((), 0, 1)
        assert report.digest == published.digest
        assert [server.announced for server in servers] == [1, 1]


@pytest.mark.parametrize(
    "state", [common_pb2.SERVER_STATE_AWAITING_WEIGHTS, common_pb2.SERVER_STATE_QUARANTINED]
)
async def test_one_that_serves_nothing_is_caught_up_whatever_it_holds(state: int) -> None:
    async with publishing(2) as (servers, _, publisher):
        await publish(publisher)
        servers[1].state = state
        report = await publisher.catch_up(policy())
        assert [told.address for told in report.servers] == [servers[1].address]
        assert [len(server.commits) for server in servers] == [1, 2]


@pytest.mark.parametrize(
    "state", [common_pb2.SERVER_STATE_SLEEPING, common_pb2.SERVER_STATE_DRAINING]
)
async def test_one_that_takes_no_updates_is_left_as_it_is(state: int) -> None:
    async with publishing(3) as (servers, _, publisher):
        await left_behind(publisher, servers[0])
        servers[0].state = state
        await servers[1].stop()
        assert (await publisher.catch_up(policy())).servers == ()
        assert servers[0].commits == []


async def test_an_untagged_policy_can_be_caught_up_with() -> None:
    async with publishing(2) as (servers, _, publisher):
        await left_behind(publisher, servers[0])
        servers[0].refuse_update = ("STAGING_FAILED", {})
        await publish(publisher, None, seed=2)
        servers[0].refuse_update = None
        report = await publisher.catch_up(policy(2))
        assert (report.version, len(report.servers)) == (None, 1)
        assert holds(servers[0], 2)


async def test_tensors_of_another_version_are_refused() -> None:
    async with publishing(2) as (servers, _, publisher):
        await left_behind(publisher, servers[0])
        told = "the tensors are not those of version 1"
        with pytest.raises(DigestMismatchError, match=told) as caught:
            await publisher.catch_up(policy(2))
        assert f"{servers[1].weights.digest:016x}" in str(caught.value)
        assert servers[0].commits == []
        await until(lambda: servers[0].discards != [])
        assert (await publisher.catch_up(policy())).failed == ()


async def test_one_that_cannot_be_caught_up_is_an_error() -> None:
    async with publishing(2) as (servers, _, publisher):
        await left_behind(publisher, servers[0])
        servers[0].refuse_commit = True
        with pytest.raises(PublishFailedError, match=servers[0].address):
            await publisher.catch_up(policy())


async def test_before_the_first_publish_there_is_nothing_to_catch_up_with() -> None:
    async with publishing(1) as (_, _, publisher):
        with pytest.raises(PublishError, match="nothing was published through this"):
            await publisher.catch_up(policy())
        await publish(publisher)


async def test_catching_up_can_be_cancelled() -> None:
    async with publishing(2) as (servers, _, publisher):
        await left_behind(publisher, servers[0])
        servers[0].hangs_in = "JoinTransport"
        task = asyncio.create_task(publisher.catch_up(policy()))
        await until(lambda: servers[0].joins != [])
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: servers[0].discards != [])
        servers[0].hangs_in = ""
        assert len((await publisher.catch_up(policy())).servers) == 1

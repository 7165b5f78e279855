"""The life of a server in a fleet: what it answers, how it fails, and when it leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio
from client.scripted import scripted
from rollwire.v1 import common_pb2
from rollwire_client import ServerUnreachableError, WeightTag
from rollwire_client._fleet.policy import Policy
from rollwire_client._fleet.server_handle import ServerHandle, ServerStatus
from rollwire_client._rpc.client import RolloutClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from client.scripted import ScriptedServer

FAILED = ServerUnreachableError("gone")


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[tuple[ScriptedServer, ServerHandle]]:
    async with scripted() as (server,), RolloutClient(server.address) as client:
        yield (
            server,
            ServerHandle(
                client,
                on_change=lambda: None,
                on_identity=lambda: None,
                policy=Policy(lambda: None),
                fresh_seconds=1,
            ),
        )


async def test_a_server_is_what_it_answers(pair: tuple[ScriptedServer, ServerHandle]) -> None:
    server, handle = pair
    assert handle.status is ServerStatus.JOINING
    for state, status in (
        (common_pb2.SERVER_STATE_SERVING, ServerStatus.READY),
        (common_pb2.SERVER_STATE_SLEEPING, ServerStatus.NOT_SERVING),
        (common_pb2.SERVER_STATE_PAUSED, ServerStatus.READY),
    ):
        server.state = state
        await handle.probe()
        assert handle.status is status
        assert (handle.problem is None) is (status is ServerStatus.READY)
    handle.suspect(FAILED)
    assert (handle.status, handle.problem) == (ServerStatus.SUSPECT, FAILED)
    await handle.probe()
    assert handle.status is ServerStatus.READY


async def test_a_server_that_missed_a_publish_is_behind(
    pair: tuple[ScriptedServer, ServerHandle],
) -> None:
    _, handle = pair
    await handle.probe()
    weights = WeightTag(1, 1, "any", 11)
    with handle._policy.committing(1, 11, rollback=False):
        handle._policy.committed(weights)
    handle.policy_changed()
    assert handle.status is ServerStatus.BEHIND
    handle.suspect(FAILED)
    await handle.probe()
    assert handle.status is ServerStatus.BEHIND


async def test_a_server_that_leaves_is_brought_back_by_the_list_alone(
    pair: tuple[ScriptedServer, ServerHandle],
) -> None:
    _, handle = pair
    await handle.probe()
    handle.leave([])
    await handle.probe()
    handle.suspect(FAILED)
    handle.policy_changed()
    assert handle.status is ServerStatus.LEAVING
    handle.rejoin()
    assert handle.status is ServerStatus.JOINING
    await handle.probe()
    assert handle.status is ServerStatus.READY


async def test_a_server_that_is_gone_stays_so(pair: tuple[ScriptedServer, ServerHandle]) -> None:
    _, handle = pair
    handle.leave([])
    await handle.run(lambda: 60.0)  # nothing is under way
    assert handle.status is ServerStatus.GONE
    handle.rejoin()
    handle.suspect(FAILED)
    assert handle.status is ServerStatus.GONE
    assert "left the fleet" in str(handle.problem)

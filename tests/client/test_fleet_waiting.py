"""A fleet without a server that is ready says so, why, and when that is over."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest
from client.scripted import ScriptedServer, Sequence, until
from rollwire.v1 import common_pb2
from rollwire_client import ClosedError, Fleet

if TYPE_CHECKING:
    from client.scripted import Script

PROMPT = [1, 2, 3]
SLEEPING = common_pb2.SERVER_STATE_SLEEPING
SERVING = common_pb2.SERVER_STATE_SERVING


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_rollouts_that_wait_are_warned_of_once(
    pair: list[ScriptedServer], caplog: pytest.LogCaptureFixture
) -> None:
    for server in pair:
        server.state = SLEEPING
    async with Fleet([server.address for server in pair], probe_interval=0.02) as fleet:
        rollouts = [asyncio.create_task(fleet.generate(PROMPT)) for _ in range(3)]
        await until(lambda: bool(warnings(caplog)))
        (told,) = warnings(caplog)
        assert "rollouts wait (3), as no server is ready" in told
        assert all(f"{server.address}: is sleeping" in told for server in pair)
        left = re.search(r"the first is given up in (\d+) s", told)
        assert left is not None
        assert 60 < int(left[1]) < 120  # of the 120 s that are the default
        assert fleet.hindrance() == "; ".join(f"{server.address}: is sleeping" for server in pair)
        pair[1].state = SERVING
        assert all(trajectory.complete for trajectory in await asyncio.gather(*rollouts))
        await until(lambda: len(warnings(caplog)) > 1)
        assert fleet.hindrance() is None
    assert "no rollout waits for a server any more" in warnings(caplog)[1]
    assert len(warnings(caplog)) == 2


async def test_a_paused_fleet_hinders(server: ScriptedServer) -> None:
    server.state = common_pb2.SERVER_STATE_PAUSED
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        assert fleet.hindrance() == f"{server.address}: is paused"
        server.state = SERVING
        await until(lambda: fleet.hindrance() is None)


async def gives_up(sequence: Sequence) -> None:
    await sequence.send(2)
    sequence.server.state = common_pb2.SERVER_STATE_DRAINING
    await sequence.finish("INTERRUPTED", message="the engine died: out of memory")


async def is_quarantined(sequence: Sequence) -> None:
    sequence.server.state = common_pb2.SERVER_STATE_QUARANTINED
    await sequence.finish("INTERRUPTED", message="a commit failed half way: a bad disk")


@pytest.mark.parametrize(
    ("script", "gone", "reason"),
    [
        (gives_up, True, "cannot be reached: .*; it had said: .*the engine died: out of memory"),
        (is_quarantined, False, "is quarantined; it had said: .*half way: a bad disk"),
    ],
)
async def test_what_a_server_said_of_its_end_is_kept(
    server: ScriptedServer, script: Script, gone: bool, reason: str
) -> None:
    server.scripts = [script]
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: server.state != SERVING)
        if gone:
            await server.stop()
        await until(lambda: re.search(reason, fleet.hindrance() or "") is not None)
    with pytest.raises(ClosedError):
        await rollout


async def test_what_a_server_said_is_forgotten_once_it_serves(server: ScriptedServer) -> None:
    server.scripts = [is_quarantined]
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: "half way" in str(fleet.members[0].problem))
        server.state = SERVING
        assert (await rollout).complete
        server.state = SLEEPING
        await until(lambda: fleet.members[0].problem is not None)
        assert str(fleet.members[0].problem) == f"{server.address}: is sleeping"

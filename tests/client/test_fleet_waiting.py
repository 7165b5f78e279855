"""A fleet without a server that is ready says so, why, and when that is over."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import grpc
import pytest
from client.scripted import ScriptedServer, Sequence, until
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_client import (
    ClosedError,
    ErrorScope,
    Fleet,
    QueueFullError,
    Retries,
    RolloutFailedError,
    ServerUnreachableError,
)
from rollwire_client._fleet.router import WaitReason

if TYPE_CHECKING:
    from client.scripted import Script

PROMPT = [1, 2, 3]
SLEEPING = common_pb2.SERVER_STATE_SLEEPING
SERVING = common_pb2.SERVER_STATE_SERVING


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is told at once."""
    for reason in WaitReason:
        monkeypatch.setattr(reason, "grace", 0.0)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_a_server_that_is_lost_is_news_and_so_is_its_return(
    pair: list[ScriptedServer], caplog: pytest.LogCaptureFixture
) -> None:
    async with Fleet([server.address for server in pair], probe_interval=0.02) as fleet:
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))
        error = ServerUnreachableError("gone", server=pair[0].address)
        fleet._pool.servers[0].suspect(error)
        await until(lambda: len(warnings(caplog)) == 2)
    assert warnings(caplog) == [
        f"{pair[0].address}: suspect, was ready: gone",
        f"{pair[0].address}: ready, was suspect",
    ]


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
        assert fleet.unavailable_reason() == "; ".join(
            f"{server.address}: is sleeping" for server in pair
        )
        pair[1].state = SERVING
        assert all(trajectory.complete for trajectory in await asyncio.gather(*rollouts))
        await until(lambda: len(warnings(caplog)) > 1)
        assert fleet.unavailable_reason() is None
    assert "no rollout waits for a server any more" in warnings(caplog)[1]
    assert len(warnings(caplog)) == 2


async def test_a_paused_fleet_hinders(server: ScriptedServer) -> None:
    server.state = common_pb2.SERVER_STATE_PAUSED
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        assert fleet.unavailable_reason() == f"{server.address}: is paused"
        server.state = SERVING
        await until(lambda: fleet.unavailable_reason() is None)


async def test_rollouts_at_a_paused_server_are_warned_of_by_the_pauses_that_hold_it(
    pair: list[ScriptedServer], caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    go_on = asyncio.Event()

    async def held(sequence: Sequence) -> None:
        await sequence.send(2)
        await go_on.wait()
        await sequence.rest()

    paused, other = pair
    paused.state = other.state = common_pb2.SERVER_STATE_PAUSED
    paused.pauses = [
        rollout_pb2.ActivePause(pause_id="debug"),
        rollout_pb2.ActivePause(pause_id="eval", lease_left={"seconds": 30}),
    ]
    for server in pair:
        server.default = held
    retries = Retries(seconds=0.1)
    async with Fleet([s.address for s in pair], probe_interval=0.02, retries=retries) as fleet:
        rollouts = [asyncio.create_task(fleet.generate(PROMPT)) for _ in range(4)]
        await until(lambda: bool(warnings(caplog)))
        (told,) = warnings(caplog)
        assert "rollouts wait at paused servers (" in told
        assert f"{paused.address}: is paused by 'debug' (without a lease), 'eval'" in told
        await asyncio.sleep(0.1)  # longer than it may go without a place; it has one
        assert not any(rollout.done() for rollout in rollouts)
        paused.state = other.state = SERVING
        await until(lambda: len(warnings(caplog)) == 2)
        assert "no rollout waits at a paused server any more" in warnings(caplog)[1]
        go_on.set()
        assert all(trajectory.complete for trajectory in await asyncio.gather(*rollouts))


async def full(sequence: Sequence) -> None:
    await sequence.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", retry_after=0.01)


async def test_rollouts_at_a_paused_server_that_drains_are_warned_of(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    """It samples none of them until it is resumed, or the time that it has to drain is up."""
    go_on = asyncio.Event()

    async def held(sequence: Sequence) -> None:
        await go_on.wait()
        await sequence.rest()

    server.default = held
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: fleet._pool.servers[0].attempts == 1)
        server.pauses = [rollout_pb2.ActivePause(pause_id="debug")]
        server.state = common_pb2.SERVER_STATE_DRAINING
        why = f"at paused servers (1): {server.address}: is paused by 'debug'"
        await until(lambda: any(why in line for line in warnings(caplog)))
        go_on.set()
        assert (await rollout).complete


async def test_a_queue_that_stays_full_is_warned_of_and_given_up(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture, quick: None
) -> None:
    server.default = full
    async with Fleet([server.address], retries=Retries(seconds=1.0)) as fleet:
        with pytest.raises(
            RolloutFailedError, match=r"no server has room: .* queue is full"
        ) as told:
            await fleet.generate(PROMPT)
        assert told.value.scope is ErrorScope.SERVER
        assert isinstance(told.value.causes[-1], QueueFullError)
        (warned,) = warnings(caplog)
        assert "rollouts wait (1), as no server has room for them" in warned
        assert f"{server.address}: its queue is full; the first is given up in" in warned
        assert "its queue is full" in (fleet.unavailable_reason() or "")


async def test_a_new_token_gives_a_rollout_its_whole_time_again(server: ScriptedServer) -> None:
    """And the time that it has a place is not counted."""

    async def one_token(sequence: Sequence) -> None:
        await asyncio.sleep(0.25)
        await sequence.send(1)
        await sequence.finish("INTERRUPTED")

    scripts = [full, one_token] * 10
    server.scripts = scripts
    async with Fleet([server.address], retries=Retries(seconds=2), probe_interval=0.02) as fleet:
        assert (await fleet.generate(PROMPT)).complete
    assert not scripts


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"attempts": 0}, "Retries.attempts is 0"),
        ({"seconds": float("nan")}, "Retries.seconds is nan"),
        ({"first_delay": -1}, "Retries.first_delay is -1"),
        ({"longest_delay": float("inf")}, "Retries.longest_delay is inf"),
    ],
)
def test_retries_that_cannot_be(wrong: dict[str, float], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Retries(**wrong)


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
        await until(lambda: re.search(reason, fleet.unavailable_reason() or "") is not None)
    with pytest.raises(ClosedError):
        await rollout


async def test_what_a_server_said_is_forgotten_once_it_serves(server: ScriptedServer) -> None:
    server.scripts = [is_quarantined]
    async with Fleet([server.address], probe_interval=0.02) as fleet:
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: "half way" in str(fleet._pool.servers[0].problem))
        server.state = SERVING
        assert (await rollout).complete
        server.state = SLEEPING
        await until(lambda: fleet._pool.servers[0].problem is not None)
        assert str(fleet._pool.servers[0].problem) == f"{server.address}: is sleeping"

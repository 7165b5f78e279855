"""Pauses of a whole fleet, and leases that are renewed."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import grpc
import pytest
from client.scripted import ScriptedServer, until
from rollwire.v1 import common_pb2
from rollwire_client import (
    Fleet,
    FleetCallError,
    InvalidRequestError,
    Pause,
    RolloutClient,
    ServerState,
)

if TYPE_CHECKING:
    from rollwire.v1 import rollout_pb2

REFUSAL = {
    "code": grpc.StatusCode.UNAVAILABLE,
    "reason": "DRAINING",
    "message": "the server drains",
}


def fleet_of(*servers: ScriptedServer) -> Fleet:
    return Fleet([server.address for server in servers], probe_interval=60)


def pauses(server: ScriptedServer) -> list[rollout_pb2.PauseRequest]:
    return [request for name, request in server.calls if name == "Pause"]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_all_servers_pause_under_one_id(pair: list[ScriptedServer]) -> None:
    async with fleet_of(*pair) as fleet:
        report = await fleet.pause("mine", lease=30)
        assert report.answers == {server.address: Pause("mine", 0) for server in pair}
        await until(lambda: all(member.paused for member in fleet._pool.servers))
        assert "is paused by 'mine'" in (fleet.unavailable_reason() or "")
        report = await fleet.pause(lease=30)
        (pause_id,) = {pause.pause_id for pause in report.answers.values()}
        assert pause_id not in {"", "mine"}
        resumed = await fleet.resume("mine")
        assert {answer.remaining_pauses for answer in resumed.answers.values()} == {1}
        await fleet.resume()
        await fleet.resume()
        await until(lambda: fleet.unavailable_reason() is None)


async def test_a_server_that_does_not_pause_is_named(pair: list[ScriptedServer]) -> None:
    pair[1].refusals["Pause"] = REFUSAL
    async with fleet_of(*pair) as fleet:
        with pytest.raises(FleetCallError, match="pause succeeded on 1 of 2 servers") as caught:
            await fleet.pause("mine")
        assert caught.value.report.answers == {pair[0].address: Pause("mine", 0)}
        assert caught.value.report.errors[pair[1].address].reason == "DRAINING"
        assert len((await fleet.pause("mine", require=0.5)).errors) == 1


async def test_a_block_renews_its_lease_and_resumes(pair: list[ScriptedServer]) -> None:
    async with fleet_of(*pair) as fleet:
        async with fleet.paused(lease=0.15) as report:
            assert list(report.answers) == [server.address for server in pair]
            await until(lambda: all(len(pauses(server)) >= 4 for server in pair))
            assert {(await member.client.info()).state for member in fleet._pool.servers} == {
                ServerState.PAUSED
            }
        for server in pair:
            asked = pauses(server)
            assert {request.pause_id for request in asked} == {asked[0].pause_id}
            assert {request.lease.ToMilliseconds() for request in asked} == {150}
            assert server.calls[-1][0] == "Resume"  # no renewal came after it
            assert not server.pauses


async def test_a_server_that_restarts_within_a_block_is_paused_again(
    server: ScriptedServer,
) -> None:
    async with fleet_of(server) as fleet, fleet.paused(lease=0.3):
        server.pauses, server.state = [], common_pb2.SERVER_STATE_SERVING
        await until(lambda: server.state == common_pb2.SERVER_STATE_PAUSED)


async def test_a_block_that_raises_resumes(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        with contextlib.suppress(ZeroDivisionError):
            async with fleet.paused():
                assert server.pauses
                raise ZeroDivisionError
    assert not server.pauses


async def test_a_block_that_is_cancelled_resumes(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:

        async def block() -> None:
            async with fleet.paused():
                await asyncio.Event().wait()

        task = asyncio.create_task(block())
        await until(lambda: bool(server.pauses))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not server.pauses


async def test_a_block_that_cannot_begin_leaves_nothing_paused(pair: list[ScriptedServer]) -> None:
    pair[1].refusals["Pause"] = REFUSAL
    async with fleet_of(*pair) as fleet:
        with pytest.raises(FleetCallError):
            async with fleet.paused():
                pytest.fail("it began")
        assert not pair[0].pauses
        async with fleet.paused(require="any"):
            assert pair[0].pauses


async def test_a_renewal_that_fails_is_in_the_log_once(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with RolloutClient(server.address) as client:
        async with client.paused(lease=0.15):
            server.refusals["Pause"] = REFUSAL
            await until(lambda: len(pauses(server)) >= 4)
            failed = [line for line in warnings(caplog) if "was not renewed" in line]
            assert failed == [
                f"a pause was not renewed: {server.address}: the server drains (DRAINING)"
            ]
            server.refusals["Resume"] = REFUSAL
        assert "a pause was not resumed, its lease ends in 0.15 s" in warnings(caplog)[-1]


async def test_what_is_wrong_is_refused_before_anything_pauses(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        for call in (fleet.pause("x", lease=-1), fleet.pause(5), fleet.resume(5)):  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError):
                await call
        for lease in (0, -1, float("inf")):
            with pytest.raises(ValueError, match="lease"):
                fleet.paused(lease=lease)
    assert not server.calls

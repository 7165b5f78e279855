"""Sleep and wake-up of a whole fleet: what its rollouts do meanwhile, and who is said to sleep."""

from __future__ import annotations

import asyncio
import re
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from client.scripted import ScriptedServer, Sequence, expected_token, until
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_client import (
    Asleep,
    ClosedError,
    Fleet,
    FleetCallError,
    Retries,
    RolloutClient,
    RolloutFailedError,
    Sampling,
    ServerNotReadyError,
    ServerState,
    ServerUnreachableError,
    SleepingWeights,
    TimedOutError,
    Timeouts,
)
from rollwire_client._fleet.router import WaitReason

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [1, 2, 3]
SERVING = common_pb2.SERVER_STATE_SERVING
SLEEPING = common_pb2.SERVER_STATE_SLEEPING
NO_MEMORY = {
    "code": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "reason": "NO_MEMORY",
    "message": "the engine has no memory",
}


def fleet_of(*servers: ScriptedServer, **options: Any) -> Fleet:
    """In which only what a test does has a server probed, after the first probe."""
    return Fleet([server.address for server in servers], **{"probe_interval": 60, **options})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def two_tokens(sequence: Sequence) -> None:
    """And no more before it is interrupted; its next attempt samples the rest."""
    if sequence.offset:
        await sequence.rest()
        return
    await sequence.send(2)
    await asyncio.Event().wait()


async def all_run(fleet: Fleet, count: int) -> None:
    await until(lambda: sum(server.attempts for server in fleet._pool.servers) == count)


async def test_interrupted_rollouts_go_on_after_the_wake_up(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.default = two_tokens
    retries = Retries(attempts=1, seconds=0.05)  # neither counts
    async with fleet_of(*pair, retries=retries) as fleet:
        rollouts = [
            asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=9)))
            for _ in range(4)
        ]
        await until(lambda: all(len(server.requests) == 2 for server in pair))
        report = await fleet.sleep(SleepingWeights.KEEP)
        assert report.answers == {
            server.address: Asleep(SleepingWeights.KEEP, 1000) for server in pair
        }
        assert report.errors == {}
        await until(lambda: all(not member.attempts for member in fleet._pool.servers))
        rollouts.append(asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=9))))
        await asyncio.sleep(0.2)  # longer than without a place to go
        assert not any(rollout.done() for rollout in rollouts)
        assert all(len(server.requests) == 2 for server in pair)
        for server in pair:
            server.default = Sequence.rest
        woken = await fleet.wake_up()
        assert {info.state for info in woken.answers.values()} == {ServerState.SERVING}
        assert all(member.problem is None for member in fleet._pool.servers)
        wanted = tuple(expected_token(PROMPT, position) for position in range(9))
        trajectories = await asyncio.gather(*rollouts)
        assert [trajectory.token_ids for trajectory in trajectories] == [wanted] * 5


async def test_they_go_on_at_once_where_a_server_stayed_awake(pair: list[ScriptedServer]) -> None:
    kept, other = pair
    kept.refusals["Sleep"] = NO_MEMORY
    for server in pair:
        server.default = two_tokens
    async with fleet_of(*pair) as fleet:
        rollouts = [asyncio.create_task(fleet.generate(PROMPT)) for _ in range(2)]
        await until(lambda: all(server.requests for server in pair))
        kept.default = other.default = Sequence.rest
        with pytest.raises(FleetCallError) as caught:
            await fleet.sleep()
        report = caught.value.report
        assert list(report.answers) == [other.address]
        assert report.errors[kept.address].reason == "NO_MEMORY"
        assert str(caught.value) == (
            f"sleep succeeded on 1 of 2 servers ({other.address}), and was to succeed on 2: "
            f"{report.errors[kept.address]}"
        )
        moved = await asyncio.wait_for(rollouts[1], 60)
        assert moved.complete
        assert moved.servers == (other.address, kept.address)
        rollouts[0].cancel()
        await asyncio.gather(*rollouts, return_exceptions=True)


async def test_with_require_any_the_log_names_who_does_not_sleep(
    pair: list[ScriptedServer], caplog: pytest.LogCaptureFixture
) -> None:
    pair[0].refusals["Sleep"] = NO_MEMORY
    async with fleet_of(*pair) as fleet:
        report = await fleet.sleep(require="any")
        assert list(report.errors) == [pair[0].address]
        why = "the engine has no memory (NO_MEMORY)"
        assert f"sleep: {pair[0].address}: {why}" in warnings(caplog)


async def test_rollouts_that_end_in_time_are_not_interrupted(server: ScriptedServer) -> None:
    go_on = asyncio.Event()

    async def held(sequence: Sequence) -> None:
        await go_on.wait()
        await sequence.rest()

    server.default = held
    async with fleet_of(server) as fleet:
        first = asyncio.create_task(fleet.generate(PROMPT))
        await all_run(fleet, 1)
        sleeping = asyncio.create_task(fleet.sleep(finish_within=120))
        await until(lambda: fleet.unavailable_reason() is not None)
        assert fleet.unavailable_reason() == f"{server.address}: is about to sleep"
        later = asyncio.create_task(fleet.generate(PROMPT))  # it waits already
        await fleet._pool.servers[0].probe()  # whatever the server says
        assert not server.calls
        go_on.set()
        assert (await first).servers == (server.address,)
        await sleeping
        assert len(server.requests) == 1
        await fleet.wake_up()
        assert (await later).complete


async def test_what_does_not_end_in_time_is_interrupted(server: ScriptedServer) -> None:
    server.default = two_tokens
    async with fleet_of(server) as fleet:
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: bool(server.requests))
        began = time.monotonic()
        await fleet.sleep(finish_within=0.2)
        assert time.monotonic() - began >= 0.2
        await fleet.wake_up()
        assert (await rollout).complete
        assert len(server.requests) == 2


async def test_what_waits_for_a_wake_up_is_in_the_log(
    pair: list[ScriptedServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitReason.WAKE_UP, "grace", 0.0)
    async with fleet_of(*pair) as fleet:
        await fleet.sleep()
        rollouts = [asyncio.create_task(fleet.generate(PROMPT)) for _ in range(3)]
        await until(lambda: bool(warnings(caplog)))
        where = "; ".join(f"{server.address}: is (sleeping|about to sleep)" for server in pair)
        assert re.fullmatch(
            rf"rollouts wait \(3\), as this fleet put its servers to sleep: {where}; they "
            r"continue after wake_up\(\)",
            warnings(caplog)[0],
        )
        await fleet.wake_up()
        await asyncio.gather(*rollouts)
        await until(lambda: len(warnings(caplog)) == 2)
        assert "no rollout waits for a server to wake up any more" in warnings(caplog)[1]


async def test_a_rollout_s_own_timeout_ends_its_wait(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        await fleet.sleep()
        with pytest.raises(TimedOutError):
            await fleet.generate(PROMPT, timeout=0.1)


async def test_a_server_that_another_client_put_to_sleep_is_not_waited_for_without_end(
    server: ScriptedServer,
) -> None:
    async with fleet_of(server, retries=Retries(seconds=0.3), probe_interval=0.02) as fleet:
        async with RolloutClient(server.address) as other:
            await other.sleep()
        await until(lambda: fleet.unavailable_reason() is not None)
        with pytest.raises(RolloutFailedError, match="is sleeping"):
            await fleet.generate(PROMPT)


async def test_sleep_and_wake_up_may_be_repeated(pair: list[ScriptedServer]) -> None:
    async with fleet_of(*pair) as fleet:
        await fleet.wake_up()  # nobody sleeps
        await fleet.sleep(SleepingWeights.DISCARD)
        again = await fleet.sleep(SleepingWeights.DISCARD)
        assert set(again.answers.values()) == {
            Asleep(SleepingWeights.DISCARD, 0, already_asleep=True)
        }
        infos = (await fleet.info()).values()
        assert {info.sleeping_weights for info in infos} == {SleepingWeights.DISCARD}
        with pytest.raises(FleetCallError, match="weights DISCARD, and was asked for KEEP: wake"):
            await fleet.sleep(SleepingWeights.KEEP)
        assert all(member.asleep for member in fleet._pool.servers)
        woken = await fleet.wake_up()
        assert {info.state for info in woken.answers.values()} == {ServerState.AWAITING_WEIGHTS}


async def test_the_checkpoint_is_loaded_again_where_asked(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        await fleet.sleep(SleepingWeights.DISCARD)
        woken = await fleet.wake_up(reload_checkpoint=True)
        assert woken.answers[server.address].state is ServerState.SERVING
        asked = [request.reload_checkpoint for name, request in server.calls if name == "WakeUp"]
        assert asked == [True]


async def test_a_server_that_cannot_wake_up_sleeps_on(pair: list[ScriptedServer]) -> None:
    poor, other = pair
    async with fleet_of(*pair, retries=Retries(seconds=0.05)) as fleet:
        await fleet.sleep()
        poor.refusals["WakeUp"] = other.refusals["WakeUp"] = NO_MEMORY
        with pytest.raises(FleetCallError, match="wake_up succeeded on 0 of 2 servers, and was"):
            await fleet.wake_up()
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await asyncio.sleep(0.2)
        assert not rollout.done()
        del other.refusals["WakeUp"]
        report = await fleet.wake_up(require="any")
        assert list(report.errors) == [poor.address]
        assert (await rollout).servers == (other.address,)


async def test_a_server_killed_while_asleep(pair: list[ScriptedServer]) -> None:
    """It is told of, the others wake; what waited for it alone is given up in time."""
    dead, other = pair
    retries, timeouts = Retries(seconds=0.5), Timeouts(call=1, probe=1)
    async with fleet_of(*pair, retries=retries, timeouts=timeouts, probe_interval=0.02) as fleet:
        await fleet.sleep()
        await dead.stop()
        with pytest.raises(FleetCallError) as caught:
            await fleet.wake_up()
        assert list(caught.value.report.answers) == [other.address]
        assert isinstance(caught.value.report.errors[dead.address], ServerUnreachableError)
        assert (await fleet.generate(PROMPT)).servers == (other.address,)
        await fleet.sleep(require="any")
        rollout = asyncio.create_task(fleet.generate(PROMPT))
        await until(lambda: fleet._pool.servers[1].asleep)
        await other.stop()
        with pytest.raises(RolloutFailedError, match="no server is ready"):
            await asyncio.wait_for(rollout, 60)


async def test_a_server_that_does_not_answer_in_time(server: ScriptedServer) -> None:
    """It may fall asleep later, and what it says then counts."""
    server.delays["Sleep"] = asyncio.Event()
    async with fleet_of(server) as fleet:
        with pytest.raises(FleetCallError, match=r"no answer within 0\.2 s"):
            await fleet.sleep(timeout=0.2)
        await until(lambda: fleet.unavailable_reason() is None)
        assert (await fleet.generate(PROMPT)).complete


async def test_a_cancelled_sleep_leaves_no_server_out(server: ScriptedServer) -> None:
    server.delays["Sleep"] = asyncio.Event()
    async with fleet_of(server) as fleet:
        sleeping = asyncio.create_task(fleet.sleep())
        await until(lambda: bool(server.calls))
        sleeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sleeping
        assert (await fleet.generate(PROMPT)).complete


async def test_turns_of_two_callers_come_one_after_the_other(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        server.delays["Sleep"] = asyncio.Event()
        sleeping = [asyncio.create_task(fleet.sleep()) for _ in range(2)]
        await until(lambda: bool(server.calls))
        waking = asyncio.create_task(fleet.wake_up())
        await asyncio.sleep(0)
        server.delays["Sleep"].set()
        reports = await asyncio.gather(*sleeping)
        assert [report.answers[server.address].already_asleep for report in reports] == [
            False,
            True,
        ]
        await waking
        assert [name for name, _ in server.calls] == ["Sleep", "Sleep", "WakeUp"]
        assert (await fleet.generate(PROMPT)).complete


async def test_an_old_answer_does_not_wake_a_server(server: ScriptedServer) -> None:
    """A probe that began before the sleep, and whose answer comes after it."""
    async with fleet_of(server) as fleet:
        handle = fleet._pool.servers[0]
        asked: Callable[..., Any] = handle.client.info
        answered = asyncio.Event()

        async def late(**options: Any) -> Any:
            info = await asked(**options)
            handle.client.info = asked  # type: ignore[method-assign]
            await answered.wait()
            return info

        handle.client.info = late  # type: ignore[method-assign]
        probing = asyncio.create_task(handle.probe())
        await until(lambda: handle.client.info is asked)
        await fleet.sleep()
        answered.set()
        await probing
        assert handle.asleep


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": "discard"},
        {"finish_within": -1},
        {"finish_within": float("inf")},
        {"timeout": float("nan")},
        {"require": "most"},
    ],
)
async def test_what_is_wrong_is_refused_before_anything_sleeps(
    server: ScriptedServer, wrong: dict[str, Any]
) -> None:
    async with fleet_of(server) as fleet:
        with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
            await fleet.sleep(**wrong)
        assert fleet.unavailable_reason() is None
    assert not server.calls


async def test_a_closed_fleet_does_not_sleep() -> None:
    with pytest.raises(ClosedError):
        await Fleet(["127.0.0.1:9"]).sleep()


async def test_a_client_s_sleep(server: ScriptedServer) -> None:
    async with RolloutClient(server.address) as client:
        assert await client.sleep(SleepingWeights.DISCARD) == Asleep(SleepingWeights.DISCARD, 1000)
        assert (await client.info()).sleeping_weights is SleepingWeights.DISCARD
        assert (await client.sleep(SleepingWeights.DISCARD)).already_asleep
        with pytest.raises(ServerNotReadyError, match="sleeps already, with weights DISCARD"):
            await client.sleep()
        assert (await client.wake_up()).state is ServerState.AWAITING_WEIGHTS
        with pytest.raises(TypeError, match=r"SleepingWeights\.DISCARD"):
            await client.sleep("discard")  # type: ignore[arg-type]
    assert [request.weights for name, request in server.calls if name == "Sleep"] == [
        rollout_pb2.SLEEPING_WEIGHTS_DISCARD,
        rollout_pb2.SLEEPING_WEIGHTS_DISCARD,
        rollout_pb2.SLEEPING_WEIGHTS_HOST_BACKUP,
    ]

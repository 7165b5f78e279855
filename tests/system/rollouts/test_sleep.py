"""A fleet of real servers that sleeps and wakes up, and pauses, while it is used."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import (
    Fleet,
    FleetCallError,
    Publisher,
    PublishFailedError,
    Retries,
    RolloutClient,
    ServerInfo,
    ServerState,
    ServerUnreachableError,
    SleepingWeights,
)
from rollwire_client.sync import SyncFleet
from support.synthetic import (
    PROMPT,
    each_sampled,
    sampled,
    sampling,
    start_synthetic,
    undisturbed,
    until,
)

if TYPE_CHECKING:
    from rollwire_client import Trajectory
    from support.servers import ServerProcess, StartServer

TOKENS = 300
SEEDS = range(8)
KEPT = [SleepingWeights.KEEP, SleepingWeights.HOST_BACKUP]


@pytest.fixture
def two(start_server: StartServer) -> list[ServerProcess]:
    return [start_synthetic(start_server, 400) for _ in range(2)]


def fleet_of(servers: list[ServerProcess], **options: object) -> Fleet:
    return Fleet([server.address for server in servers], **options)  # type: ignore[arg-type]


def rollouts(fleet: Fleet) -> list[asyncio.Task[Trajectory]]:
    """With the seeds of ``undisturbed``."""
    return [asyncio.create_task(fleet.generate(PROMPT, sampling(seed, TOKENS))) for seed in SEEDS]


async def outputs(tasks: list[asyncio.Task[Trajectory]]) -> list[tuple[int, ...]]:
    return [trajectory.token_ids for trajectory in await asyncio.gather(*tasks)]


async def states(fleet: Fleet) -> set[ServerState]:
    return {info.state for info in (await fleet.info()).values() if isinstance(info, ServerInfo)}


@pytest.mark.parametrize("weights", KEPT)
async def test_rollouts_under_way_are_those_of_a_fleet_that_never_slept(
    both: list[ServerProcess], weights: SleepingWeights
) -> None:
    """Of the embedded engine, which really frees its memory; twice, as in two steps."""
    want = await undisturbed(both[0], len(SEEDS), TOKENS)
    async with fleet_of(both, retries=Retries(attempts=1)) as fleet:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 100)
        for _ in range(2):
            asleep = await fleet.sleep(weights)
            assert all(answer.freed_bytes > 0 for answer in asleep.answers.values())
            assert await states(fleet) == {ServerState.SLEEPING}
            await until(lambda: not any(member.attempts for member in fleet._pool.servers))
            left = sum(not task.done() for task in tasks)
            await fleet.wake_up()
            await until(
                lambda left=left: sum(member.attempts for member in fleet._pool.servers) == left
            )
        assert left > 0
        assert await outputs(tasks) == want


async def test_a_server_killed_while_asleep_costs_no_rollout(two: list[ServerProcess]) -> None:
    want = await undisturbed(two[0], len(SEEDS), TOKENS)
    async with fleet_of(two, probe_interval=0.1) as fleet:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 100)
        await fleet.sleep()
        two[0].kill()
        with pytest.raises(FleetCallError) as caught:
            await fleet.wake_up()
        assert list(caught.value.report.answers) == [two[1].address]
        assert isinstance(caught.value.report.errors[two[0].address], ServerUnreachableError)
        trajectories = await asyncio.gather(*tasks)
        assert [trajectory.token_ids for trajectory in trajectories] == want
        assert {trajectory.servers[-1] for trajectory in trajectories} == {two[1].address}


async def test_sleep_discards_an_update_that_is_not_committed(two: list[ServerProcess]) -> None:
    """As the server says: the publish fails, and the next one after the wake-up succeeds."""
    async with fleet_of(two) as fleet:
        publisher = Publisher(fleet, delta=False)  # reads the tensors while it sends them
        await publisher.publish_and_wait(1, {"weight": torch.ones(1024)})
        go = threading.Event()

        def tensors():
            yield "weight", torch.full((1024,), 2.0) if go.wait(60) else None

        handle = await publisher.publish(2, tensors)
        await fleet.sleep()
        go.set()
        with pytest.raises(PublishFailedError, match="sleep"):
            await handle.committed
        with pytest.raises(PublishFailedError, match="SLEEPING"):
            await publisher.publish_and_wait(2, {"weight": torch.full((1024,), 2.0)})
        woken = await fleet.wake_up()
        assert {info.weights.version for info in woken.answers.values()} == {1}
        assert (await fleet.generate(PROMPT, sampling(0, 5))).versions == (1,) * 5
        report = await publisher.publish_and_wait(2, {"weight": torch.full((1024,), 2.0)})
        assert report.failed == ()
        assert (await fleet.generate(PROMPT, sampling(0, 5))).versions == (2,) * 5


async def test_discarded_weights_come_with_the_next_publish(two: list[ServerProcess]) -> None:
    async with fleet_of(two) as fleet:
        publisher = Publisher(fleet)
        await publisher.publish_and_wait(1, {"weight": torch.ones(1024)})
        tasks = rollouts(fleet)
        await each_sampled(fleet, 50)
        await fleet.sleep(SleepingWeights.DISCARD)
        woken = await fleet.wake_up()
        assert {info.state for info in woken.answers.values()} == {ServerState.AWAITING_WEIGHTS}
        with pytest.raises(FleetCallError, match="AWAITING_WEIGHTS"):
            await fleet.sleep()  # nothing to free that it could serve with
        await publisher.publish_and_wait(2, {"weight": torch.full((1024,), 2.0)})
        for trajectory in await asyncio.gather(*tasks):
            assert len(trajectory.token_ids) == TOKENS
            assert [s.weights.version for s in trajectory.segments] in ([1, 2], [1, 1, 2])


async def test_two_callers(two: list[ServerProcess]) -> None:
    """As two processes have it: either may wake the servers for both."""
    want = await undisturbed(two[0], len(SEEDS), TOKENS)
    async with fleet_of(two, probe_interval=0.1) as fleet, fleet_of(two) as other:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 50)
        reports = await asyncio.gather(fleet.sleep(), other.sleep())
        for server in two:
            assert sorted(report.answers[server.address].already_asleep for report in reports) == [
                False,
                True,
            ]
        await other.wake_up()
        assert await outputs(tasks) == want
        assert await states(fleet) == {ServerState.SERVING}


@pytest.mark.parametrize("weights", KEPT)
async def test_a_frozen_judge_wakes_up_with_its_own_weights(
    start_server: StartServer, weights: SleepingWeights
) -> None:
    judge = start_server("--frozen")
    async with fleet_of([judge]) as fleet:
        before = await fleet.generate(PROMPT, sampling(1, 40))
        await fleet.sleep(weights)
        with pytest.raises(FleetCallError, match="for weights that were discarded"):
            await fleet.wake_up(reload_checkpoint=True)
        await fleet.wake_up()
        after = await fleet.generate(PROMPT, sampling(1, 40))
        await fleet.sleep(SleepingWeights.DISCARD)
        await fleet.wake_up(reload_checkpoint=True)
        reloaded = await fleet.generate(PROMPT, sampling(1, 40))
    assert before.token_ids == after.token_ids == reloaded.token_ids
    assert before.segments[0].weights == after.segments[0].weights
    assert before.segments[0].weights.digest == reloaded.segments[0].weights.digest


async def test_a_lease_that_ends_resumes_the_servers(two: list[ServerProcess]) -> None:
    async with fleet_of(two) as fleet:
        task = asyncio.create_task(fleet.generate(PROMPT, sampling(1, TOKENS)))
        await sampled(fleet, 10)
        report = await fleet.pause("a trainer that dies", lease=0.3)
        assert sum(pause.held_sequences for pause in report.answers.values()) == 1
        assert (await task).complete
        assert await states(fleet) == {ServerState.SERVING}


@pytest.mark.slow
async def test_a_block_stays_paused_beyond_its_lease(two: list[ServerProcess]) -> None:
    want = await undisturbed(two[0], len(SEEDS), TOKENS)
    async with fleet_of(two) as fleet:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 50)
        async with fleet.paused(lease=2):
            infos = [i for i in (await fleet.info()).values() if isinstance(i, ServerInfo)]
            await asyncio.sleep(2.5)
            again = [i for i in (await fleet.info()).values() if isinstance(i, ServerInfo)]
            assert {info.state for info in again} == {ServerState.PAUSED}
            assert [i.sampled_tokens for i in again] == [i.sampled_tokens for i in infos]
        assert await outputs(tasks) == want


async def test_a_paused_fleet_sleeps_and_is_still_paused_then(two: list[ServerProcess]) -> None:
    want = await undisturbed(two[0], len(SEEDS), TOKENS)
    async with fleet_of(two) as fleet:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 50)
        await fleet.pause("mine", lease=0)
        await fleet.sleep()
        woken = await fleet.wake_up()
        assert {info.state for info in woken.answers.values()} == {ServerState.PAUSED}
        await fleet.resume("mine")
        assert await outputs(tasks) == want


async def test_rollouts_that_may_finish_are_not_interrupted(two: list[ServerProcess]) -> None:
    async with fleet_of(two) as fleet:
        tasks = rollouts(fleet)
        await each_sampled(fleet, 50)
        await fleet.sleep(finish_within=60)
        assert all(len(task.result().servers) == 1 for task in tasks)
        async with RolloutClient(two[0].address) as client:
            assert (await client.info()).sleeping_weights is SleepingWeights.HOST_BACKUP
            assert (await client.wake_up()).state is ServerState.SERVING


def test_a_script_sleeps_wakes_up_and_pauses(two: list[ServerProcess]) -> None:
    (want,) = asyncio.run(undisturbed(two[0], 1, 20))
    with SyncFleet([server.address for server in two]) as fleet:
        for _ in range(2):
            assert len(fleet.sleep(SleepingWeights.KEEP).answers) == 2
            fleet.wake_up()
            assert fleet.generate(PROMPT, sampling(0, 20)).token_ids == want
        with fleet.paused(lease=5) as report:
            assert len(report.answers) == 2
            infos = fleet.info().values()
            assert {i.state for i in infos if isinstance(i, ServerInfo)} == {ServerState.PAUSED}
        fleet.pause("mine")
        fleet.resume("mine")
        assert fleet.generate(PROMPT, sampling(0, 20)).token_ids == want

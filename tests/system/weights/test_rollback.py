"""A trainer goes back to an earlier version, and not every server is there to follow."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Fleet, Publisher, Timeouts
from support.fleets import TIMEOUTS
from support.synthetic import (
    PROMPT,
    each_sampled,
    labels_are_honest,
    sampling,
    start_synthetic,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.servers import ServerProcess, StartServer
    from torch import Tensor

QUICK = Timeouts(call=2, silence=2, probe=2, close=1)


def tensors(version: float) -> dict[str, Tensor]:
    return {"weight": torch.full((1024,), float(version))}


@contextmanager
def frozen(server: ServerProcess) -> Iterator[None]:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


async def roll_back(publisher: Publisher, version: int) -> None:
    handle = await publisher.publish(version, tensors(version), allow_version_rollback=True)
    await handle.committed


async def sampled_versions(fleet: Fleet) -> set[int | None]:
    trajectories = await asyncio.gather(
        *(fleet.generate(PROMPT, sampling(seed, 4)) for seed in range(8))
    )
    return {version for trajectory in trajectories for version in trajectory.versions}


@pytest.mark.slow
async def test_a_server_that_missed_a_rollback_serves_again_once_it_has_it(
    start_server: StartServer,
) -> None:
    steady, victim = start_synthetic(start_server, 0), start_synthetic(start_server, 0)
    async with Fleet([steady.address, victim.address], timeouts=QUICK, probe_interval=0.1) as fleet:
        publisher = Publisher(fleet, timeouts=TIMEOUTS)
        other = fleet._pool.servers[1]

        async def miss(version: int) -> None:
            """The victim serves a higher version when it is there again."""
            with frozen(victim):
                await roll_back(publisher, version)
            await until(lambda: "the next publish or catch_up() updates it" in str(other.problem))

        await (await publisher.publish(57, tensors(57))).committed
        await miss(50)
        assert await sampled_versions(fleet) == {50}
        report = await publisher.catch_up(tensors(50))
        assert [(s.address, s.error) for s in report.servers] == [(victim.address, None)]
        await until(lambda: other.problem is None)
        assert other.version == 50

        await miss(40)
        report = await (await publisher.publish(41, tensors(41))).committed
        assert report.failed == ()
        await until(lambda: other.problem is None)

        # Also where the same label comes again, for other weights.
        await miss(40)
        report = await (await publisher.publish(41, tensors(-41))).committed
        assert report.failed == ()
        await until(lambda: other.problem is None)
        assert (
            len({member.info.weights.digest for member in fleet._pool.servers if member.info}) == 1
        )


@pytest.mark.parametrize("publishes", [True, False])
async def test_a_rollout_goes_on_under_the_policy_that_was_rolled_back_to(
    start_server: StartServer, publishes: bool
) -> None:
    """Also in a fleet through which nothing was published."""
    steady, victim = start_synthetic(start_server, 100), start_synthetic(start_server, 100)
    addresses = [steady.address, victim.address]
    async with (
        Fleet(addresses, timeouts=QUICK, probe_interval=0.1) as trainer,
        Fleet(addresses, timeouts=QUICK, probe_interval=0.1) as sampler,
    ):
        publisher = Publisher(trainer, timeouts=TIMEOUTS)
        await (await publisher.publish(10, tensors(10))).committed
        fleet = trainer if publishes else sampler
        tasks = [
            asyncio.create_task(fleet.generate(PROMPT, sampling(seed, 200))) for seed in range(4)
        ]
        await each_sampled(fleet, 5)
        await roll_back(publisher, 5)
        await until(lambda: all(member.version == 5 for member in fleet._pool.servers))
        victim.kill()
        trajectories = await asyncio.gather(*tasks)
        for seed, trajectory in enumerate(trajectories):
            assert [s.weights.version for s in trajectory.segments][:2] == [10, 5]
            assert set(trajectory.versions) == {10, 5}
            assert labels_are_honest(trajectory, seed)
        assert sum(len(trajectory.servers) == 2 for trajectory in trajectories) == 2

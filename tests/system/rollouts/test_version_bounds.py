"""Sequences of at most one version, while the servers of a fleet commit newer ones in turn."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import Fleet, Publisher, WeightVersionError
from support.synthetic import (
    PROMPT,
    each_sampled,
    labels_are_honest,
    sampling,
    start_synthetic,
    until,
)

if TYPE_CHECKING:
    from support.servers import ServerProcess, StartServer

TOKENS = 300


async def publish(version: int, *servers: ServerProcess) -> None:
    """To these alone, as when a publish does not reach the others."""
    weights = {"weight": torch.full((1024,), float(version))}
    async with Fleet([server.address for server in servers]) as fleet:
        handle = await Publisher(fleet).publish(version, weights)
        assert (await handle.committed).failed == ()


async def test_they_go_on_where_it_is_served_and_end_when_it_is_nowhere(
    start_server: StartServer,
) -> None:
    one = start_synthetic(start_server, 5)  # whose sequences would take a minute
    other = start_synthetic(start_server, 100)
    await publish(1, one, other)
    async with Fleet([one.address, other.address], probe_interval=0.2) as fleet:
        tasks = [
            asyncio.create_task(
                fleet.generate(PROMPT, sampling(seed, TOKENS), max_weight_version=1)
            )
            for seed in range(6)
        ]
        await each_sampled(fleet, 9)
        await publish(2, one)
        trajectories = await asyncio.gather(*tasks)
        assert sum(len(t.servers) == 2 for t in trajectories) == 3
        for seed, trajectory in enumerate(trajectories):
            assert trajectory.versions == (1,) * TOKENS
            assert trajectory.servers[-1] == other.address
            assert labels_are_honest(trajectory, seed)

        last = asyncio.create_task(
            fleet.generate(PROMPT, sampling(9, 10_000), max_weight_version=1, timeout=100)
        )
        await until(lambda: 0 < fleet._pool.servers[1].outstanding_tokens < 9_990)
        await publish(2, other)
        async with asyncio.timeout(60):  # it does not wait for its time to be up
            with pytest.raises(WeightVersionError, match="serves version 2") as caught:
                await last
    trajectory = caught.value.trajectory
    assert trajectory.versions == (1,) * len(trajectory.token_ids) != ()
    assert labels_are_honest(trajectory, 9)

"""Fleets of real servers that come and go, and that are not equally fast."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet
from rollwire_client._fleet.server_handle import ServerStatus
from support.synthetic import PROMPT, each_sampled, sampling, start_synthetic, undisturbed, until

if TYPE_CHECKING:
    from rollwire_client._fleet.server_handle import ServerHandle
    from support.servers import ServerProcess, StartServer


def member(fleet: Fleet, server: ServerProcess) -> ServerHandle:
    (found,) = (m for m in fleet._pool.servers if m.address == server.address)
    return found


async def ready(fleet: Fleet, *servers: ServerProcess) -> None:
    """Returns once these processes, and no others, take sequences."""
    want = {server.server_id for server in servers}
    await until(
        lambda: {m.server_id for m in fleet._pool.servers if m.status is ServerStatus.READY} == want
    )


@pytest.mark.slow
async def test_one_added_one_removed_one_replaced_under_50_rollouts(
    start_server: StartServer,
) -> None:
    rollouts, tokens = 50, 200
    fast = start_synthetic(start_server, 0)
    want = await undisturbed(fast, rollouts, tokens)
    # What runs on the one that is removed takes ten seconds, on the one that is replaced forty.
    stays, removed, replaced = (start_synthetic(start_server, rate) for rate in (50, 20, 5))
    listed = [stays, removed, replaced]
    async with Fleet(
        lambda: [server.address for server in listed], probe_interval=0.2, resolve_interval=0.05
    ) as fleet:
        await ready(fleet, *listed)
        tasks = [
            asyncio.create_task(fleet.generate(PROMPT, sampling(seed, tokens)))
            for seed in range(rollouts)
        ]
        await each_sampled(fleet, rollouts)  # three of each sequence there
        left = member(fleet, removed)
        listed.remove(removed)
        listed.append(fast)
        await ready(fleet, stays, replaced, fast)
        assert left.status is ServerStatus.LEAVING

        replaced.kill()
        listed[1] = await asyncio.to_thread(
            start_synthetic, start_server, 50, "--listen", replaced.address
        )
        assert listed[1].server_id != replaced.server_id
        await ready(fleet, *listed)
        trajectories = await asyncio.gather(*tasks)
        await until(lambda: left.status is ServerStatus.GONE)
    assert [trajectory.token_ids for trajectory in trajectories] == want
    ran = Counter(trajectory.servers[0] for trajectory in trajectories)
    assert set(ran.values()) == {16, 17}
    stayed = [t for t in trajectories if removed.address in t.servers]
    assert len(stayed) == ran[removed.address]
    assert all(t.servers == (removed.address,) for t in stayed)  # to their end
    moved = [t for t in trajectories if t.servers[0] == replaced.address]
    assert all(len({s.weights.server_id for s in t.segments}) == 2 for t in moved)
    assert removed.stop() == 0


@pytest.mark.slow
async def test_servers_are_busy_in_proportion_to_their_speed(start_server: StartServer) -> None:
    quick, dies, comes = (start_synthetic(start_server, 80) for _ in range(3))
    slow = start_synthetic(start_server, 20)
    listed = [quick, dies, slow]
    async with Fleet(
        lambda: [server.address for server in listed], probe_interval=0.2, resolve_interval=0.05
    ) as fleet:

        async def shares(rollouts: int) -> dict[str, float]:
            """Of the sequences, 24 at a time, that each server got."""
            ran: Counter[str] = Counter()
            seeds = iter(range(rollouts))

            async def work() -> None:
                for seed in seeds:
                    trajectory = await fleet.generate(PROMPT, sampling(seed, 20))
                    ran[trajectory.servers[-1]] += 1

            await asyncio.gather(*(work() for _ in range(24)))
            return {address: count / rollouts for address, count in ran.items()}

        await ready(fleet, *listed)
        first = await shares(300)
        dies.kill()
        listed[1] = comes
        await ready(fleet, quick, slow, comes)
        second = await shares(300)
    # Ideally 4/9, 4/9, 1/9. A machine that is busy with other things slows the quick ones down.
    for got, equal in ((first, dies), (second, comes)):
        assert set(got) == {quick.address, equal.address, slow.address}
        assert 0.5 < got[quick.address] / got[equal.address] < 2
        assert 0.03 < got[slow.address] < 0.28

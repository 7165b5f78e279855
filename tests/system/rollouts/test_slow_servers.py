"""Servers that are slow, and never for long enough to be gone: they get less, and nothing fails."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet
from support.namespaces import network, servers_on, unavailable
from support.synthetic import PROMPT, sampling, start_synthetic, undisturbed, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.servers import ServerProcess, StartServer

ROLLOUTS, TOKENS, AT_ONCE = 168, 20, 24
RATE = 80  # tokens a second of each sequence
STOPPED, RUNS = 0.12, 0.04  # seconds, in turn: at most a quarter of its speed
BITS_PER_SECOND = 48_000  # about a third of what a server sends that has half of the sequences


@contextlib.asynccontextmanager
async def stumbling(server: ServerProcess) -> AsyncIterator[None]:
    """Meanwhile it is stopped most of the time."""

    async def pulse() -> None:
        while True:
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED)
            server.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(RUNS)

    pulsing = asyncio.create_task(pulse())
    try:
        yield
    finally:
        pulsing.cancel()
        await asyncio.gather(pulsing, return_exceptions=True)
        server.process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def fleet_of(servers: list[ServerProcess]) -> AsyncIterator[Fleet]:
    """All of them ready, at the end too."""
    async with Fleet([server.address for server in servers], probe_interval=0.2) as fleet:
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))
        yield fleet
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))


async def shares(fleet: Fleet, want: list[tuple[int, ...]]) -> Counter[str]:
    """How many of the rollouts each server got; all are what they should be."""
    ran: Counter[str] = Counter()
    seeds = iter(range(len(want)))

    async def work() -> None:
        for seed in seeds:
            trajectory = await fleet.generate(PROMPT, sampling(seed, TOKENS))
            assert trajectory.token_ids == want[seed]
            (server,) = trajectory.servers  # to its end
            ran[server] += 1

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return ran


@pytest.mark.slow
async def test_a_server_that_is_stopped_most_of_the_time(start_server: StartServer) -> None:
    want = await undisturbed(start_synthetic(start_server, 0), ROLLOUTS, TOKENS)
    servers = [start_synthetic(start_server, RATE) for _ in range(3)]
    slow, one, other = (server.address for server in servers)
    async with fleet_of(servers) as fleet, stumbling(servers[0]):
        ran = await shares(fleet, want)
    # Ideally 1/9, 4/9, 4/9. A machine that is busy with other things slows the quick ones down.
    assert 0 < ran[slow] < 0.28 * ROLLOUTS
    assert 0.5 < ran[one] / ran[other] < 2


@pytest.mark.slow
@pytest.mark.skipif(bool(why := unavailable()), reason=why)
async def test_a_server_behind_a_slow_link(start_server: StartServer, tmp_path: Path) -> None:
    want = await undisturbed(start_synthetic(start_server, 0), ROLLOUTS, TOKENS)
    flags = ("--model", "none", "--engine", "synthetic")
    flags += ("--engine-arg", f"tokens-per-second={RATE}")
    with network(2) as lan, servers_on(lan.machines, tmp_path, *flags) as far:
        slow, quick = far.addresses
        async with fleet_of(far.all) as fleet:
            lan.machines[0].whisper(BITS_PER_SECOND)
            ran = await shares(fleet, want)
    assert 0 < ran[slow] < 0.4 * ROLLOUTS < ran[quick]

"""A server that stumbles along: stopped most of the time, and never for long enough to be gone."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from typing import TYPE_CHECKING

from rollwire_client import Fleet
from support.synthetic import PROMPT, sampling, start_synthetic, undisturbed, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollwire_client import Trajectory
    from support.servers import ServerProcess, StartServer

STOPPED, RUNS = 0.12, 0.04  # seconds, in turn: at most a quarter of its speed


@contextlib.asynccontextmanager
async def stumbling(server: ServerProcess) -> AsyncIterator[None]:
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


async def test_a_slow_server_gets_less_and_nothing_fails(start_server: StartServer) -> None:
    rollouts, tokens, at_once = 240, 20, 24
    want = await undisturbed(start_synthetic(start_server, 0), rollouts, tokens)
    slow, *quick = servers = [start_synthetic(start_server, 80) for _ in range(3)]
    done: dict[int, Trajectory] = {}
    seeds = iter(range(rollouts))

    async with Fleet([server.address for server in servers], probe_interval=0.2) as fleet:
        await until(lambda: all(member.problem is None for member in fleet.members))

        async def work() -> None:
            for seed in seeds:
                done[seed] = await fleet.generate(PROMPT, sampling(seed, tokens))

        async with stumbling(slow):
            await asyncio.gather(*(work() for _ in range(at_once)))
        assert [member.problem for member in fleet.members] == [None] * 3
    assert [done[seed].token_ids for seed in range(rollouts)] == want
    assert {len(trajectory.servers) for trajectory in done.values()} == {1}
    ran = Counter(trajectory.servers[0] for trajectory in done.values())
    # Ideally 1/9, 4/9, 4/9. A machine that is busy with other things slows the quick ones down.
    assert 0 < ran[slow.address] < 0.28 * rollouts
    assert 0.5 < ran[quick[0].address] / ran[quick[1].address] < 2

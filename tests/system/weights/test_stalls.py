"""A trainer whose event loop computes for a while, and a server that is stopped for a while: nobody
else is blamed for it, and no lease of another's ends by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from typing import TYPE_CHECKING

import pytest
from rollwire_client import RolloutClient
from support.calls import connected
from support.fleets import TIMEOUTS, policy, published, publisher
from support.publishing import Update, next_version, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fleets import Servers
    from support.servers import ServerProcess, StartServer

LEASE = 2.0


@pytest.mark.parametrize(
    "when", ["announced", "released", pytest.param("all the time", marks=pytest.mark.slow)]
)
async def test_a_trainer_that_computes_does_not_blame_its_servers(
    three: Servers, when: str
) -> None:
    async with three.fleet() as fleet:
        began = time.monotonic()
        await published(publisher(fleet), three.next_version())
        # No server is silent for longer than a few publishes take here and now.
        limit = max(0.6, 3 * (time.monotonic() - began))

        def compute() -> None:
            """On the event loop, for longer than any server may be silent; on a machine too busy
            for that, only for as long as the servers themselves wait for a bucket.
            """
            time.sleep(min(2 * limit, 2.0))

        hasty = dataclasses.replace(
            TIMEOUTS, call=limit, silence=limit, commit_silence=limit, discard=limit
        )
        trainer = publisher(fleet, timeouts=hasty)
        version = three.next_version()
        handle = await trainer.publish(version, await policy(trainer, version))
        if when == "released":
            await handle.released
        compute()
        if when == "all the time":
            while not handle.done:
                await asyncio.sleep(0.02)
                compute()
        report = await handle.committed
        assert report.failed == ()
        assert [member.problem for member in fleet._pool.servers] == [None] * 3


@contextlib.contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
async def test_a_pause_is_renewed_though_the_server_was_stopped(start_server: StartServer) -> None:
    server = start_server()
    async with RolloutClient(server.address) as client:
        await client.pause("mine", lease=LEASE)
        with stopped(server):
            renewing = asyncio.create_task(client.pause("mine", lease=60))
            await asyncio.sleep(LEASE + 0.3)  # it is over by the clock
        await renewing
    assert "pauses lifted" not in server.log.read_text()


@pytest.mark.slow
async def test_an_update_is_committed_though_the_server_was_stopped(
    start_server: StartServer,
) -> None:
    server = start_server()
    async with connected(server.address) as api:
        update = Update(api, await random_weights(api, 1), await next_version(api), lease=LEASE)
        await update.stage()
        with stopped(server):
            committing = asyncio.create_task(update.commit())
            await asyncio.sleep(LEASE + 0.3)
        assert (await committing).weights.version == update.version

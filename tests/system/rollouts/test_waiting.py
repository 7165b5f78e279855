"""Rollouts that a real server keeps waiting: how long, and what is said of it."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, QueueFullError, Retries, RolloutClient, RolloutFailedError
from rollwire_client._fleet.router import WaitReason
from support.synthetic import PROMPT, sampling, start_synthetic, until

if TYPE_CHECKING:
    from support.servers import StartServer


async def test_a_paused_server_that_is_full(
    start_server: StartServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has taken waits without an end; what finds no room is given up in time."""
    monkeypatch.setattr(WaitReason.RESUME, "grace", 0.0)
    flags = "--max-running", "2", "--max-waiting", "1"
    server = await asyncio.to_thread(start_synthetic, start_server, 0, *flags)
    async with RolloutClient(server.address) as client:
        await client.pause("debug", lease=0)
        retries = Retries(seconds=1.5)
        async with Fleet([server.address], retries=retries, probe_interval=0.1) as fleet:
            held = [asyncio.create_task(fleet.generate(PROMPT, sampling(n, 5))) for n in range(3)]
            await until(lambda: fleet._pool.servers[0].attempts == 3)
            began = time.monotonic()
            with pytest.raises(RolloutFailedError) as told:
                await fleet.generate(PROMPT, sampling(3, 5))
            assert 1 < time.monotonic() - began < 30
            assert isinstance(told.value.causes[-1], QueueFullError)
            why = f"{server.address}: is paused by 'debug' (without a lease)"
            assert f"no server has room: {why}, and its queue is full" in str(told.value)
            warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
            assert any(f"at paused servers (1): {why}" in line for line in warned)
            (pause,) = (await client.info()).pauses
            assert (pause.pause_id, pause.lease_left) == ("debug", None)
            await client.pause("debug", lease=60)
            (pause,) = (await client.info()).pauses
            assert 50 < pause.lease_left <= 60
            await client.resume("debug")
            assert all(trajectory.complete for trajectory in await asyncio.gather(*held))
            assert (await client.info()).pauses == ()

"""The thread that starts SGLang and ends it."""

from __future__ import annotations

import asyncio
import time

import pytest
from rollwire_server.engines.sglang import SglangConfig
from rollwire_server.engines.sglang.launch import Launcher


async def test_a_start_that_is_cancelled_at_once_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran, run = [], Launcher._run

    def late(launcher: Launcher) -> None:
        time.sleep(0.1)
        run(launcher)

    monkeypatch.setattr(Launcher, "_run", late)
    monkeypatch.setattr(Launcher, "_launch", lambda _: ran.append("started"))
    monkeypatch.setattr(Launcher, "_shut_down", lambda _: ran.append("ended"))
    launcher = Launcher(SglangConfig("none", "auto", "cpu", 1), lambda: object)
    starting = asyncio.create_task(launcher.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    async with asyncio.timeout(30):
        await launcher.stop()
        await launcher.stop()
    assert ran == ["started", "ended"]

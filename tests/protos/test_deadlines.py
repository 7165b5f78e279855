"""Deadlines count the time in which the event loop ran."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
from rollwire import deadlines
from rollwire.deadlines import Deadline, Timeout, Timer, elapsed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

STALL = 0.6


def stall() -> None:
    time.sleep(STALL)


async def come(peer: asyncio.StreamReader) -> None:
    async with Timeout(0.3):
        assert await peer.read(1) == b"x"


async def for_ever(_: asyncio.StreamReader) -> None:
    async with Timeout(0.3):
        await asyncio.Event().wait()


async def connection() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Server]:
    other: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
    server = await asyncio.start_server(lambda _, w: other.set_result(w), "127.0.0.1", 0)
    reader, own = await asyncio.open_connection(*server.sockets[0].getsockname())
    reader.own = own
    return reader, await other, server


@pytest.mark.parametrize("stalls", [1, 3])
async def test_what_came_in_a_stall_is_read_before_anybody_is_judged(stalls: int) -> None:
    reader, writer, server = await connection()
    waiting = asyncio.create_task(come(reader))
    await asyncio.sleep(0)
    for number in range(stalls):
        if number == stalls - 1:
            writer.write(b"x")
        stall()
        await asyncio.sleep(0)
    await waiting
    for end in (writer, reader.own):
        end.close()
    server.close()


@pytest.mark.parametrize("stalls", [0, 1])
async def test_who_is_silent_while_the_loop_listens_is_judged(stalls: int) -> None:
    began = time.monotonic()
    if stalls:
        asyncio.get_running_loop().call_later(0.1, stall)
    with pytest.raises(TimeoutError):
        await for_ever(asyncio.StreamReader())
    assert 0.3 + stalls * (STALL - 0.2) <= time.monotonic() - began


async def test_a_stall_is_not_counted() -> None:
    since, deadline = time.monotonic(), Deadline(10)
    assert elapsed(since) < STALL / 2
    stall()
    assert elapsed(since) < STALL / 2
    assert deadline.left > 10 - STALL / 2
    await asyncio.sleep(0.2)
    assert 0.2 <= elapsed(since) < 0.2 + STALL
    assert elapsed(time.monotonic()) < STALL / 2


async def test_who_never_listens_judges_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "_MAX_STALLED_SECONDS", 1.0)
    since = time.monotonic()
    elapsed(since)
    for _ in range(3):
        stall()
        await asyncio.sleep(0)
    assert 3 * STALL - 1.0 <= elapsed(since) <= time.monotonic() - since - 1.0


async def test_a_timer_that_is_cancelled_calls_nothing() -> None:
    called: list[int] = []
    timers = [Timer(0.05, called.append, number) for number in range(2)]
    timers[0].cancel()
    async with asyncio.timeout(60):
        while not called:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.01)
    timers[0].cancel()
    assert called == [1]


def test_each_loop_has_a_heart_of_its_own_which_ends_with_it() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with Timeout(0.01):
                await asyncio.Event().wait()

    for _ in range(3):
        asyncio.run(main())


async def _cancelled(inner: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.ensure_future(inner())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancel_within_is_no_timeout() -> None:
    await _cancelled(lambda: for_ever(asyncio.StreamReader()))

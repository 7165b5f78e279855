"""What was opened in one event loop is refused by name in another, and nothing is opened twice."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import pytest
from rollwire_client import (
    Batcher,
    ClosedError,
    Fleet,
    NotOpenHereError,
    Publisher,
    RolloutClient,
    Sampling,
)
from rollwire_client.sync import SyncFleet
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

SAMPLING = Sampling(max_new_tokens=3)
ADVICE = "open one in each asyncio.run and each thread, or use SyncFleet"


def calls(fleet: Fleet, client: RolloutClient) -> dict[str, Callable[[], Awaitable[Any]]]:
    session = fleet.session([1])
    return {
        "generate": lambda: fleet.generate([1], SAMPLING),
        "stream": lambda: anext(fleet.stream([1], SAMPLING)),
        "info": fleet.info,
        "newest_version": fleet.newest_version,
        "enter": fleet.__aenter__,
        "close": fleet.close,
        "Session.generate": lambda: session.generate(SAMPLING),
        "RolloutClient.info": client.info,
        "RolloutClient.generate": lambda: client.generate([1], SAMPLING),
        "RolloutClient.enter": client.__aenter__,
        "RolloutClient.close": client.close,
        "Publisher.schema": Publisher(fleet).schema,
        "Publisher.publish": lambda: Publisher(fleet).publish(1, {}),
        "Batcher.collect": lambda: Batcher(fleet, seed=1).collect([], 1),
    }


async def refusals(fleet: Fleet, client: RolloutClient, state: str) -> None:
    for name, call in calls(fleet, client).items():
        async with asyncio.timeout(60):
            with pytest.raises(NotOpenHereError) as caught:
                await call()
        what = "RolloutClient" if name.startswith("RolloutClient") else "Fleet"
        told = f"this {what} was opened in an event loop that {state}: {ADVICE}"
        assert str(caught.value).startswith(told), name


def test_in_a_second_asyncio_run() -> None:
    async def opened() -> tuple[Fleet, RolloutClient]:
        async with FakeServer() as server:
            fleet, client = Fleet([server.address]), RolloutClient(server.address)
            await fleet.__aenter__()
            await client.__aenter__()
            await fleet.generate([1], SAMPLING)
            await client.generate([1], SAMPLING)
        return fleet, client

    fleet, client = asyncio.run(opened())
    asyncio.run(refusals(fleet, client, "has ended"))


async def test_in_the_loop_of_another_thread() -> None:
    async with (
        FakeServer() as server,
        Fleet([server.address]) as fleet,
        RolloutClient(server.address) as client,
    ):
        await client.generate([1], SAMPLING)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                asyncio.run(refusals(fleet, client, "is not this one"))
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert not failed
        assert await fleet.generate([1], SAMPLING)
        assert await client.generate([1], SAMPLING)


async def test_nothing_is_entered_twice() -> None:
    async with FakeServer() as server:
        for opened in (Fleet([server.address]), RolloutClient(server.address)):
            async with opened:
                with pytest.raises(RuntimeError, match="is open already"):
                    await opened.__aenter__()
                assert await opened.generate([1], SAMPLING)
            async with opened:  # again, once it is closed
                assert await opened.generate([1], SAMPLING)

        def twice() -> None:
            with SyncFleet([server.address]) as fleet:
                with pytest.raises(RuntimeError, match="is open already"):
                    fleet.__enter__()
                assert fleet.generate([1], SAMPLING)

        await asyncio.to_thread(twice)


def test_a_fleet_that_was_closed_is_opened_again_in_another_run() -> None:
    addresses: list[str] = []
    fleet = Fleet(lambda: addresses)

    async def use() -> None:
        async with FakeServer() as server:
            addresses[:] = [server.address]
            async with fleet:
                assert await fleet.generate([1], SAMPLING)

    asyncio.run(use())
    asyncio.run(use())


async def test_why_no_server_samples_is_asked_of_a_fleet_that_is_open() -> None:
    async with FakeServer() as server:
        fleet = SyncFleet([server.address])

        def ask() -> None:
            with pytest.raises(ClosedError, match="it is not open"):
                fleet.unavailable_reason()
            with fleet:
                assert fleet.unavailable_reason() is None
            with pytest.raises(ClosedError, match="it is not open"):
                fleet.unavailable_reason()

        await asyncio.to_thread(ask)

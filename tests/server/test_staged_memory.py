"""Memory of an update, into which a group that has failed may still write."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
import rollwire_transport as transport
from rollwire_server.counts import Counts
from rollwire_server.errors import Reason, ServiceError
from rollwire_server.served import ServedWeights
from rollwire_server.update import Announcement, Membership, Phase, Publisher
from rollwire_server.updates import Updates
from support.engine_room import serving
from support.memory_link import MemoryLink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PUBLISHER = Publisher("trainer", 1)


class Failing(MemoryLink):
    """Of a sender that is gone, to which something holds on, or not."""

    def __init__(self, *, lets_go: bool) -> None:
        super().__init__()
        self._lets_go = lets_go

    def close(self) -> bool:
        return self._lets_go


@contextlib.asynccontextmanager
async def updating() -> AsyncIterator[tuple[Updates, transport.Manifest]]:
    async with serving() as (rollouts, lifecycle, engine), asyncio.TaskGroup() as tasks:
        counts = Counts()
        updates = Updates(
            engine, lifecycle, ServedWeights(engine, lifecycle, rollouts, counts), counts, tasks,
            frozen=False, bucket_timeout=5, listening=transport.Listening("127.0.0.1"),
        )  # fmt: skip
        yield updates, transport.plan(engine.schema())
        await updates.drop(Reason.DRAINING, "the test is over")


@pytest.mark.parametrize("lets_go", [True, False])
async def test_an_update_whose_memory_is_not_let_go_of_ends(
    monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    monkeypatch.setattr(transport, "join", lambda *_, **__: Failing(lets_go=lets_go))
    async with updating() as (updates, manifest), asyncio.timeout(20):
        reports = updates.announce(Announcement(PUBLISHER, "u", 1, False, manifest, 30.0))
        assert (await anext(reports)).phase is Phase.READY
        await updates.join(PUBLISHER, "u", Membership("e", "gloo", 1, 2, "127.0.0.1:1", 0), 5)

        async def until_stalled() -> None:
            async for report in reports:
                if report.phase is Phase.STALLED and lets_go:
                    return

        if lets_go:
            await until_stalled()
            assert updates.update is not None
        else:
            with pytest.raises(ServiceError, match="may still write") as caught:
                await until_stalled()
            assert caught.value.reason is Reason.NOT_STAGED
            assert updates.update is None
        await reports.aclose()

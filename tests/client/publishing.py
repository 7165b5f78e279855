"""A publisher and the scripted servers that it publishes to."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import torch
from client.scripted_weights import BUCKET_BYTES, PublishableServer, policy
from rollwire_client import Fleet, Publisher, PublishReport, PublishTimeouts, Timeouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TIMEOUTS = PublishTimeouts(silence=10, join=5, bucket=5, staged=5, discard=0.5)


@contextlib.asynccontextmanager
async def publishing(
    count: int, timeouts: PublishTimeouts = TIMEOUTS, **fleet_options: float
) -> AsyncIterator[tuple[list[PublishableServer], Fleet, Publisher]]:
    servers = [await PublishableServer().start() for _ in range(count)]
    try:
        async with Fleet(
            [server.address for server in servers],
            timeouts=Timeouts(call=1, close=0.2),
            **fleet_options,
        ) as fleet:
            yield (
                servers,
                fleet,
                Publisher(fleet, term=7, bucket_bytes=BUCKET_BYTES, timeouts=timeouts),
            )
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def publish(publisher: Publisher, version: int | None = 1, seed: int = 0) -> PublishReport:
    return await (await publisher.publish(version, policy(seed))).committed


def holds(server: PublishableServer, seed: int = 0) -> bool:
    want = {name: tensor for name, tensor in policy(seed).items() if name != "head.weight"}
    return server.committed.keys() == want.keys() and all(
        torch.equal(server.committed[name], tensor) for name, tensor in want.items()
    )

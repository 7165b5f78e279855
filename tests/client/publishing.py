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
    count: int,
    timeouts: PublishTimeouts = TIMEOUTS,
    *,
    accept_deltas: bool = False,
    full_every: int | None = None,
    **fleet_options: float,
) -> AsyncIterator[tuple[list[PublishableServer], Fleet, Publisher]]:
    """Without deltas, everything is sent out of the tensors that are given."""
    servers = [PublishableServer() for _ in range(count)]
    for server in servers:
        server.accepts_deltas = accept_deltas
        await server.start()
    try:
        async with Fleet(
            [server.address for server in servers],
            timeouts=Timeouts(call=1, close=0.2),
            **fleet_options,
        ) as fleet:
            publisher = Publisher(
                fleet,
                term=7,
                bucket_bytes=BUCKET_BYTES,
                timeouts=timeouts,
                delta=accept_deltas,
                full_every=full_every,
            )
            yield servers, fleet, publisher
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def publish(publisher: Publisher, version: int | None = 1, seed: int = 0) -> PublishReport:
    return await (await publisher.publish(version, policy(seed))).committed


def holds(server: PublishableServer, seed: int = 0) -> bool:
    want = {name: tensor for name, tensor in policy(seed).items() if name != "head.weight"}
    return server.committed.keys() == want.keys() and all(
        torch.equal(server.committed[name], tensor) for name, tensor in want.items()
    )

"""The server's sequences without gRPC."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from rollwire_server.counts import Counts
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine
from rollwire_server.lifecycle import Event, Lifecycle
from rollwire_server.rollouts import Rollouts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Rollouts, Lifecycle, SyntheticEngine]]:
    """All that lies between streams and an engine, in this process, with the synthetic engine."""
    engine = SyntheticEngine(SyntheticConfig("none", tokens_per_second=1000))
    lifecycle = Lifecycle(default_pause_lease=0)
    rollouts = Rollouts(
        engine, lifecycle, Counts(), max_waiting=100, max_sequence_seconds=60,
        engine_died=lambda error: pytest.fail(str(error)),
    )  # fmt: skip
    rollouts.committed(await engine.start("server", rollouts))
    lifecycle.happened(Event.LOADED)
    try:
        yield rollouts, lifecycle, engine
    finally:
        await engine.stop()

"""The server without gRPC: its sequences, its weights, its sleep."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import rollwire_transport as transport
from rollwire.reasons import Reason
from rollwire.types import WeightTag
from rollwire_server.counters import ServerCounters
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine
from rollwire_server.sequences.manager import Sequences
from rollwire_server.sleep import SleepController
from rollwire_server.state import StateChange, StateMachine
from rollwire_server.weights.manager import UpdateManager
from rollwire_server.weights.state import WeightState
from rollwire_server.weights.transport_group import JoinRequest, JoinStep

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollwire_server.weights.update import PublisherId


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[tuple[Sequences, StateMachine, SyntheticEngine]]:
    """All that lies between streams and an engine, in this process, with the synthetic engine."""
    engine = SyntheticEngine(SyntheticConfig("none", tokens_per_second=1000))
    state = StateMachine(default_pause_lease=0)
    sequences = Sequences(
        engine, state, ServerCounters(), max_waiting=100, max_sequence_seconds=60,
        engine_died=lambda error: pytest.fail(str(error)),
    )  # fmt: skip
    sequences.weights_committed(await engine.start("server", sequences))
    state.apply(StateChange.LOADED)
    try:
        yield sequences, state, engine
    finally:
        await engine.stop()


@dataclass(frozen=True)
class Room:
    """A server of one tensor "weight"; ``manifest`` is that of a full update."""

    sequences: Sequences
    state: StateMachine
    engine: SyntheticEngine
    counters: ServerCounters
    updates: UpdateManager
    sleep: SleepController
    manifest: transport.Manifest


async def joined(
    updates: UpdateManager, publisher: PublisherId, update_id: str, epoch: str = "e"
) -> None:
    """Has an update join a group over whatever ``transport.open_link`` returns."""
    for step in (JoinStep.PREPARE, JoinStep.CONNECT):
        request = JoinRequest(step, epoch, "gloo", rank=1, world_size=2, host="127.0.0.1")
        await updates.join(publisher, update_id, request, 5)


@contextlib.asynccontextmanager
async def updating() -> AsyncIterator[Room]:
    """A server that takes updates and sleeps, in this process, with the synthetic engine."""
    async with serving() as (sequences, state, engine), asyncio.TaskGroup() as tasks:
        counters = ServerCounters()
        weights = WeightState(engine, state, sequences, counters)
        digest = transport.sum_digests((await engine.digests()).values())
        await weights.loaded(WeightTag(None, 0, "server", digest))
        updates = UpdateManager(
            engine, state, weights, counters, tasks,
            frozen=False, bucket_timeout=5, listen=transport.ListenOptions("127.0.0.1"),
        )  # fmt: skip
        sleep = SleepController(engine, state, sequences, updates, tasks)
        state.attach(engine)
        holding = tasks.create_task(state.run())
        manifest = transport.plan(engine.schema())
        yield Room(sequences, state, engine, counters, updates, sleep, manifest)
        await updates.discard_current(Reason.DRAINING, "the test is over")
        holding.cancel()

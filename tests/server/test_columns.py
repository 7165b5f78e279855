"""StreamRollouts towards clients that read late or never."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from rollwire.v1 import rollout_pb2
from rollwire_server.counters import ServerCounters
from rollwire_server.rpc.rollout_stream import RolloutStream
from support.calls import request
from support.engine_room import serving
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollwire_server.engines.base import Engine
    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.state import StateMachine

MIB = 1 << 20


class Client:
    """The other side of a call, as the server's context has it; reads while ``reading`` is set."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: list[rollout_pb2.StreamRolloutsResponse] = []
        self.reading = asyncio.Event()
        self.taken = 0  # of what was said

    def say(self, handle: int, **command: Any) -> None:
        self._said.put_nowait(rollout_pb2.StreamRolloutsRequest(handle=handle, **command))

    def close(self) -> None:
        self._said.put_nowait(None)

    async def commands(self) -> AsyncIterator[rollout_pb2.StreamRolloutsRequest]:
        while (said := await self._said.get()) is not None:
            self.taken += 1
            yield said

    async def write(self, message: rollout_pb2.StreamRolloutsResponse) -> None:
        await self.reading.wait()
        self.heard.append(message)

    def tokens(self, handle: int) -> int:
        return sum(
            count
            for message in self.heard
            for own, count in zip(message.handles, message.counts, strict=True)
            if own == handle
        )


@contextlib.asynccontextmanager
async def streaming(
    engine: Engine, state: StateMachine, sequences: Sequences
) -> AsyncIterator[Client]:
    client = Client()
    context: Any = client
    commands = client.commands()
    stream = RolloutStream(engine, state, sequences, ServerCounters(), commands, context)
    running = asyncio.create_task(stream.run())
    try:
        yield client
    finally:
        client.reading.set()
        client.close()
        async with asyncio.timeout(60):
            await running


async def test_refusals_wait_for_their_reader_in_messages_of_the_usual_size() -> None:
    count = 12_000
    async with serving() as (sequences, state, engine):
        async with streaming(engine, state, sequences) as client:
            client.say(0, start=request((1,), 300, seed=1))
            await until(lambda: sequences.live == 1)
            odd = "x" * 250  # is repeated in the answer
            for handle in range(1, count + 1):
                client.say(handle, start=request((1,), 5, request_id=odd, timeout=-1.0))
            taken = -1
            while taken < client.taken:  # as long as it goes on to read
                taken = client.taken
                await asyncio.sleep(0.05)
            assert client.taken < count / 2, "what waits for its cursor has no bound"
        refused = [
            event for message in client.heard for event in message.events if event.HasField("error")
        ]
        assert len(refused) == count
        assert max(message.ByteSize() for message in client.heard) < MIB
        assert client.tokens(0) == 300


async def test_who_was_superseded_aborts_nothing() -> None:
    message = request((1,), 2000, request_id="mine", grace=10.0)
    async with serving() as (sequences, state, engine):
        async with (
            streaming(engine, state, sequences) as old,
            streaming(engine, state, sequences) as new,
        ):
            new.reading.set()
            old.say(1, start=message)
            await until(lambda: sequences.live == 1)
            new.say(1, start=message)
            await until(lambda: new.tokens(1) > 5)
            old.say(1, abort=rollout_pb2.AbortSequence())  # it has not read that it is superseded
            await until(lambda: old.taken == 2)
            before = new.tokens(1)
            await until(lambda: new.tokens(1) > before + 20)
            new.say(1, abort=rollout_pb2.AbortSequence())
        ends = [
            [
                rollout_pb2.FinishReason.Name(event.finish.reason)
                for m in client.heard
                for event in m.events
            ]
            for client in (old, new)
        ]
        assert ends == [["FINISH_REASON_SUPERSEDED"], ["FINISH_REASON_ABORTED"]]

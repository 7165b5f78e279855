"""A trainer in a process of its own, which stops in a phase of its publish and may be killed."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from rollwire_client import PublishTimeouts, RollwireError

from support.fleets import open_fleet, policy, published, publisher
from support.phases import FORMING, Strike, Victim
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

SECONDS = 120


@dataclass(frozen=True)
class Order:
    """A publish, and the phase that the trainer stops in."""

    addresses: list[str]
    version: int
    base: int | None  # that it publishes before, to send what has changed; None: without deltas
    phase: str
    first: Victim  # to join; the last to commit
    backend: str
    timeouts: PublishTimeouts


@dataclass
class Outcome:
    """What came of the publish, and of the trainer's next one."""

    committed: list[str] = field(default_factory=list)
    error: str = ""
    next_error: str = ""


class Trainer:
    """A trainer that has come to its phase, as the test sees it."""

    def __init__(self, order: Order) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(order, theirs), daemon=True)
        self.process.start()
        theirs.close()

    async def stands(self) -> None:
        """Returns when it is in its phase."""
        told = await self._read()
        assert told == "here", told

    def kill(self) -> None:
        self.process.kill()
        self.process.join(SECONDS)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It wakes up, and goes on with its publish."""
        self._signal(signal.SIGCONT)
        self._pipe.send("go on")

    async def outcome(self) -> Outcome:
        told = await self._read()
        assert isinstance(told, Outcome)
        return told

    async def _read(self) -> object:
        assert await asyncio.to_thread(self._pipe.poll, SECONDS), "the trainer says nothing"
        return self._pipe.recv()

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def close(self) -> None:
        if self.process.is_alive():
            self._signal(signal.SIGCONT)
            self.kill()
        self._pipe.close()


@contextlib.contextmanager
def trainer(order: Order) -> Iterator[Trainer]:
    one = Trainer(order)
    try:
        yield one
    finally:
        one.close()


def _run(order: Order, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(asyncio.run(_publish(order, pipe)))


async def _publish(order: Order, pipe: Connection) -> Outcome:
    def stop() -> None:
        pipe.send("here")
        pipe.recv()

    outcome, steps = Outcome(), Steps()
    async with open_fleet(order.addresses, steps) as fleet:
        delta = order.base is not None
        own = publisher(fleet, order.backend, timeouts=order.timeouts, delta=delta)
        if order.base is not None:
            await published(own, order.base)
            if order.phase in FORMING:
                await fleet._pool.groups.close()
        tensors = await policy(own, order.version)
        strike = Strike(order.phase, steps, order.first, stop)
        try:
            report = await (await own.publish(order.version, strike.source(tensors))).committed
        except RollwireError as error:
            outcome.error = f"{type(error).__name__}: {error}"
        else:
            outcome.committed = [s.address for s in report.servers if s.weights is not None]
        try:
            await own.publish(order.version, tensors)
        except RollwireError as error:
            outcome.next_error = error.reason
    return outcome

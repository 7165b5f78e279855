"""Something that happens to one server in exactly one phase of a publish."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from _pytest.mark import ParameterSet
    from torch import Tensor

    from support.servers import ServerProcess
    from support.steps import Steps

PHASES = (
    "ready",  # every server has checked the update and reserved memory
    "joining",  # the victim has taken the first step to join the group, the others have not
    "transfer",  # half of the tensors are on their way; for a delta, have been compared
    "staged",  # every server has everything, and none was told to commit
    "commit",  # another server has committed, the victim was not told to
)


def publishes(*, fast: str, fast_delta: str) -> list[ParameterSet]:
    """Each phase, of a publish without deltas and of one with them, in the same way."""
    return [
        pytest.param(p, delta, marks=[] if p == quick else [pytest.mark.slow])
        for delta, quick in ((False, fast), (True, fast_delta))
        for p in PHASES
    ]


FORMING = ("ready", "joining")
"""Phases of a publish that forms a new group."""

SECONDS = 120


@dataclass(frozen=True)
class Victim:
    """The server that something happens to."""

    address: str
    pid: int

    @classmethod
    def of(cls, server: ServerProcess) -> Victim:
        return cls(server.address, server.process.pid)


class Strike:
    """Calls ``act`` once, in a phase of the publish that goes over channels watched by ``steps``.

    Args:
        phase: One of ``PHASES``.
        steps: Of the publisher's channels.
        victim: The server; it must not be the fleet's only one.
        act: What happens.
    """

    def __init__(self, phase: str, steps: Steps, victim: Victim, act: Callable[[], None]) -> None:
        self._phase = phase
        self._victim = victim
        self._act = act
        self._done = asyncio.Event()
        self._joined = asyncio.Event()
        self._committed = asyncio.Event()
        steps.before = {"JoinTransport": self._before_join, "CommitWeights": self._before_commit}
        steps.after = {"JoinTransport": self._after_join, "CommitWeights": self._after_commit}

    @property
    def done(self) -> bool:
        """Whether it has happened."""
        return self._done.is_set()

    def source(self, tensors: Mapping[str, Tensor]) -> Callable[[], Iterator[tuple[str, Tensor]]]:
        """The tensors, as what a publish takes."""

        def source() -> Iterator[tuple[str, Tensor]]:
            for number, item in enumerate(tensors.items()):
                if self._phase == "transfer" and number == len(tensors) // 2:
                    self._happens()
                yield item

        return source

    def _happens(self) -> None:
        if not self.done:
            self._done.set()
            self._act()

    async def _before_join(self, address: str, _request: Any) -> None:
        if self._phase == "ready":
            self._happens()
        elif self._phase == "joining" and not self.done and address != self._victim.address:
            async with asyncio.timeout(SECONDS):
                await self._joined.wait()
            self._happens()

    async def _after_join(self, address: str, _request: Any) -> None:
        if address == self._victim.address:
            self._joined.set()

    async def _before_commit(self, address: str, _request: Any) -> None:
        if self._phase == "staged":
            self._happens()
        elif self._phase == "commit" and not self.done and address == self._victim.address:
            async with asyncio.timeout(SECONDS):
                await self._committed.wait()
            self._happens()

    async def _after_commit(self, _address: str, _request: Any) -> None:
        self._committed.set()

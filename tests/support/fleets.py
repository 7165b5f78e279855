"""Servers that tests of updates share: what a test kills comes back at the same address."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from rollwire_client import Fleet, Publisher, PublishTimeouts, Timeouts

from support.servers import ServerProcess, servers
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from rollwire_client import PublishReport
    from torch import Tensor

    from support.servers import StartServer

# Short, so that faults cost little, and long enough for a machine that is busy with other things.
TIMEOUTS = PublishTimeouts(
    call=3,
    ready=20,
    silence=2.5,
    join=6,
    bucket=6,
    staged=10,
    commit=8,
    commit_silence=2,
    discard=2,
    stage_lease=30,
)
QUICK = Timeouts(call=3, silence=2, probe=2, close=1)
BUCKET_BYTES = 1 << 14  # some thirty buckets
CHANGED_SHARE = 0.02


class Servers:
    """Servers that serve the same policy.

    Attributes:
        all: As they run now.
    """

    def __init__(self, running: list[ServerProcess]) -> None:
        self.all = running
        self._version = 0

    @property
    def addresses(self) -> list[str]:
        return [server.address for server in self.all]

    def next_version(self) -> int:
        """Above all that were given before."""
        self._version += 1
        return self._version

    def fleet(self, steps: Steps | None = None) -> contextlib.AbstractAsyncContextManager[Fleet]:
        return open_fleet(self.addresses, steps)


class RestartableServers(Servers):
    """Servers of which a test may kill any."""

    def __init__(self, start: StartServer, count: int, *flags: str) -> None:
        super().__init__([start(*flags) for _ in range(count)])
        self._start = start
        self._flags = flags

    def restart(self, server: ServerProcess) -> ServerProcess:
        """Starts a server that is dead again, where it was; it awaits weights."""
        again = self._start("--listen", server.address, "--await-weights", *self._flags)
        self.all[self.all.index(server)] = again
        return again


@contextlib.asynccontextmanager
async def open_fleet(addresses: list[str], steps: Steps | None = None) -> AsyncIterator[Fleet]:
    """A fleet whose calls ``steps`` watches."""
    async with contextlib.AsyncExitStack() as stack:
        with (steps or Steps()).watching():
            fleet = Fleet(addresses, timeouts=QUICK, probe_interval=0.2)
            await stack.enter_async_context(fleet)
        yield fleet


def publisher(fleet: Fleet, backend: str = "gloo", **options: object) -> Publisher:
    """A publisher that takes over from all before it."""
    fields = {"bucket_bytes": BUCKET_BYTES, "timeouts": TIMEOUTS, **options}
    return Publisher(fleet, backend=backend, **fields)  # type: ignore[arg-type]


@contextlib.contextmanager
def shared_servers(folder: Path, count: int, *flags: str) -> Iterator[RestartableServers]:
    with servers(folder) as start:
        yield RestartableServers(start, count, *flags)


async def policy(publisher: Publisher, seed: int) -> dict[str, Tensor]:
    """Random weights that fit; the same for the same seed. Those of two seeds differ in some
    elements of each tensor.
    """
    common, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in await publisher.schema():
        if spec.alias_of is None:
            tensor = torch.randn(spec.shape, generator=common) * 0.1
            changes = torch.rand(spec.shape, generator=own) < CHANGED_SHARE
            tensor[changes] = torch.randn(int(changes.sum()), generator=own) * 0.1
            tensors[spec.name] = tensor.to(getattr(torch, spec.dtype))
    return tensors


async def published(publisher: Publisher, version: int) -> PublishReport:
    """A publish that every server commits."""
    handle = await publisher.publish(version, await policy(publisher, version))
    report = await handle.committed
    assert report.failed == ()
    assert {(s.weights.version, s.weights.digest) for s in report.servers if s.weights} == {
        (version, report.digest)
    }
    return report

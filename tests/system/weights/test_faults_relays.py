"""A server dies or freezes while a chain passes buckets on: the others are served around it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from rollwire_transport import available_backends
from support.fleets import TIMEOUTS, published, publisher, shared_servers
from support.footprint import Footprint, nothing_is_left
from support.one_death import costs_one_server
from support.phases import Strike, Victim
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fleets import RestartableServers

UCX = available_backends()["ucx"]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UCX.ok, reason=UCX.reason)]

# As for one that all are sent to side by side: see test_faults_servers.
BOUND = TIMEOUTS.silence + TIMEOUTS.bucket + TIMEOUTS.commit_silence + 20


@pytest.fixture(scope="module")
def relays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RestartableServers]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("UCX_TLS", "tcp,self")
        folder = tmp_path_factory.mktemp("relays")
        with shared_servers(folder, 3, "--bucket-timeout-seconds", "4") as relays:
            yield relays


@pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
async def test_a_chain_goes_around_a_relay_that_is_gone(
    relays: RestartableServers, blow: signal.Signals, place: int
) -> None:
    victim = relays.all[place]
    others = [server for server in relays.all if server is not victim]
    old, new, newer = (relays.next_version() for _ in range(3))
    steps = Steps()
    async with relays.fleet(steps) as fleet:
        trainer = publisher(fleet, "ucx", delta=False)
        await published(trainer, old)
        before = [Footprint.of(server.process.pid) for server in others]
        pid = victim.process.pid
        strike = Strike("transfer", steps, Victim.of(victim), lambda: os.kill(pid, blow))
        await costs_one_server(trainer, strike, victim, others, old=old, new=new, bound=BOUND)
        for server, footprint in zip(others, before, strict=True):
            await nothing_is_left(server, footprint)
        if blow == signal.SIGKILL:
            relays.restart(victim)
        else:
            os.kill(pid, signal.SIGCONT)
        await published(trainer, newer)

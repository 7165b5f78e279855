"""Machines whose cable is pulled, or takes bytes at a trickle: network namespaces, no RST."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from rollwire_client import ServerInfo
from support.calls import connected, until
from support.crossing import crossing
from support.fleets import TIMEOUTS, Servers, policy, published, publisher
from support.footprint import Footprint, nothing_is_left
from support.namespaces import Network, network, servers_on, unavailable
from support.one_death import costs_one_server, takes_the_next, trainer_after
from support.phases import PHASES, Strike, Victim
from support.publishing import status
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := unavailable()), reason=why)]

# As for a server that is frozen; the group may wait for one that is gone as long as it forms.
BOUND = TIMEOUTS.silence + TIMEOUTS.join + TIMEOUTS.commit_silence + 60
SECONDS = 60  # for TCP and gRPC to find out that a cable is back


@pytest.fixture(scope="module")
def lan() -> Iterator[Network]:
    with network(3) as lan:
        yield lan


@pytest.fixture(scope="module")
def far(lan: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("network")
    with servers_on(lan.machines, folder, "--bucket-timeout-seconds", "4") as far:
        yield far


async def all_answer(fleet: Fleet) -> None:
    async def so() -> bool:
        return all(isinstance(info, ServerInfo) for info in (await fleet.info()).values())

    await until(so, SECONDS)


@pytest.mark.parametrize("phase", PHASES)
async def test_a_pulled_cable_costs_one_server(lan: Network, far: Servers, phase: str) -> None:
    first, victim, last = far.all
    cable = lan.machines[1]
    old, new, newer = (far.next_version() for _ in range(3))
    steps = Steps()
    async with far.fleet(steps) as fleet:
        trainer = await trainer_after(fleet, phase, old, host=lan.address, delta=False)
        before = [Footprint.of(server.process.pid) for server in far.all]
        strike = Strike(phase, steps, Victim.of(victim), cable.pull)
        try:
            await costs_one_server(
                trainer, strike, victim, (first, last), old=old, new=new, bound=BOUND
            )
        finally:
            cable.plug()
        await all_answer(fleet)
        async with connected(victim.address) as api:
            told = await status(api, verify=True)
        assert told.intact
        assert told.weights.version in (old, new)
        await takes_the_next(trainer, victim, newer)
        for server, footprint in zip(far.all, before, strict=True):
            await nothing_is_left(server, footprint)


async def test_a_slow_reader_is_cut_out(lan: Network, far: Servers) -> None:
    first, victim, last = far.all
    old, new, newer = (far.next_version() for _ in range(3))
    async with far.fleet() as fleet:
        trainer = publisher(fleet, host=lan.address, delta=False)
        await published(trainer, old)
        before = [Footprint.of(server.process.pid) for server in far.all]
        tensors = await policy(trainer, new)
        async with crossing(first.address, last.address) as sequences:
            lan.machines[1].trickle(10_000)  # a bucket takes longer than may be waited for
            try:
                began = time.monotonic()
                report = await (await trainer.publish(new, tensors)).committed
                # It may have been the victim of another once, so it gets two groups.
                assert time.monotonic() - began < 2 * (TIMEOUTS.bucket + TIMEOUTS.join) + 60
            finally:
                lan.machines[1].flow()
            assert [s.address for s in report.failed] == [victim.address]
            for sequence in sequences:
                await sequence.reaches(new)
                assert sequence.versions == [old, new]
        await all_answer(fleet)
        await published(trainer, newer)
        for server, footprint in zip(far.all, before, strict=True):
            await nothing_is_left(server, footprint)

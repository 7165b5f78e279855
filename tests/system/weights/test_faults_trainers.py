"""A trainer dies or freezes in a phase of its publish: it costs the fleet nothing."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import pytest
from support.calls import connected
from support.crossing import assert_equal_under, crossing
from support.fleets import TIMEOUTS, published, publisher
from support.footprint import Footprint, nothing_is_left
from support.phases import PHASES, Victim, publishes
from support.publishing import no_update, status
from support.trainers import Order, trainer

if TYPE_CHECKING:
    from rollwire.v1 import weights_pb2
    from support.crossing import Crossing
    from support.fleets import Servers

LEASE = 2.0
# Nothing is waited for: the new trainer's publish goes as if the old one had never been.
BOUND = 60


def order(three: Servers, version: int, phase: str, base: int | None = None) -> Order:
    return Order(
        addresses=three.addresses,
        version=version,
        base=base,
        phase=phase,
        first=Victim.of(three.all[0]),
        backend="gloo",
        timeouts=dataclasses.replace(TIMEOUTS, stage_lease=LEASE, join=3, call=2),
    )


async def told(three: Servers) -> list[weights_pb2.GetWeightStatusResponse]:
    answers = []
    for server in three.all:
        async with connected(server.address) as api:
            answers.append(await status(api, verify=True))
    return answers


async def each_serves_the_old_or_the_new(
    three: Servers, sequences: list[Crossing], phase: str, old: int, lost: int
) -> None:
    """Whole, and goes on sampling; only what was told to commit has the new one."""
    for sequence in sequences:
        await sequence.goes_on()
    answers = await told(three)
    assert all(answer.intact for answer in answers)
    versions = [answer.weights.version for answer in answers]
    assert versions[0] == old
    assert set(versions[1:]) <= ({old, lost} if phase == "commit" else {old})
    assert (lost in versions) == (phase == "commit")


async def the_next_trainer_is_followed(
    sequences: list[Crossing], old: int, lost: int, new: int, digest: int
) -> None:
    for sequence in sequences:
        await sequence.reaches(new)
        assert [v for v in sequence.versions if v != lost] == [old, new]
        assert sequence.digests[new] == {digest}
    assert len(set().union(*(s.digests.get(lost, set()) for s in sequences))) <= 1
    assert_equal_under(old, sequences)


@pytest.mark.parametrize(("phase", "delta"), publishes(fast="transfer", fast_delta="staged"))
async def test_a_killed_trainer_is_succeeded_at_once(
    three: Servers, phase: str, *, delta: bool
) -> None:
    old, lost, new = (three.next_version() for _ in range(3))
    async with three.fleet() as fleet:
        await published(publisher(fleet), old)
        footprints = [Footprint.of(server.process.pid) for server in three.all]
        async with crossing(*three.addresses) as sequences:
            with trainer(order(three, lost, phase, old if delta else None)) as dying:
                await dying.stands()
                dying.kill()
            await each_serves_the_old_or_the_new(three, sequences, phase, old, lost)
            began = time.monotonic()
            report = await published(publisher(fleet), new)
            assert time.monotonic() - began < BOUND
            await the_next_trainer_is_followed(sequences, old, lost, new, report.digest)
        for server, footprint in zip(three.all, footprints, strict=True):
            await nothing_is_left(server, footprint)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
async def test_a_frozen_trainer_is_forgotten_and_changes_nothing_when_it_wakes(
    three: Servers, phase: str
) -> None:
    old, lost, new = (three.next_version() for _ in range(3))
    async with three.fleet() as fleet:
        await published(publisher(fleet), old)
        footprints = [Footprint.of(server.process.pid) for server in three.all]
        async with crossing(*three.addresses) as sequences:
            with trainer(order(three, lost, phase)) as zombie:
                await zombie.stands()
                zombie.freeze()
                await each_serves_the_old_or_the_new(three, sequences, phase, old, lost)
                for server in three.all:
                    async with connected(server.address) as api:
                        await no_update(api, LEASE + BOUND)
                report = await published(publisher(fleet), new)
                await the_next_trainer_is_followed(sequences, old, lost, new, report.digest)
                before = await told(three)
                zombie.thaw()
                outcome = await zombie.outcome()
            assert outcome.next_error == "STALE_PUBLISHER", outcome
            # A commit whose answer it slept through is not its to know any more.
            had_it = [any(tag.version == lost for tag in answer.history) for answer in before]
            for server, had in zip(three.all, had_it, strict=True):
                assert had or server.address not in outcome.committed
            assert bool(outcome.committed) == (phase == "commit"), outcome
            after = await told(three)
            assert [a.weights for a in after] == [b.weights for b in before]
            assert all(answer.intact for answer in after)
            for sequence in sequences:
                await sequence.goes_on()
                assert sequence.versions[-1] == new
        for server, footprint in zip(three.all, footprints, strict=True):
            await nothing_is_left(server, footprint)

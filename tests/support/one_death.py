"""One death costs one server: a publish during which something happens to one of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollwire_client import ServerUnreachableError

from support.crossing import assert_equal_under, crossing
from support.fleets import policy, published, publisher
from support.phases import FORMING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client import Fleet, Publisher, PublishReport

    from support.phases import Strike
    from support.servers import ServerProcess


async def trainer_after(fleet: Fleet, phase: str, old: int, **options: object) -> Publisher:
    """A publisher of the fleet, which has published ``old``.

    Its next publish has the phase: where that is one of forming a group, none is kept.
    """
    trainer = publisher(fleet, **options)  # type: ignore[arg-type]
    await published(trainer, old)
    if phase in FORMING:
        await fleet._pool.groups.close()
    return trainer


async def costs_one_server(
    trainer: Publisher,
    strike: Strike,
    victim: ServerProcess,
    others: Sequence[ServerProcess],
    *,
    old: int,
    new: int,
    bound: float,
) -> None:
    """Publishes ``new`` over ``old`` while it strikes: the others commit within ``bound`` seconds,
    and a sequence on each of them goes on from one version to the other.
    """
    async with crossing(*(server.address for server in others)) as sequences:
        began = time.monotonic()
        source = strike.source(await policy(trainer, new))
        report = await (await trainer.publish(new, source)).committed
        assert time.monotonic() - began < bound
        assert strike.done
        _only_the_victim_failed(report, victim)
        for sequence in sequences:
            await sequence.reaches(new)
            assert sequence.versions == [old, new]
            assert sequence.digests[new] == {report.digest}
    assert_equal_under(old, sequences)


async def takes_the_next(trainer: Publisher, server: ServerProcess, version: int) -> None:
    """A publish that all commit; a server samples under it."""
    report = await published(trainer, version)
    async with crossing(server.address) as (sequence,):
        await sequence.reaches(version)
        assert sequence.versions == [version]
        assert sequence.digests[version] == {report.digest}


def _only_the_victim_failed(report: PublishReport, victim: ServerProcess) -> None:
    (failed,) = report.failed
    assert failed.address == victim.address
    assert isinstance(failed.error, ServerUnreachableError)
    assert victim.address in str(failed.error)
    served = [server.weights for server in report.servers if server.weights is not None]
    assert len(served) == len(report.servers) - 1
    assert {(tag.version, tag.digest) for tag in served} == {(report.version, report.digest)}

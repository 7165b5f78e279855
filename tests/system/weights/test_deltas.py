"""Publishes that send what has changed: real servers end up with the trainer's bits."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import rollwire_transport as transport
import torch
from rollwire_client import CommittedUpdate, ServerInfo
from support.calls import connected
from support.fleets import TIMEOUTS, policy, published, publisher
from support.footprint import Footprint
from support.phases import Strike, Victim
from support.publishing import status
from support.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_client import Publisher, PublishReport
    from support.fleets import RestartableServers, Servers
    from support.servers import ServerProcess
    from torch import Tensor

PUBLISHES = 30


async def digest(trainer: Publisher, tensors: Mapping[str, Tensor]) -> int:
    """As servers would compute it of the whole policy."""
    specs = [spec for spec in await trainer.schema() if spec.alias_of is None]
    return transport.sum_digests(transport.tensor_digests(specs, tensors).values())


async def serve(servers: Sequence[ServerProcess], version: int | None, digest: int) -> None:
    """They hold these bits in memory, and say so."""
    for server in servers:
        async with connected(server.address) as api:
            told = await status(api, verify=True)
        assert told.intact
        assert (told.weights.version if told.weights.HasField("version") else None) == version
        assert told.weights.digest == digest


def encodings(report: PublishReport) -> list[str]:
    assert report.failed == ()
    return [server.encoding for server in report.servers]


async def test_what_has_changed_makes_the_trainer_s_bits(three: Servers) -> None:
    first, second, third, rolled_back = (three.next_version() for _ in range(4))
    async with three.fleet() as fleet:
        trainer = publisher(fleet)
        whole = await published(trainer, first)
        for version in (second, third):
            report = await published(trainer, version)
            assert encodings(report) == ["delta"] * 3
            assert 0.01 < report.changed_share < 0.1
            assert report.bytes < whole.bytes / 5
            for info in (await fleet.info()).values():
                assert isinstance(info, ServerInfo)
                sent = CommittedUpdate("delta", report.bytes, report.changed_share)
                assert info.last_update == sent
            await serve(three.all, version, await digest(trainer, await policy(trainer, version)))

        tensors = await policy(trainer, second)
        report = await trainer.publish_and_wait(second, tensors, allow_version_rollback=True)
        assert encodings(report) == ["delta"] * 3
        await serve(three.all, second, await digest(trainer, tensors))

        tensors = await policy(trainer, rolled_back)
        part = dict(list(tensors.items())[::2])
        report = await trainer.publish_and_wait(
            rolled_back, part, partial=True, allow_version_rollback=True
        )
        assert encodings(report) == ["delta"] * 3
        mixed = {**await policy(trainer, second), **part}
        await serve(three.all, rolled_back, await digest(trainer, mixed))

        report = await trainer.publish_and_wait(None, tensors.items)
        assert encodings(report) == ["delta"] * 3
        await serve(three.all, None, await digest(trainer, tensors))


async def test_one_that_was_restarted_gets_the_whole_policy_in_the_same_publish(
    three: RestartableServers,
) -> None:
    first, second, third = (three.next_version() for _ in range(3))
    async with three.fleet() as fleet:
        trainer = publisher(fleet)
        await published(trainer, first)
        three.all[1].kill()
        three.restart(three.all[1])
        report = await published(trainer, second)
        assert encodings(report) == ["delta", "full", "delta"]
        assert report.bytes < sum(server.received_bytes for server in report.servers)
        await serve(three.all, second, await digest(trainer, await policy(trainer, second)))
        assert encodings(await published(trainer, third)) == ["delta"] * 3


async def test_tensors_that_change_right_after_the_release_reach_no_server(three: Servers) -> None:
    versions = [three.next_version() for _ in range(3)]
    steps = Steps()
    async with three.fleet(steps) as fleet:
        trainer = publisher(fleet)
        for number, version in enumerate(versions):
            tensors = await policy(trainer, version)
            expected = await digest(trainer, tensors)
            changed = asyncio.Event()

            async def wait(*_: object, changed: asyncio.Event = changed) -> None:
                await changed.wait()

            steps.before = {"JoinTransport": wait, "CommitWeights": wait}
            handle = await trainer.publish(version, tensors)
            await handle.released
            for tensor in tensors.values():
                tensor.zero_()
            changed.set()
            report = await handle.committed
            assert encodings(report) == (["delta"] if number else ["full"]) * 3
            await serve(three.all, version, expected)


async def test_one_that_dies_between_the_transfers_of_a_publish_costs_only_itself(
    three: RestartableServers,
) -> None:
    """One server gets the whole policy after the two others, of which one dies, have the delta."""
    first, second, third = (three.next_version() for _ in range(3))
    steps = Steps()
    async with three.fleet(steps) as fleet:
        trainer = publisher(fleet)
        await published(trainer, first)
        three.all[0].kill()
        three.restart(three.all[0])
        victim = three.all[1]
        # The second group to be formed is that of the whole policy.
        strike = Strike("ready", steps, Victim.of(victim), victim.kill)
        report = await trainer.publish_and_wait(
            second, await policy(trainer, second), require="any"
        )
        assert strike.done
        assert [server.weights is not None for server in report.servers] == [True, False, True]
        alive = [three.all[0], three.all[2]]
        await serve(alive, second, await digest(trainer, await policy(trainer, second)))
        three.restart(victim)
        assert encodings(await published(trainer, third)) == ["delta", "full", "delta"]


@pytest.mark.slow
async def test_servers_with_a_delta_wait_for_one_that_takes_long_to_get_the_whole_policy(
    three: RestartableServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than their leases: the trainer is still there."""
    first, second = three.next_version(), three.next_version()
    send = transport.Sender.send

    def slowly(self: transport.Sender, *args: Any, progress: Any, **options: Any) -> None:
        def sent(nbytes: int) -> None:
            time.sleep(0.1)  # a slow link
            progress(nbytes)

        send(self, *args, progress=sent, **options)

    async with three.fleet() as fleet:
        trainer = publisher(fleet, timeouts=dataclasses.replace(TIMEOUTS, stage_lease=1))
        await published(trainer, first)
        three.all[0].kill()
        three.restart(three.all[0])
        monkeypatch.setattr(transport.Sender, "send", slowly)
        report = await published(trainer, second)
        assert encodings(report) == ["full", "delta", "delta"]
        assert report.seconds > 2


@pytest.mark.slow
async def test_a_trainer_s_memory_is_level(three: Servers) -> None:
    """Its copy is there once, and nothing of what was sent is kept."""

    def held() -> int:
        gc.collect()
        return sum(
            thing.untyped_storage().nbytes()
            for thing in gc.get_objects()
            if type(thing) is torch.Tensor and thing.layout is torch.strided
        )

    async with three.fleet() as fleet:
        trainer = publisher(fleet)
        for _ in range(3):
            await published(trainer, three.next_version())
        before, footprint = held(), Footprint.of(os.getpid())
        for _ in range(PUBLISHES):
            report = await published(trainer, three.next_version())
            assert encodings(report) == ["delta"] * 3
        assert held() <= before
        now = Footprint.of(os.getpid())
        assert now.threads <= footprint.threads + 4
        assert now.files <= footprint.files + 4

"""Deltas: which servers get what changed and which get the whole policy, and out of what."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import weakref
from typing import TYPE_CHECKING

import grpc
import pytest
import rollwire_transport as transport
import torch
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import BUCKET_BYTES, PublishableServer, policy
from rollwire_client import (
    DigestMismatchError,
    Publisher,
    PublishFailedError,
    SchemaMismatchError,
    SourceError,
    TensorsChangedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client import PublishReport
    from torch import Tensor

    Tensors = dict[str, Tensor]


def learned(seed: int = 0) -> Tensors:
    """A policy in which little has changed since that of seed 0."""
    tensors = policy()
    tensors["layer.weight"][seed % 8, 3] += seed
    return tensors


def has(server: PublishableServer, tensors: Tensors) -> bool:
    return all(torch.equal(server.committed[name], tensors[name]) for name in server.committed)


async def steps(publisher: Publisher, *versions: int) -> PublishReport:
    for version in versions:
        report = await publisher.publish_and_wait(version, learned(version))
    return report


async def test_servers_that_hold_the_last_policy_get_what_has_changed() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        first = await steps(publisher, 1)
        assert (first.encodings, first.changed_share) == (("full",), None)
        report = await steps(publisher, 2)
        assert report.encodings == ("delta",)
        assert 0 < report.changed_share < 0.05
        assert 0 < report.find_seconds < report.seconds
        assert report.bytes < first.bytes
        assert [told.received_bytes for told in report.servers] == [report.bytes] * 2
        assert all(has(server, learned(2)) for server in servers)
        assert report.digest == servers[0].weights.digest
        assert [server.encodings for server in servers] == [["full", "delta"]] * 2
        assert [(server.resumed, len(server.joins)) for server in servers] == [(1, 1)] * 2


async def test_a_server_that_takes_no_deltas_costs_no_refused_call() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        servers[0].accepts_deltas = False
        await asyncio.gather(*(s.probe() for s in publisher._pool.servers))
        for version in (1, 2):
            report = await steps(publisher, version)
            assert report.failed == ()
        assert report.encodings == ("delta", "full")
        assert [told.encoding for told in report.servers] == ["full", "delta"]
        assert report.bytes == sum(told.received_bytes for told in report.servers)
        assert [server.announced for server in servers] == [2, 2]
        assert all(has(server, learned(2)) for server in servers)
        # The group of those that take deltas is the one that is kept.
        await steps(publisher, 3)
        assert [(server.resumed, len(server.joins)) for server in servers] == [(0, 3), (1, 2)]


async def test_where_no_server_takes_deltas_nothing_is_copied() -> None:
    async with publishing(1) as (_, fleet, _):
        publisher = Publisher(fleet, term=8, delta=True)
        tensors = policy()
        handle = await publisher.publish(1, tensors)
        tensors["layer.bias"].zero_()
        with pytest.raises(TensorsChangedError):
            await handle.committed


@pytest.mark.parametrize("reason", ["BASE_MISMATCH", "UNSUPPORTED_ENCODING", "STAGING_FAILED"])
async def test_one_that_refuses_a_delta_gets_the_whole_policy_at_once(reason: str) -> None:
    async with publishing(3, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        match reason:
            case "BASE_MISMATCH":
                servers[0].digests = {}
            case "UNSUPPORTED_ENCODING":
                servers[0].accepts_deltas = False
            case "STAGING_FAILED":
                servers[0].no_room_for_deltas = True
        report = await steps(publisher, 2)
        assert report.failed == ()
        assert [told.encoding for told in report.servers] == ["full", "delta", "delta"]
        assert [server.announced for server in servers] == [3, 2, 2]
        assert all(has(server, learned(2)) for server in servers)
        assert (await steps(publisher, 3)).failed == ()


async def test_where_all_refuse_the_delta_all_get_the_whole_policy() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        for server in servers:
            server.digests = {}
        report = await steps(publisher, 2)
        assert (report.failed, report.encodings) == ((), ("full",))
        assert report.bytes == report.servers[0].received_bytes
        assert (await steps(publisher, 3)).encodings == ("delta",)


async def test_one_that_holds_other_bits_than_it_says_gets_the_whole_policy() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        servers[1].breaks_deltas = True
        report = await steps(publisher, 2)
        assert report.failed == ()
        assert [told.encoding for told in report.servers] == ["delta", "full"]
        assert all(has(server, learned(2)) for server in servers)
        assert servers[1].discards == [report.update_id]


@pytest.mark.parametrize("others", [0, 1])
async def test_one_that_cannot_read_a_delta_gets_the_whole_policy(others: int) -> None:
    """For lack of memory, or as it does not take it for a delta of its layout."""
    for code, reason in (
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "STAGING_FAILED"),
        (grpc.StatusCode.INVALID_ARGUMENT, "MANIFEST_MISMATCH"),
    ):
        async with publishing(1 + others, accept_deltas=True) as (servers, _, publisher):
            await steps(publisher, 1)
            servers[0].cannot_read_deltas = (code, reason)
            report = await steps(publisher, 2)
            assert report.failed == ()
            assert [told.encoding for told in report.servers] == ["full", *["delta"] * others]
            assert all(has(server, learned(2)) for server in servers)
            servers[0].cannot_read_deltas = None
            assert (await steps(publisher, 3)).encodings == ("delta",)


async def test_one_that_missed_a_publish_gets_the_whole_policy_in_the_next() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        servers[0].refuse_update = ("ENGINE_FAILED", {})
        await publisher.publish_and_wait(2, learned(2), require="any")
        servers[0].refuse_update = None
        report = await steps(publisher, 3)
        assert report.failed == ()
        assert [told.encoding for told in report.servers] == ["full", "delta"]
        assert [server.announced for server in servers] == [3, 3]
        assert all(has(server, learned(3)) for server in servers)


@pytest.mark.parametrize("fault", ["fails", "is cancelled", "raises", "changes"])
async def test_after_a_publish_that_came_to_nothing_all_get_the_whole_policy(fault: str) -> None:
    def raising() -> Iterator[tuple[str, Tensor]]:
        yield from list(policy(5).items())[:2]
        raise ValueError("as scripted")

    def changing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in list(policy(5).items())[:3]:
            yield name, tensor
            tensor.zero_()

    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        if fault == "fails":
            for server in servers:
                server.refuse_commit = True
            with pytest.raises(PublishFailedError):
                await publish(publisher, 2, seed=5)
        elif fault == "is cancelled":
            for server in servers:
                server.hangs_in = "UpdateWeights"
            task = asyncio.create_task(publish(publisher, 2, seed=5))
            await until(lambda: all(server.announced == 2 for server in servers))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            source = raising if fault == "raises" else changing
            with pytest.raises((SourceError, TensorsChangedError)):
                await publisher.publish_and_wait(2, source)
        for server in servers:
            server.refuse_commit, server.hangs_in = False, ""
        report = await steps(publisher, 3)
        assert (report.failed, report.encodings) == ((), ("full",))
        assert all(has(server, learned(3)) for server in servers)
        assert (await steps(publisher, 4)).encodings == ("delta",)


async def test_a_lost_commit_answer_leaves_the_base_where_it_is() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        servers[0].lose_commit_answers = 1
        await steps(publisher, 2)
        report = await steps(publisher, 3)
        assert report.encodings == ("delta",)
        assert has(servers[0], learned(3))


async def test_another_publisher_begins_with_the_whole_policy() -> None:
    async with publishing(1, accept_deltas=True) as (servers, fleet, first):
        await steps(first, 1, 2)
        second = Publisher(fleet, term=8, bucket_bytes=BUCKET_BYTES, timeouts=TIMEOUTS, delta=True)
        assert (await steps(second, 3)).encodings == ("full",)
        assert (await steps(second, 4)).encodings == ("delta",)
        third = Publisher(fleet, term=9, bucket_bytes=BUCKET_BYTES, timeouts=TIMEOUTS, delta=True)
        await publish(third, 5, seed=5)
        second.term = 10  # whose copy is not what is served
        announced = servers[0].announced
        assert (await steps(second, 6)).encodings == ("full",)
        assert servers[0].announced == announced + 1
        assert has(servers[0], learned(6))


async def test_a_rollback_is_a_delta_too() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1, 2)
        report = await publisher.publish_and_wait(1, learned(1), allow_version_rollback=True)
        assert (report.failed, report.encodings) == ((), ("delta",))
        assert all(has(server, learned(1)) for server in servers)


async def test_a_policy_without_a_version_is_a_base_too() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        for seed in (1, 2):
            report = await publisher.publish_and_wait(None, learned(seed))
        assert report.encodings == ("delta",)
        assert has(servers[0], learned(2))


async def test_the_same_policy_again_sends_next_to_nothing() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        await publish(publisher, 1)
        report = await publish(publisher, 2)
        assert (report.encodings, report.changed_share) == (("delta",), 0.0)
        assert holds(servers[0])


@pytest.mark.parametrize("callable_", [False, True])
async def test_some_tensors_may_be_sent_as_what_has_changed_in_them(*, callable_: bool) -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        part = {"layer.weight": learned(2)["layer.weight"]}
        report = await publisher.publish_and_wait(
            2, part.items if callable_ else part, partial=True
        )
        assert report.encodings == ("delta",)
        assert all(has(server, learned(2)) for server in servers)
        whole = await steps(publisher, 3)
        assert whole.encodings == ("delta",)
        assert whole.failed == ()
        assert all(has(server, learned(3)) for server in servers)


async def test_all_servers_get_the_whole_policy_every_so_many_publishes() -> None:
    async with publishing(1, accept_deltas=True, full_every=3) as (servers, _, publisher):
        await steps(publisher, *range(1, 8))
        assert servers[0].encodings == ["full", "delta", "delta", "full", "delta", "delta", "full"]


async def test_a_policy_that_has_changed_all_over_is_sent_whole() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        await publish(publisher, 1)
        report = await publish(publisher, 2, seed=2)
        assert (report.encodings, report.changed_share) == (("full",), 1.0)
        assert holds(servers[0], 2)


# What is sent is the copy.


async def test_tensors_may_change_as_soon_as_they_are_copied() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        for version in (1, 2):
            tensors = learned(version)
            for server in servers:
                server.hangs_in = "JoinTransport"
            handle = await publisher.publish(version, tensors)
            await asyncio.wait_for(handle.released, 5)
            learner = torch.optim.SGD([torch.nn.Parameter(t) for t in tensors.values()], lr=1.0)
            for parameter in learner.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            learner.step()
            for tensor in tensors.values():
                tensor.zero_()
            for server in servers:
                server.hangs_in = ""
            report = await handle.committed
            assert report.failed == ()
            assert all(has(server, learned(version)) for server in servers)


async def test_a_change_while_they_are_copied_ends_the_publish() -> None:
    tensors = policy()

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            yield name, tensor
            if name == "layer.weight":
                tensors["embed.weight"].zero_()

    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        with pytest.raises(TensorsChangedError, match=r"embed\.weight"):
            await publisher.publish(1, source)
        assert servers[0].announced == 0


async def test_a_source_is_read_once_however_many_groups_it_takes() -> None:
    calls = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal calls
        calls += 1
        yield from learned(calls).items()

    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        for version, bucket in ((1, 4), (2, 0)):
            servers[1].stop_receiving_at = bucket
            report = await publisher.publish_and_wait(version, source)
            assert report.failed == ()
            assert calls == version
            assert all(has(server, learned(version)) for server in servers)
        assert report.encodings == ("delta",)
        assert len(servers[1].joins) == 3


async def test_a_source_that_does_not_fit_is_refused_before_anything_is_announced() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match=r"ended without embed\.weight"):
            await publisher.publish(1, lambda: iter([("layer.bias", policy()["layer.bias"])]))
        assert servers[0].announced == 0
        assert (await steps(publisher, 1)).failed == ()


async def test_a_server_that_dies_in_the_delta_is_cut_out() -> None:
    async with publishing(3, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        servers[0].die_at = 0
        report = await publisher.publish_and_wait(2, learned(2), require="any")
        assert [told.weights is not None for told in report.servers] == [False, True, True]
        assert report.encodings == ("delta",)
        assert all(has(server, learned(2)) for server in servers[1:])


async def test_one_that_is_behind_is_caught_up_out_of_the_copy() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        servers[0].refuse_update = ("STAGING_FAILED", {})
        await publisher.publish_and_wait(2, learned(2), require="any")
        servers[0].refuse_commit, servers[0].refuse_update = True, None
        with pytest.raises(PublishFailedError):
            await publisher.catch_up(learned(2))
        servers[0].refuse_commit = False
        report = await publisher.catch_up(learned(2))
        assert [told.encoding for told in report.servers] == ["full"]
        assert has(servers[0], learned(2))
        assert (await steps(publisher, 3)).encodings == ("delta",)


async def test_tensors_of_another_version_catch_nobody_up() -> None:
    async with publishing(2, accept_deltas=True) as (servers, _, publisher):
        servers[0].refuse_update = ("STAGING_FAILED", {})
        await publisher.publish_and_wait(1, learned(1), require="any")
        servers[0].refuse_update = None
        with pytest.raises(DigestMismatchError, match="are not those of version 1"):
            await publisher.catch_up(learned(2))
        assert servers[0].commits == []
        assert (await publisher.catch_up(learned(1))).failed == ()
        report = await steps(publisher, 2)
        assert report.failed == ()
        assert all(has(server, learned(2)) for server in servers)


async def test_masters_are_compared_in_the_dtypes_of_the_servers() -> None:
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        for version in (1, 2):
            masters = {n: t.double() for n, t in learned(version).items()}
            masters["layer.bias"] += 1e-12 * version  # no change in bfloat16
            report = await publisher.publish_and_wait(version, masters)
            assert {str(cast) for cast in report.casts} == {
                "2 tensors cast from float64 to float32",
                "1 tensor cast from float64 to bfloat16",
            }
        assert report.encodings == ("delta",)
        assert has(servers[0], learned(2))


async def test_a_publish_keeps_the_copy_and_no_tensor_of_the_trainer() -> None:
    async with publishing(1, accept_deltas=True) as (_, _, publisher):
        tensors = policy()
        tensor = weakref.ref(tensors["layer.weight"])
        handle = await publisher.publish(1, tensors)
        del tensors
        await handle.committed
        await until(lambda: gc.collect() >= 0 and tensor() is None)


# Where there is no room for a copy.


@pytest.mark.parametrize("error", [None, RuntimeError, MemoryError])
async def test_without_room_for_a_copy_everything_is_sent_whole(
    error: type[Exception] | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Little is free, or torch or numpy find that too late."""

    def no_room(*_: object) -> None:
        assert error is not None
        raise error("not enough memory: as scripted")

    if error is None:
        monkeypatch.setattr(transport, "free_memory", lambda _: 100)
    else:
        monkeypatch.setattr(transport.PublishedCopy, "_allocate", no_room)
    async with publishing(1, accept_deltas=True) as (servers, _, publisher):
        for version in (1, 2):
            report = await steps(publisher, version)
            assert (report.encodings, report.changed_share) == (("full",), None)
            assert has(servers[0], learned(version))
    assert caplog.text.count("every update is sent whole from now on") == 1


async def test_what_a_source_gives_that_hung_reaches_no_later_policy() -> None:
    """Its thread stays behind, and may go on later."""
    goes_on = threading.Event()

    def source() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in policy(5).items():
            if name == "layer.weight":
                goes_on.wait()
            yield name, tensor

    hasty = dataclasses.replace(TIMEOUTS, source=0.5)
    async with publishing(1, hasty, accept_deltas=True) as (servers, _, publisher):
        await steps(publisher, 1)
        with pytest.raises(SourceError, match=r"did not provide layer\.weight within 0\.5 s"):
            await publisher.publish(2, source)
        assert (await steps(publisher, 3)).encodings == ("full",)
        goes_on.set()
        assert (await steps(publisher, 4)).encodings == ("delta",)
        assert has(servers[0], learned(4))

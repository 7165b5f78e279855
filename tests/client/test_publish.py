"""Publishing to scripted servers, over the real transport."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pytest
import torch
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import BUCKET_BYTES, SCHEMA, PublishableServer, policy
from rollwire.v1 import common_pb2
from rollwire_client import (
    ClosedError,
    Fleet,
    KvPolicy,
    Publisher,
    PublishFailedError,
    PublishHandle,
    PublishIncompleteError,
    PublishInProgressError,
    SchemaMismatchError,
    StalePublisherError,
)
from rollwire_client._fleet.transport_group import TransportGroup
from rollwire_client._publishing.publish import Publish

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_transport import Link


async def test_every_server_commits_what_was_published() -> None:
    async with publishing(3) as (servers, fleet, publisher):
        handle = await publisher.publish(5, policy())
        await handle.released
        report = await handle.committed
        assert handle.sent_bytes == handle.total_bytes > 0
    assert report.version == 5
    assert [s.address for s in report.servers] == [s.address for s in servers]
    for server, told in zip(servers, report.servers, strict=True):
        assert holds(server)
        assert server.kv_retention == (common_pb2.KV_POLICY_KEEP, None)
        assert told.error is None
        assert (told.weights.version, told.weights.revision) == (5, 1)
        assert told.weights.digest == report.digest
        assert told.received_bytes == report.bytes == handle.total_bytes
        assert (told.paused_seconds, told.held_sequences) == (0.002, 3)
        assert server.discards == []
    assert report.failed == ()
    assert all(member.problem is None for member in fleet._pool.servers)


@pytest.mark.parametrize(
    ("publishers", "publishs", "sent"),
    [
        ({"max_kv_lag": 4}, {}, (common_pb2.KV_POLICY_KEEP, 4)),
        ({"max_kv_lag": 0}, {}, (common_pb2.KV_POLICY_RECOMPUTE, None)),
        ({"kv_policy": KvPolicy.RECOMPUTE}, {}, (common_pb2.KV_POLICY_RECOMPUTE, None)),
        ({"kv_policy": KvPolicy.RECOMPUTE}, {"max_kv_lag": 1}, (common_pb2.KV_POLICY_KEEP, 1)),
        ({"max_kv_lag": 4}, {"kv_policy": KvPolicy.KEEP}, (common_pb2.KV_POLICY_KEEP, None)),
        (
            {"max_kv_lag": 4},
            {"kv_policy": KvPolicy.RECOMPUTE},
            (common_pb2.KV_POLICY_RECOMPUTE, None),
        ),
    ],
)
async def test_what_a_publish_says_of_keys_and_values_replaces_what_its_publisher_says(
    publishers: dict[str, Any], publishs: dict[str, Any], sent: tuple[int, int | None]
) -> None:
    async with publishing(1) as (servers, fleet, _):
        publisher = Publisher(fleet, timeouts=TIMEOUTS, **publishers)
        await publisher.publish_and_wait(1, policy(), **publishs)
    assert servers[0].kv_retention == sent


async def test_only_servers_that_did_not_commit_are_asked_what_they_serve() -> None:
    async with publishing(3, probe_interval=600) as (servers, _, publisher):
        await until(lambda: all(server.asked >= 2 for server in servers))  # as the fleet opened
        await asyncio.sleep(0.2)
        before = [server.asked for server in servers]
        servers[0].refuse_commit = True
        report = await publish(publisher)
        assert [server.weights is None for server in report.servers] == [True, False, False]
        await until(lambda: servers[0].asked > before[0])
        assert [server.asked for server in servers[1:]] == before[1:]


async def test_a_publish_follows_another() -> None:
    async with publishing(2) as (servers, _, publisher):
        for version in (1, 2, None):
            report = await publish(publisher, version, seed=version or 9)
            assert {s.weights.version for s in report.servers} == {version}
            assert all(holds(server, version or 9) for server in servers)
        assert [server.weights.revision for server in servers] == [3, 3]


async def test_the_publishers_of_a_fleet_use_one_group() -> None:
    async with publishing(2) as (servers, fleet, first):
        await publish(first)
        second = Publisher(fleet, term=8, bucket_bytes=BUCKET_BYTES, timeouts=TIMEOUTS)
        await publish(second, 2)
        await publish(second, 3)
        assert [(server.resumed, len(server.joins)) for server in servers] == [(2, 1), (2, 1)]


async def test_a_fleet_closes_a_group_that_it_has_kept_just_before() -> None:
    closed = threading.Event()

    class Kept:
        def close(self) -> None:
            closed.set()

    async with publishing(1) as (_, fleet, _):
        groups = fleet._pool.groups
        groups.keep(TransportGroup("epoch", "gloo", None, cast("Link", Kept()), ()))
    assert closed.is_set()
    assert groups.group is None


async def test_a_publish_that_has_ended_keeps_no_tensor() -> None:
    async with publishing(1) as (_, _, publisher):
        tensors = policy()
        tensor = weakref.ref(tensors["layer.weight"])
        handle = await publisher.publish(1, tensors)
        del tensors
        await handle.committed
        await until(lambda: gc.collect() >= 0 and tensor() is None)
        assert handle.done
        assert not any(type(thing) is Publish for thing in gc.get_objects())


async def test_a_callable_gives_tensors_one_by_one() -> None:
    alive = 0

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive
        for name, tensor in policy(3).items():
            if name != "head.weight":
                alive += 1
                yield name, tensor

    async with publishing(1) as (servers, _, publisher):
        assert await publisher.schema() == SCHEMA
        await publish(publisher)
        await (await publisher.publish(2, source)).committed
        assert holds(servers[0], 3)
        assert servers[0].resumed == 1  # both lie on the CPU
    assert alive == 3


async def test_a_callable_that_gives_something_else_ends_the_publish() -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer.weight", policy()["layer.weight"]

    async with publishing(2) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        with pytest.raises(SchemaMismatchError, match=r"embed\.weight"):
            await handle.released
        with pytest.raises(SchemaMismatchError, match=r"ended without embed\.weight and 1 more"):
            await handle.committed
        assert [server.commits for server in servers] == [[], []]
        await until(lambda: all(handle.update_id in s.discards for s in servers))
        await publish(publisher)  # the next one is not hindered


async def test_what_is_no_mapping_is_refused_before_anything_is_sent() -> None:
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match="a list is neither a mapping"):
            await publisher.publish(1, list(policy().items()))
        assert servers[0].update is None
        await publish(publisher)


@pytest.mark.parametrize("version", [1e3, "9", 1 << 63])
async def test_a_version_that_is_no_step_is_refused_by_its_name(version: object) -> None:
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises((TypeError, ValueError), match="not a version: an integer from 0"):
            await publisher.publish(version, policy())
        assert servers[0].update is None
        report = await (await publisher.publish(np.int64(7), policy())).committed
        assert report.version == 7
        assert type(report.version) is int


async def test_what_was_prepared_is_not_asked_for_again() -> None:
    async with publishing(1) as (servers, _, publisher):
        await publisher.prepare()
        asked = servers[0].schema_calls
        await publish(publisher)
        assert servers[0].schema_calls == asked == 1


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"layer.bias": torch.zeros(8, dtype=torch.int64)},
            "layer.bias is int64, the servers want bfloat16: .* only floating point is cast",
        ),
        (
            {"layer.bias": torch.zeros(8, dtype=torch.bool)},
            "layer.bias is bool, the servers want bfloat16: cast before publishing",
        ),
        (
            {"layer.bias": torch.zeros(8).to(torch.float8_e4m3fn)},
            "layer.bias is float8_e4m3fn, the servers want bfloat16: dequantize before publishing",
        ),
        (
            {"layer.weight": torch.zeros(24, 8)},
            r"layer.weight has shape \[24, 8\], the servers want \[8, 8\]: split",
        ),
        (
            {"layer.weight": None, "policy.layer.weight": torch.zeros(8, 8)},
            "policy.layer.weight is unknown to the servers: remove `policy.` from the name",
        ),
        (
            {"module.layer.weight": torch.zeros(8, 8)},
            "layer.weight and module.layer.weight are both layer.weight on the servers: leave one",
        ),
        ({"layer.weight": None}, "layer.weight is missing"),
        ({"head.weight": torch.zeros(8, 8)}, r"head.weight has shape \[8, 8\], the servers want"),
        ({"layer.weight": np.zeros((8, 8))}, "layer.weight: a ndarray is not a torch tensor"),
        ({"layer.bias": torch.zeros(8).to_sparse()}, "layer.bias: a torch.sparse_coo tensor"),
    ],
)
async def test_tensors_that_do_not_fit_are_named_before_anything_is_sent(
    change: dict[str, torch.Tensor | None], told: str
) -> None:
    tensors = {k: v for k, v in {**policy(), **change}.items() if v is not None}
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match=told):
            await publisher.publish(1, tensors)
        assert servers[0].update is None
        await publish(publisher)


async def test_a_tied_tensor_may_come_under_either_name() -> None:
    tensors = policy()
    del tensors["embed.weight"]
    async with publishing(1) as (servers, _, publisher):
        await (await publisher.publish(1, tensors)).committed
        assert holds(servers[0])


async def test_a_partial_update_sends_what_is_named() -> None:
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, {"layer.bias": policy()["layer.bias"]}, partial=True)
        await handle.committed
        assert servers[0].committed.keys() == {"layer.bias"}


async def test_one_publish_at_a_time() -> None:
    async with publishing(1) as (_, _, publisher):
        first = await publisher.publish(1, policy())
        with pytest.raises(PublishInProgressError):
            await publisher.publish(2, policy())
        await first.committed
        await publish(publisher, 2)


# One server fails; the others go on.


async def test_a_publisher_of_the_past_is_told_at_once() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[1].refuse_update = ("STALE_PUBLISHER", {"term": "8"})
        with pytest.raises(StalePublisherError):
            await publisher.publish(1, policy())
        assert [server.commits for server in servers] == [[], []]
        await until(lambda: servers[0].discards != [])


async def test_no_server_at_all() -> None:
    async with publishing(2) as (servers, _, publisher):
        await publisher.schema()
        for server in servers:
            await server.stop()
        with pytest.raises(PublishFailedError, match="cannot be asked what it serves"):
            await publisher.publish(1, policy())


# Cancelling.


async def _stuck(publisher: Publisher, servers: list[PublishableServer]) -> PublishHandle:
    """A publish that waits for servers which do not receive."""
    for server in servers:
        server.hangs_in = "JoinTransport"
    return await publisher.publish(1, policy())


async def test_a_cancelled_publish_discards() -> None:
    async with publishing(2) as (servers, _, publisher):
        handle = await _stuck(publisher, servers)
        await handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle.committed
        await until(lambda: all(handle.update_id in s.discards for s in servers))
        assert [server.commits for server in servers] == [[], []]


async def test_closing_the_fleet_ends_a_publish() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        handle = await _stuck(publisher, servers)
        await fleet.close()
        assert handle.done
        await until(lambda: all(handle.update_id in s.discards for s in servers))
        with pytest.raises(ClosedError):
            await publisher.publish(2, policy())


async def test_a_fleet_that_is_not_open_is_not_published_to() -> None:
    async with publishing(1) as (servers, _, _):
        fleet = Fleet([servers[0].address])
        for _ in range(2):  # never opened, then closed
            publisher = Publisher(fleet)
            for call in (
                publisher.publish(1, policy()),
                publisher.catch_up(policy()),
                publisher.schema(),
                publisher.prepare(),
            ):
                with pytest.raises(ClosedError, match="the fleet is not open: use it within"):
                    await call
            async with fleet:
                assert await publisher.schema() == SCHEMA


async def test_publish_itself_can_be_cancelled() -> None:
    async with publishing(1) as (servers, _, publisher):
        servers[0].hangs_in = "UpdateWeights"
        task = asyncio.create_task(publisher.publish(1, policy()))
        await until(lambda: servers[0].announced)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    ("require", "raises"),
    [("all", True), (0.67, True), (2 / 3, False), (0.1, False), ("any", False)],
)
async def test_so_many_servers_must_have_what_is_waited_for(
    require: Literal["all", "any"] | float, *, raises: bool
) -> None:
    async with publishing(3) as (servers, _, publisher):
        servers[1].refuse_commit = True
        waiting = publisher.publish_and_wait(1, policy(), require=require)
        if raises:
            with pytest.raises(PublishIncompleteError, match="version 1 is on 2 of 3 servers") as e:
                await waiting
            report = e.value.report
        else:
            report = await waiting
        assert [server.address for server in report.failed] == [servers[1].address]
        servers[1].refuse_commit = False
        again = await publisher.publish_and_wait(2, policy())
        assert again.failed == ()


@pytest.mark.parametrize("require", ["most", 0, 1.5, True, float("nan")])
async def test_what_is_no_share_of_servers_is_refused_first(require: object) -> None:
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(ValueError, match="require is"):
            await publisher.publish_and_wait(1, policy(), require=require)
        assert servers[0].announced == 0


async def test_a_cancelled_wait_cancels_the_publish() -> None:
    async with publishing(1) as (servers, _, publisher):
        servers[0].hangs_in = "JoinTransport"
        waiting = asyncio.create_task(publisher.publish_and_wait(1, policy()))
        await until(lambda: servers[0].joins != [])
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        servers[0].hangs_in = ""
        await publisher.publish_and_wait(2, policy())
        assert len(servers[0].commits) == 1

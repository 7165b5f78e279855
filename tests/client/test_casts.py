"""Policies whose dtypes are not those of the servers."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from client.publishing import TIMEOUTS, holds, publishing
from client.scripted import until
from client.scripted_weights import BUCKET_BYTES, SCHEMA, policy
from rollwire_client import (
    DtypeCast,
    Publisher,
    SchemaMismatchError,
    TensorsChangedError,
)
from rollwire_client._cli.publish import _as_json, _table
from rollwire_transport import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


def masters(seed: int = 0) -> dict[str, Tensor]:
    """The policy, in which the servers' bfloat16 is float32; what is tied stays so."""
    tensors = policy(seed)
    tensors["layer.bias"] = tensors["layer.bias"].float()
    return tensors


def one_by_one() -> Iterator[tuple[str, Tensor]]:
    yield from masters().items()


def by_functions() -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for name, tensor in reversed(masters().items()):
        yield name, lambda tensor=tensor: tensor


CASTS = (DtypeCast("float32", "bfloat16", 1),)


@pytest.mark.parametrize("source", [masters(), one_by_one, by_functions])
async def test_masters_are_cast_to_what_the_servers_have(source: Any) -> None:
    async with publishing(2) as (servers, _, publisher):
        report = await (await publisher.publish(1, source)).committed
        assert report.casts == CASTS
        assert all(holds(server) for server in servers)
        dtypes = {spec.name: spec.dtype for spec in servers[0].manifests[0].tensors}
        assert dtypes == {spec.name: spec.dtype for spec in SCHEMA}
        unchanged = await (await publisher.publish(2, policy())).committed
        assert unchanged.casts == ()
        assert unchanged.digest == report.digest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
async def test_each_floating_point_dtype_is_cast(dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in policy().items()}
    tensors["head.weight"] = tensors["embed.weight"]
    async with publishing(1) as (servers, _, publisher):
        report = await publisher.publish_and_wait(1, tensors)
        got = servers[0].committed
        for name, tensor in got.items():
            assert torch.equal(tensor, tensors[name].to(tensor.dtype))
        assert DtypeCast(str(dtype).removeprefix("torch."), "float32", 2) in report.casts


@pytest.mark.parametrize("callable_", [False, True])
async def test_a_part_is_cast_too(*, callable_: bool) -> None:
    part = {"layer.bias": masters()["layer.bias"]}
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, part.items if callable_ else part, partial=True)
        assert (await handle.committed).casts == CASTS
        assert torch.equal(servers[0].committed["layer.bias"], policy()["layer.bias"])


@pytest.mark.parametrize("callable_", [False, True])
async def test_a_publisher_that_does_not_cast_refuses(*, callable_: bool) -> None:
    async with publishing(1) as (servers, fleet, _):
        strict = Publisher(fleet, term=9, bucket_bytes=BUCKET_BYTES, timeouts=TIMEOUTS, cast=False)
        told = (
            "layer.bias is float32, the servers want bfloat16: cast before publishing, or let the "
            r"publisher cast \(cast=True\), or start the servers with --dtype float32"
        )
        with pytest.raises(SchemaMismatchError, match=told):
            await (await strict.publish(1, one_by_one if callable_ else masters())).committed
        with pytest.raises(SchemaMismatchError):
            await (await strict.publish(1, by_functions)).committed
        assert servers[0].commits == []
        await strict.publish_and_wait(1, policy())


async def test_what_needs_scales_is_not_cast() -> None:
    async with publishing(1) as (servers, _, publisher):
        servers[0].schema = (TensorSpec("layer.weight", "float8_e4m3fn", (8, 8)),)
        with pytest.raises(SchemaMismatchError, match="quantize before publishing: a cast would"):
            await publisher.publish(1, {"layer.weight": torch.zeros(8, 8)})
        assert servers[0].update is None


async def test_an_overflow_is_refused_by_name_and_nothing_is_committed() -> None:
    async with publishing(1) as (servers, _, publisher):
        schema = tuple(
            dataclasses.replace(spec, dtype="float16" if spec.name == "layer.bias" else spec.dtype)
            for spec in SCHEMA
        )
        servers[0].schema = schema
        tensors = masters()
        tensors["layer.bias"][3] = 1e6
        with pytest.raises(SchemaMismatchError, match=r"layer\.bias has finite values that float1"):
            await publisher.publish_and_wait(1, tensors)
        assert servers[0].commits == []
        tensors["layer.bias"][3] = torch.inf
        await publisher.publish_and_wait(1, tensors)


async def test_a_change_of_the_masters_is_noticed() -> None:
    async with publishing(1) as (servers, _, publisher):
        tensors = masters()
        servers[0].stop_receiving_at = 6  # all was packed once
        handle = await publisher.publish(1, tensors)
        tensors["layer.bias"].add_(1)
        with pytest.raises(TensorsChangedError, match=r"layer\.bias"):
            await handle.committed
        assert servers[0].commits == []


async def test_a_server_catches_up_from_the_masters() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        servers[1].refuse_commit = True
        report = await (await publisher.publish(1, masters())).committed
        assert len(report.failed) == 1
        servers[1].refuse_commit = False
        await until(lambda: fleet._pool.servers[1].problem is not None)
        caught_up = await publisher.catch_up(masters())
        assert [server.address for server in caught_up.servers] == [servers[1].address]
        assert caught_up.casts == CASTS
        assert holds(servers[1])


async def test_the_command_s_table_says_what_was_cast() -> None:
    async with publishing(1) as (_, _, publisher):
        report = await publisher.publish_and_wait(1, masters())
    assert "1 tensor cast from float32 to bfloat16" in str(_table(report).title)
    (cast,) = _as_json(report)["casts"]
    assert cast == {"source": "float32", "target": "bfloat16", "tensors": 1}


async def test_a_broken_link_is_mended_from_the_masters() -> None:
    async with publishing(2) as (servers, _, publisher):
        servers[1].stop_receiving_at = 4
        report = await asyncio.wait_for((await publisher.publish(1, masters())).committed, 60)
        assert report.failed == ()
        assert report.casts == CASTS
        assert all(holds(server) for server in servers)

"""Tensors that are sharded: what is gathered of them, and in which dtype."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from client.publishing import holds
from client.ranks.support import NAMES, trainer
from client.scripted_weights import policy
from rollwire_client import DtypeCast
from rollwire_transport import describe_all

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


def sharded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    return {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors.items()}


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """The dtypes and shapes of all DTensors that were gathered, on all ranks."""
    from torch.distributed.tensor import DTensor

    gather, told = DTensor.full_tensor, []

    def full_tensor(tensor: DTensor) -> Tensor:
        told.append((tensor.dtype, tuple(tensor.shape)))
        return gather(tensor)

    monkeypatch.setattr(DTensor, "full_tensor", full_tensor)
    return told


@pytest.mark.parametrize("way", ["mapping", "callable", "functions", "partial"])
async def test_shards_are_cast_before_they_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    gathered: list[tuple[torch.dtype, tuple[int, ...]]],
    way: str,
) -> None:
    tensors = sharded({name: policy()[name].float() for name in NAMES})
    source = {
        "mapping": tensors,
        "functions": lambda: [(n, lambda t=t: t) for n, t in tensors.items()],
    }.get(way, tensors.items)
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        handle, *others = await asyncio.gather(
            *(one.publish(publisher, 1, source, partial=way == "partial") for one in ranks)
        )
        assert others == [None, None]
        report = await handle.committed
        assert report.casts == (DtypeCast("float32", "bfloat16", 1),)
        assert all(holds(server) for server in servers)
    dtypes = [dtype for dtype, shape in gathered if shape == (8,)]  # of the one to be cast
    assert dtypes == [torch.float32 if way == "partial" else torch.bfloat16] * 3


async def test_shards_that_could_overflow_or_would_grow_are_cast_where_they_are_sent(
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    gathered: list[tuple[torch.dtype, tuple[int, ...]]],
) -> None:
    tensors = {name: policy()[name].float() for name in NAMES}
    tensors["layer.bias"] = tensors["layer.bias"].double() * 1e300  # servers have bfloat16
    tensors["layer.weight"] = tensors["layer.weight"].half()  # float32
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        handle, *others = await asyncio.gather(
            *(one.publish(publisher, 1, sharded(tensors)) for one in ranks), return_exceptions=True
        )
        assert "layer.bias has finite values that bfloat16 cannot represent" in str(handle)
        assert all("layer.bias has finite values" in str(other) for other in others)
        assert [server.commits for server in servers] == [[], []]
    assert {dtype for dtype, shape in gathered if shape == (8,)} == {torch.float64}
    assert {dtype for dtype, shape in gathered if shape == (8, 8)} == {torch.float16}


@pytest.mark.parametrize("way", ["mapping", "callable", "functions"])
async def test_packed_experts_are_gathered_once_and_sent_as_their_matrices(
    monkeypatch: pytest.MonkeyPatch,
    group: dist.ProcessGroup,
    gathered: list[tuple[torch.dtype, tuple[int, ...]]],
    way: str,
) -> None:
    packed = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0))
    tensors = sharded({"mlp.experts.gate_up_proj": packed})
    source = {"mapping": tensors, "callable": tensors.items}.get(
        way, lambda: [(n, lambda t=t: t) for n, t in tensors.items()]
    )
    want = {
        f"mlp.experts.{i}.{name}.weight": matrix.bfloat16()
        for i in range(3)
        for name, matrix in zip(("gate_proj", "up_proj"), packed[i].chunk(2), strict=True)
    }
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        for server in servers:
            server.schema = tuple(describe_all(want))
        handle, *others = await asyncio.gather(
            *(one.publish(publisher, 1, source) for one in ranks)
        )
        assert others == [None, None]
        report = await handle.committed
        assert report.casts == (DtypeCast("float32", "bfloat16", 6),)
        for server in servers:
            assert server.committed.keys() == want.keys()
            assert all(torch.equal(server.committed[n], t) for n, t in want.items())
    assert gathered == [(torch.bfloat16, (3, 8, 6))] * 3

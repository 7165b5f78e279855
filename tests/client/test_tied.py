"""Names that share one tensor on the servers, and are tensors of their own in the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from client.publishing import holds, publishing
from client.scripted_weights import policy
from rollwire_client import SchemaMismatchError, TensorsChangedError
from rollwire_client._publishing.tied import TiedTensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

WAYS = ["mapping", "callable", "functions", "partial callable"]
TOLD = "head.weight is tied to embed.weight on the servers, and a tensor of its own with other val"


def untied() -> dict[str, Tensor]:
    """Masters in float64, in which what is tied came apart by less than the servers' dtype sees."""
    tensors = {name: tensor.double() for name, tensor in policy().items()}
    tensors["head.weight"] = tensors["embed.weight"] * (1 + 1e-12)
    assert not torch.equal(tensors["head.weight"], tensors["embed.weight"])
    return tensors


def source_of(tensors: dict[str, Tensor], way: str) -> Any:
    if way == "mapping":
        return tensors
    if way == "functions":
        return lambda: ((name, lambda t=tensor: t) for name, tensor in tensors.items())
    return tensors.items


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", ["embed.weight", "head.weight"])
async def test_equal_values_in_the_dtype_of_the_servers_are_taken(way: str, first: str) -> None:
    tensors = untied()
    tensors = {first: tensors[first], **tensors}
    async with publishing(1) as (servers, _, publisher):
        report = await publisher.publish_and_wait(
            1, source_of(tensors, way), partial=way.startswith("partial")
        )
        assert holds(servers[0])
        assert report.bytes < 1000  # once


@pytest.mark.parametrize("way", WAYS)
async def test_other_values_are_refused_by_name(way: str) -> None:
    tensors = untied()
    tensors["head.weight"][15, 7] += 1e-3
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match=TOLD):
            await publisher.publish_and_wait(
                1, source_of(tensors, way), partial=way.startswith("partial")
            )
        assert servers[0].commits == []
        await publisher.publish_and_wait(1, policy())


async def test_memory_that_is_used_again_is_another_tensor() -> None:
    tensors = policy()
    buffer = torch.empty(16, 8)

    def source() -> Iterator[tuple[str, Tensor]]:
        buffer.copy_(tensors["embed.weight"])
        yield "embed.weight", buffer
        yield "layer.weight", tensors["layer.weight"]
        buffer.zero_()
        yield "head.weight", buffer
        yield "layer.bias", tensors["layer.bias"]

    async with publishing(1) as (servers, _, publisher):
        with pytest.raises((SchemaMismatchError, TensorsChangedError)):
            await publisher.publish_and_wait(1, source)
        assert servers[0].commits == []


async def test_what_is_tied_in_the_trainer_too_is_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensors = policy()
    digests: list[str] = []
    add = TiedTensors.add

    def note(self: TiedTensors, *args: Any) -> None:
        digests.append(args[0])
        add(self, *args)

    monkeypatch.setattr(TiedTensors, "add", note)
    async with publishing(1) as (servers, _, publisher):
        await publisher.publish_and_wait(1, tensors.items)
        await publisher.publish_and_wait(2, tensors)
        assert holds(servers[0])
    assert digests == []

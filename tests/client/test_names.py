"""Names of wrapped models, which a publish takes as they are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from client.publishing import holds, publishing
from client.scripted_weights import policy
from rollwire_client import SchemaMismatchError, TensorsChangedError
from rollwire_transport import describe_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

WRAPPED: dict[str, Callable[[str], str]] = {
    "DDP": lambda name: f"module.{name}",
    "compiled": lambda name: f"_orig_mod.{name}",
    "both": lambda name: f"module._orig_mod.{name}",
    "FSDP": lambda name: "_fsdp_wrapped_module." + name.replace(".", "._fsdp_wrapped_module."),
    "checkpointed": lambda name: re.sub(r"layer\.", "layer._checkpoint_wrapped_module.", name),
}


@pytest.mark.parametrize("way", ["mapping", "callable", "partial"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
async def test_names_of_wrapped_models_are_taken(wrap: Callable[[str], str], way: str) -> None:
    tensors = {wrap(name): tensor for name, tensor in policy().items()}
    source: Any = tensors if way == "mapping" else tensors.items
    async with publishing(1) as (servers, _, publisher):
        await publisher.publish_and_wait(1, source, partial=way == "partial")
        assert holds(servers[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own
async def test_tensors_of_a_compiled_model_are_taken() -> None:
    model = torch.nn.Module()
    model.embed, model.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
    model.layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        for name, tensor in policy().items():
            model.get_parameter(name).copy_(tensor)
    compiled = torch.compile(model)
    assert all(name.startswith("_orig_mod.") for name, _ in compiled.named_parameters())
    async with publishing(1) as (servers, _, publisher):
        await publisher.publish_and_wait(1, compiled.state_dict())
        assert holds(servers[0])
        await publisher.publish_and_wait(2, compiled.named_parameters)
        assert holds(servers[0])


async def test_the_same_tensor_by_two_names_is_refused() -> None:
    def source() -> Iterator[tuple[str, Tensor]]:
        yield from policy().items()
        yield "module.layer.bias", policy()["layer.bias"]

    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match=r"gave module\.layer\.bias twice"):
            await publisher.publish_and_wait(1, source)
        assert servers[0].commits == []


async def test_a_change_is_told_by_the_trainer_s_name() -> None:
    async with publishing(1) as (_, _, publisher):
        tensors = {f"module.{name}": tensor for name, tensor in policy().items()}
        handle = await publisher.publish(1, tensors)
        tensors["module.layer.bias"].add_(1)
        with pytest.raises(TensorsChangedError, match=r"module\.layer\.bias"):
            await handle.committed


async def test_an_adapter_is_refused_in_a_wrapped_model_too() -> None:
    tensors = {f"module.base_model.model.{name}": tensor for name, tensor in policy().items()}
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match="Merge the adapter first"):
            await publisher.publish(1, tensors)
        assert servers[0].update is None


PACKED = {
    "layer.mlp.experts.gate_up_proj": torch.arange(48.0).view(2, 6, 4),
    "layer.mlp.experts.down_proj": torch.arange(24.0).view(2, 4, 3),
}
SINGLE = {
    f"layer.mlp.experts.{i}.{name}_proj.weight": matrix
    for i in range(2)
    for name, matrix in zip(
        ("gate", "up", "down"),
        (*PACKED["layer.mlp.experts.gate_up_proj"][i].chunk(2),
         PACKED["layer.mlp.experts.down_proj"][i]),
        strict=True,
    )
}  # fmt: skip


@pytest.mark.parametrize("way", ["mapping", "callable", "partial", "partial callable"])
@pytest.mark.parametrize(("here", "there"), [(PACKED, SINGLE), (SINGLE, PACKED)])
async def test_experts_are_taken_packed_and_single(
    here: dict[str, Tensor], there: dict[str, Tensor], way: str
) -> None:
    tensors = {f"module.{name}": tensor for name, tensor in here.items()}
    source: Any = tensors.items if way.endswith("callable") else tensors
    async with publishing(1) as (servers, _, publisher):
        servers[0].schema = tuple(describe_all(there))
        for version in (1, 2):  # a callable's second publish is laid out as the first came
            report = await publisher.publish_and_wait(
                version, source, partial=way.startswith("partial")
            )
            assert report.casts == ()
            assert servers[0].committed.keys() == there.keys()
            assert all(torch.equal(servers[0].committed[n], t) for n, t in there.items())


async def test_an_expert_that_a_callable_lacks_is_named() -> None:
    name = "layer.mlp.experts.1.up_proj.weight"
    some = {other: tensor for other, tensor in SINGLE.items() if other != name}
    async with publishing(1) as (servers, _, publisher):
        servers[0].schema = tuple(describe_all(PACKED))
        with pytest.raises(SchemaMismatchError, match=rf"ended without {re.escape(name)}"):
            await publisher.publish_and_wait(1, some.items)
        with pytest.raises(SchemaMismatchError, match=f"{re.escape(name)} is missing"):
            await publisher.publish_and_wait(1, some.items, partial=True)
        assert servers[0].commits == []

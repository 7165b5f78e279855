"""Names of wrapped models, which a publish takes as they are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from client.publishing import holds, publishing
from client.scripted_weights import policy
from rollwire_client import SchemaMismatchError, TensorsChangedError

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

"""The policy that a trainer's model stands for: its tensors, under the names of its checkpoint."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import rollwire_transport as transport
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_PEFT_ROOT = "base_model.model."


def check_model(model: Any) -> None:
    """Raises ValueError if the model's policy cannot be published."""
    if getattr(model, "is_quantized", False):
        raise ValueError(
            "the model is quantized: its weights are not those that servers have, and merging an "
            "adapter into them loses precision. Load it without quantization"
        )
    if not _is_peft(model):
        return
    from peft.tuners.tuners_utils import BaseTuner

    if not isinstance(model.base_model, BaseTuner):
        raise ValueError(  # noqa: TRY004 - the type of the trainer is right
            f"the adapter of type {model.active_peft_config.peft_type} is not merged into weights, "
            "and servers take whole weights only: use one that is, such as LoRA"
        )
    layers = dict(_adapted_layers(model))
    if any(dict(_adapted_layers(layer.get_base_layer())) for layer in layers.values()):
        raise ValueError(
            "several adapters are nested in one layer, as with LoRA's target_parameters: this is "
            "not supported, use target_modules"
        )
    if getattr(model.config, "tie_word_embeddings", False):
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        if any(layer is end for layer in layers.values() for end in ends):
            raise ValueError(
                "an adapter is on the embeddings or on the head, which share one tensor on the "
                "servers: leave both out of target_modules"
            )


def policy_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the policy, one at a time.

    Adapters are merged in a copy of each layer. The trainer's weights are not touched: merging and
    unmerging in place would round them, a little more with each publish.
    """
    for name, tensor in _merged_tensors(model) if _is_peft(model) else model.named_parameters():
        yield _plain_name(name), tensor.detach()
        del tensor


def fingerprint(optimizer: Any) -> int:
    """Changes whenever a trained parameter of this process does, bit for bit."""
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.numel():
                tensors[str(len(tensors))] = local.detach()
    specs = [transport.describe(name, tensor) for name, tensor in tensors.items()]
    return transport.sum_digests(transport.tensor_digests(specs, tensors).values())


def _is_peft(model: Any) -> bool:
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name, module


def _merged_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    layers = dict(_adapted_layers(model))
    for layer_name, layer in layers.items():
        with torch.no_grad():
            merged = copy.deepcopy(layer)
            merged.merge()
        for name, parameter in merged.get_base_layer().named_parameters():
            yield f"{layer_name}.{name}", parameter
        del merged
    active = {f"modules_to_save.{adapter}" for adapter in model.active_adapters}
    for name, parameter in model.named_parameters():
        parents = name.split(".")
        if any(".".join(parents[:end]) in layers for end in range(len(parents))):
            continue
        if "original_module" in parents:  # one of modules_to_save takes its place
            continue
        if "modules_to_save" in parents:
            place = parents.index("modules_to_save")
            if ".".join(parents[place : place + 2]) not in active:
                continue
            del parents[place : place + 2]
        yield ".".join(parents), parameter


def _plain_name(name: str) -> str:
    plain = transport.unwrapped(name)
    # Other names are left to the publisher, which knows those of the servers.
    return plain.removeprefix(_PEFT_ROOT) if plain.startswith(_PEFT_ROOT) else name

"""A model's tensors under the names that its checkpoint gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def checkpoint_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and persistent buffers, as views of the model's memory, aliases included.

    transformers keeps the experts of a layer in two tensors where checkpoints have three matrices
    an expert. How one becomes the other is transformers' own knowledge, so its conversion is asked,
    with a row of two equal numbers in place of each matrix. Where that does more than to split and
    to rename, the tensors keep the names that the model itself has for them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = {name: tensor.detach() for name, tensor in hf.state_dict(keep_vars=True).items()}
    matrices: list[Tensor] = []
    stand_ins: dict[str, Tensor] = {}
    for name, tensor in own.items():
        stacked = _stacked(hf, name, tensor)
        rows = stacked.flatten(0, 1) if stacked is not None else tensor[None]
        numbers = torch.arange(len(matrices), len(matrices) + len(rows))
        lead = stacked.shape[:2] if stacked is not None else (1,) * (tensor.ndim - 1)
        stand_ins[name] = numbers.view(*lead, 1).expand(*lead, 2)
        matrices.extend(rows)

    tensors: list[tuple[int, str]] = []
    for name, stand_in in revert_weight_conversion(hf, stand_ins).items():
        first, *others = stand_in.flatten().tolist()
        if stand_in.shape[-1] != 2 or others != [first]:
            return own
        tensors.append((first, name))
    tensors.sort()
    if [number for number, _ in tensors] != list(range(len(matrices))):
        return own
    return {name: matrices[number] for number, name in tensors}


def _stacked(hf: PreTrainedModel, name: str, tensor: Tensor) -> Tensor | None:
    """A tensor that holds the matrices of all experts, as [experts, matrices, rows, columns]."""
    module_name, _, kind = name.rpartition(".")
    matrices = {"gate_up_proj": 2, "down_proj": 1}.get(kind)
    module = hf.get_submodule(module_name)
    plain = getattr(module, "is_concatenated", False) and not getattr(module, "is_transposed", True)
    if matrices is None or tensor.ndim != 3 or not plain:
        return None
    return tensor.view(tensor.shape[0], matrices, -1, tensor.shape[2])

"""Mixture-of-experts models: results that do not depend on the batch, and which experts ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

EXPERTS = "rollwire_padded"
"""The name under which transformers knows ``padded_experts``."""

LEAST_ROWS = 16
"""Of a matrix product whose sums do not depend on how many rows it has."""


def padded_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The experts' own grouped product, with rows of zeros so that each expert has LEAST_ROWS
    rows at least: how many tokens chose it no longer changes the order of its sums.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    number: int = experts.num_experts  # type: ignore[assignment] # not a module, whatever mypy reads
    top_k = chosen.shape[-1]
    rows = -(-number * LEAST_ROWS // top_k)
    filler = torch.arange(rows * top_k, device=chosen.device).remainder_(number).view(rows, top_k)
    out: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
        experts,
        torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[-1])]),
        torch.cat([chosen, filler.to(chosen.dtype)]),
        torch.cat([weights, weights.new_zeros(rows, top_k)]),
    )
    return out[: len(hidden)]


class Routers:
    """The routers of a model, and what they chose in its last forward pass."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._chosen: list[Tensor] = []
        self._number = 0
        recorder = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        routers = [m for m in hf.modules() if kind is not None and isinstance(m, kind)]
        self._layers = len(routers)
        for router in routers:
            router.register_forward_hook(self._record)

    def begin(self) -> None:
        """Forgets the last forward pass."""
        self._chosen.clear()

    @property
    def tell(self) -> bool:
        """Whether the last forward pass said which experts every router chose, as many in each."""
        shapes = {tuple(chosen.shape) for chosen in self._chosen}
        return len(self._chosen) == self._layers and len(shapes) == 1

    def chosen(self) -> np.ndarray:
        """Experts of the last forward pass, [rows, layers, top_k], layers without a router left
        out.
        """
        stacked: np.ndarray = torch.stack(self._chosen, dim=1).cpu().numpy()
        return stacked

    def store(self, slots: int, context: int) -> np.ndarray | None:
        """Room for the experts of every slot, [slots, context, layers, top_k], one or two bytes
        each; None if the routers do not tell.
        """
        if not self.tell:
            return None
        dtype = np.uint8 if self._number <= 256 else np.uint16
        return np.zeros((slots, context, self._layers, self._chosen[0].shape[-1]), dtype=dtype)

    def _record(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Routers give their logits, then scores, then the chosen experts."""
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            self._number = output[0].shape[-1]
            self._chosen.append(output[2])

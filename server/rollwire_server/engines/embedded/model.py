"""A Hugging Face model that computes packed batches with this engine's attention and experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded.attention import ATTENTION, attend, is_batch_invariant
from rollwire_server.engines.embedded.checkpoint import first_line
from rollwire_server.engines.embedded.kv_cache import round_up
from rollwire_server.engines.end_tokens import end_token_ids

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.batch import PackedBatch

EXPERTS = "rollwire_padded"
"""The name under which transformers knows ``padded_experts``."""

MIN_ROWS = 16
"""Of a matrix product whose sums do not depend on how many rows it has."""


class PackedModel:
    """A causal language model that computes packed batches.

    Attributes:
        hf: The transformers model. Its attention is replaced by ``attention.attend``.
        vocab_size: Of its logits.
        eos_token_ids: Ascending.
        routers: Record which experts were chosen.
        row_step: A batch must have a multiple of this many rows.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        _check_layer_types(hf)
        _replace_attention(hf)
        self.hf = hf
        self.vocab_size = int(hf.config.get_text_config().vocab_size)
        self.eos_token_ids = end_token_ids(hf.config, hf.generation_config, self.vocab_size)
        self.routers = RouterRecorder(hf)
        self.row_step = _row_step(hf)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.hf.device
        return device

    @property
    def batch_invariant(self) -> bool:
        """Whether each token should be computed the same in any batch, bit for bit."""
        return is_batch_invariant(self.hf.dtype, self.hf.device)

    def logits(self, batch: PackedBatch, rows: np.ndarray) -> Tensor:
        """Computes a batch; returns the logits of the given rows in fp32, [rows, vocab]."""
        self.routers.clear()
        keep = np.zeros(round_up(len(rows), self.row_step), dtype=np.int64)
        keep[: len(rows)] = rows
        output = self.hf(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(keep).to(self.device),
            batch=batch,
        )
        logits: Tensor = output.logits[0, : len(rows)]
        return logits.float()


class RouterRecorder:
    """Records which experts a model's routers chose in its last forward pass."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._chosen: list[Tensor] = []
        self._num_experts = 0
        recorder = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        routers = [m for m in hf.modules() if kind is not None and isinstance(m, kind)]
        self._layers = len(routers)
        for router in routers:
            router.register_forward_hook(self._record)

    def clear(self) -> None:
        self._chosen.clear()

    @property
    def complete(self) -> bool:
        """Whether every router was recorded, each with the same number of experts."""
        shapes = {tuple(chosen.shape) for chosen in self._chosen}
        return len(self._chosen) == self._layers and len(shapes) == 1

    def chosen(self) -> np.ndarray:
        """Experts of the last forward pass, [rows, layers with a router, top_k]."""
        stacked: np.ndarray = torch.stack(self._chosen, dim=1).cpu().numpy()
        return stacked

    def allocate(self, slots: int, context: int) -> np.ndarray | None:
        """Memory for the experts of every slot, [slots, context, layers, top_k], one or two bytes
        each; None if they cannot be recorded.
        """
        if not self.complete:
            return None
        dtype = np.uint8 if self._num_experts <= 256 else np.uint16
        return np.zeros((slots, context, self._layers, self._chosen[0].shape[-1]), dtype=dtype)

    def _record(self, _module: nn.Module, _args: Any, output: Any) -> None:
        # Routers return their logits, then scores, then the chosen experts.
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            self._num_experts = output[0].shape[-1]
            self._chosen.append(output[2])


def padded_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' grouped product of experts, with at least MIN_ROWS rows for each expert.

    How many tokens chose an expert then does not change the order of its sums.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    number: int = experts.num_experts  # type: ignore[assignment] # not a module, whatever mypy reads
    top_k = chosen.shape[-1]
    rows = -(-number * MIN_ROWS // top_k)
    filler = torch.arange(rows * top_k, device=chosen.device).remainder_(number).view(rows, top_k)
    out: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](
        experts,
        torch.cat([hidden, hidden.new_zeros(rows, hidden.shape[-1])]),
        torch.cat([chosen, filler.to(chosen.dtype)]),
        torch.cat([weights, weights.new_zeros(rows, top_k)]),
    )
    return out[: len(hidden)]


def _replace_attention(hf: PreTrainedModel) -> None:
    from transformers import AttentionInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(ATTENTION, attend)
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS, padded_experts)
    kind = type(hf).__name__
    try:
        hf.set_attn_implementation(ATTENTION)
        if is_batch_invariant(hf.dtype, hf.device):
            hf.set_experts_implementation(EXPERTS)
    except (ValueError, KeyError, ImportError) as error:
        raise EngineError(f"{kind} cannot be served: {first_line(error)}") from error
    if hf.config._attn_implementation != ATTENTION:  # noqa: SLF001 - there is no other way to ask
        raise EngineError(f"{kind} cannot be served: it has an attention of its own")


def _row_step(hf: PreTrainedModel) -> int:
    """How many rows a batch must have a multiple of, so that on a CPU a token's result does not
    depend on the number of rows.
    """
    # Matrix products of fewer rows (4 with AVX2, 16 with AVX512), and the last rows of odd numbers,
    # take other code paths, with sums in another order. And activation functions treat the last
    # elements of a tensor differently: those beyond whole pairs of vectors, of up to 32 elements.
    tables = (hf.get_input_embeddings(), hf.get_output_embeddings())
    vocabulary = {id(p) for table in tables if table is not None for p in table.parameters()}
    matrices = (p for p in hf.parameters() if p.ndim > 1 and id(p) not in vocabulary)
    widths = {width for matrix in matrices for width in matrix.shape}
    return max(MIN_ROWS, 32 // math.gcd(32, *widths))


def _check_layer_types(hf: PreTrainedModel) -> None:
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise EngineError(f"{type(hf).__name__} cannot be served: it has layers of {others[0]}")

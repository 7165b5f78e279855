"""A Hugging Face model behind this engine's attention."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded.attention import ATTENTION, attend, is_batch_invariant
from rollwire_server.engines.embedded.batch import round_up
from rollwire_server.engines.embedded.checkpoint import first_line
from rollwire_server.engines.embedded.experts import EXPERTS, LEAST_ROWS, Routers, padded_experts
from rollwire_server.engines.end_tokens import end_token_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.batch import Batch


class Model:
    """A causal language model that computes packed batches.

    Attributes:
        hf: The transformers model; from now on its attention is ``attention.attend``.
        vocab_size: Of its logits.
        eos_token_ids: Ascending.
        routers: Of a mixture of experts.
        row_step: A batch has a multiple of so many rows.
    """

    def __init__(self, hf: PreTrainedModel) -> None:
        _refuse_unknown_layers(hf)
        _use_own_parts(hf)
        self.hf = hf
        self.vocab_size = int(hf.config.get_text_config().vocab_size)
        self.eos_token_ids = end_token_ids(hf.config, hf.generation_config, self.vocab_size)
        self.routers = Routers(hf)
        self.row_step = _row_step(hf)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self.hf.device
        return device

    @property
    def batch_invariant(self) -> bool:
        """Whether it is meant to compute each token the same in any batch, bit for bit."""
        return is_batch_invariant(self.hf.dtype, self.hf.device)

    def logits(self, batch: Batch, rows: np.ndarray) -> Tensor:
        """Computes a batch; returns the logits of some of its rows in fp32, [rows, vocab]."""
        self.routers.begin()
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


def _use_own_parts(hf: PreTrainedModel) -> None:
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
    """Rows that keep a token's result from depending on how many there are, on a CPU.

    Matrix products of fewer rows (4 with AVX2, 16 with AVX512), and the last rows of odd numbers,
    take other paths, with sums in another order. And an activation function treats the last
    elements of a tensor another way: those beyond whole pairs of vectors, of 32 elements at most.
    """
    tables = (hf.get_input_embeddings(), hf.get_output_embeddings())
    vocabulary = {id(p) for table in tables if table is not None for p in table.parameters()}
    matrices = (p for p in hf.parameters() if p.ndim > 1 and id(p) not in vocabulary)
    widths = {width for matrix in matrices for width in matrix.shape}
    return max(LEAST_ROWS, 32 // math.gcd(32, *widths))


def _refuse_unknown_layers(hf: PreTrainedModel) -> None:
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise EngineError(f"{type(hf).__name__} cannot be served: it has layers of {others[0]}")

"""Tests a model before it serves: does it compute with this engine's attention what it computes by
itself, and is each token's result the same in any batch?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded.batch import PrefillChunk, pack
from rollwire_server.engines.embedded.checkpoint import first_line, quiet_transformers
from rollwire_server.engines.embedded.kv_cache import KvCache
from rollwire_server.engines.embedded.model import PackedModel

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_TOKENS = 40
_DECODED = 12  # of them, one at a time


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        model: The model, ready to serve.
        max_context: What its positions and attention allow.
        cache: A small KV cache with the model's layers.
        deterministic: Whether results did not depend on the batch, bit for bit.
    """

    model: PackedModel
    max_context: int
    cache: KvCache
    deterministic: bool


@torch.inference_mode()
def probe(hf: PreTrainedModel) -> ProbeResult:
    """Gives a model this engine's attention; raises EngineError if its results then differ."""
    kind = type(hf).__name__
    config = hf.config.get_text_config()
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(3, 4 * _TOKENS))
    nothing = np.empty(0, dtype=np.int64)
    with quiet_transformers():
        try:
            ids = torch.from_numpy(tokens[:1, :_TOKENS]).to(hf.device)
            expected = hf(input_ids=ids, use_cache=False).logits[0].float()
            model = PackedModel(hf)
            cache = KvCache(3, tokens.shape[1], hf.device)
            batch, *_ = pack(
                cache, tokens, nothing, nothing, [PrefillChunk(0, 0, _TOKENS)], model.row_step
            )
            packed = model.logits(batch, np.arange(_TOKENS))
        except (EngineError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # models break in their own ways
            raise EngineError(f"{kind} cannot be served: {first_line(error)}") from error
    off = _difference(packed, expected)
    if not off <= (1e-4 if hf.dtype is torch.float32 else 0.05):
        raise EngineError(
            f"{kind} cannot be served: in a packed batch its logits are off by {off:.1%} of their "
            "spread"
        )
    context = _max_context(config, batch.windows)
    deterministic = model.batch_invariant and _is_deterministic(
        model, cache, tokens[:, :context], packed
    )
    return ProbeResult(model, context, cache, deterministic)


def _max_context(config: Any, windows: set[int | None]) -> int:
    """The context that a model's configuration allows; its layers asked for ``windows``."""
    context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            # Beyond their original length these rotate all positions of a batch differently.
            context = min(context, int(parameters["original_max_position_embeddings"]))
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if window and sliding and windows == {None}:
        context = min(context, int(window))  # the model applies its window by a mask of its own
    return context


def _difference(a: Tensor, b: Tensor) -> float:
    spread = (b - b.mean(-1, keepdim=True)).norm()
    return float((a - b).norm() / spread.clamp(min=1e-30))


def _is_deterministic(
    model: PackedModel, cache: KvCache, tokens: np.ndarray, expected: Tensor
) -> bool:
    """Whether the first tokens of slot 0 give the same logits again, bit for bit, when computed in
    slot 1, in pieces, beside a longer sequence.
    """
    tokens = tokens.copy()
    tokens[1] = tokens[0]
    decoded_from = _TOKENS - _DECODED
    third = decoded_from // 3
    longer = tokens.shape[1] - _DECODED
    nothing = np.empty(0, dtype=np.int64)
    pieces = []
    for chunks in (
        [PrefillChunk(1, 0, third), PrefillChunk(2, 0, longer)],
        [PrefillChunk(1, third, decoded_from)],
    ):
        batch, *_ = pack(cache, tokens, nothing, nothing, chunks, model.row_step)
        pieces.append(model.logits(batch, np.arange(chunks[0].end - chunks[0].start)))
    for step in range(_DECODED):
        slots = np.array([1, 2] if step % 2 else [1])
        last = np.array([decoded_from + step, longer + step])[: len(slots)]
        batch, *_ = pack(cache, tokens, slots, last, [], model.row_step)
        pieces.append(model.logits(batch, np.array([0])))
    return torch.equal(torch.cat(pieces), expected)

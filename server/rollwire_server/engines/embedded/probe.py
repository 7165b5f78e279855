"""Tries a model before it serves: does it compute here what it computes by itself, and is each
token's result the same in any batch?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded.batch import Chunk, pack
from rollwire_server.engines.embedded.checkpoint import first_line, quiet
from rollwire_server.engines.embedded.kv_cache import KvCache
from rollwire_server.engines.embedded.model import Model

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_TOKENS = 40
_DECODED = 12  # of them, one at a time


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe found.

    Attributes:
        model: Ready to serve.
        max_context: What its positions and attention allow.
        cache: A small one, for the model's layers.
        deterministic: Results did not depend on the batch, bit for bit.
    """

    model: Model
    max_context: int
    cache: KvCache
    deterministic: bool


@torch.inference_mode()
def probe(hf: PreTrainedModel) -> Findings:
    """Puts a model behind this engine's attention; raises EngineError if it then computes something
    else.
    """
    kind = type(hf).__name__
    config = hf.config.get_text_config()
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(3, 4 * _TOKENS))
    nothing = np.empty(0, dtype=np.int64)
    with quiet():
        try:
            ids = torch.from_numpy(tokens[:1, :_TOKENS]).to(hf.device)
            expected = hf(input_ids=ids, use_cache=False).logits[0].float()
            model = Model(hf)
            cache = KvCache(3, tokens.shape[1], hf.device)
            batch, *_ = pack(
                cache, tokens, nothing, nothing, [Chunk(0, 0, _TOKENS)], model.row_step
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
    return Findings(model, context, cache, deterministic)


def _max_context(config: Any, windows: set[int | None]) -> int:
    """What a model's configuration allows, where its layers asked for sliding ``windows``."""
    context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            # Beyond their original length these turn all positions of a batch another way.
            context = min(context, int(parameters["original_max_position_embeddings"]))
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if window and sliding and windows == {None}:
        context = min(context, int(window))  # the model leaves its window to a mask of its own
    return context


def _difference(a: Tensor, b: Tensor) -> float:
    spread = (b - b.mean(-1, keepdim=True)).norm()
    return float((a - b).norm() / spread.clamp(min=1e-30))


def _is_deterministic(model: Model, cache: KvCache, tokens: np.ndarray, whole: Tensor) -> bool:
    """Computes the first tokens of slot 0 again, in slot 1 and in pieces, beside a longer one."""
    tokens = tokens.copy()
    tokens[1] = tokens[0]
    decoded_from = _TOKENS - _DECODED
    third = decoded_from // 3
    longer = tokens.shape[1] - _DECODED
    nothing = np.empty(0, dtype=np.int64)
    pieces = []
    for chunks in (
        [Chunk(1, 0, third), Chunk(2, 0, longer)],
        [Chunk(1, third, decoded_from)],
    ):
        batch, *_ = pack(cache, tokens, nothing, nothing, chunks, model.row_step)
        pieces.append(model.logits(batch, np.arange(chunks[0].end - chunks[0].start)))
    for step in range(_DECODED):
        slots = np.array([1, 2] if step % 2 else [1])
        last = np.array([decoded_from + step, longer + step])[: len(slots)]
        batch, *_ = pack(cache, tokens, slots, last, [], model.row_step)
        pieces.append(model.logits(batch, np.array([0])))
    return torch.equal(torch.cat(pieces), whole)

"""A Hugging Face model that computes packed batches with this engine's attention and experts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollwire_server.engines.base import EngineError, end_token_ids
from rollwire_server.engines.embedded.batch import WIDTH_STEP, round_up
from rollwire_server.engines.memory import first_line

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.batch import PackedBatch

# The names under which transformers knows ``attend`` and ``padded_experts``.
ATTENTION, EXPERTS = "rollwire_slots", "rollwire_padded"

MIN_ROWS = 16
"""Of a matrix product whose sums do not depend on how many rows it has."""

# Arguments by which some models ask for more than a causal mask.
_NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


class PackedModel:
    """A causal language model that computes packed batches of a multiple of ``row_step`` rows."""

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

    def chosen(self) -> np.ndarray:
        """Experts of the last forward pass, [rows, layers with a router, top_k]."""
        stacked: np.ndarray = torch.stack(self._chosen, dim=1).cpu().numpy()
        return stacked

    def allocate(self, slots: int, context: int) -> np.ndarray | None:
        """Memory for the experts of every slot, [slots, context, layers, top_k]; None if not every
        router is recorded, each with the same number of experts.
        """
        shapes = {tuple(chosen.shape) for chosen in self._chosen}
        if len(self._chosen) != self._layers or len(shapes) != 1:
            return None
        dtype = np.uint8 if self._num_experts <= 256 else np.uint16
        return np.zeros((slots, context, self._layers, self._chosen[0].shape[-1]), dtype=dtype)

    def _record(self, _module: nn.Module, _args: Any, output: Any) -> None:
        # Routers return their logits, then scores, then the chosen experts.
        if isinstance(output, tuple) and len(output) == 3 and not output[2].is_floating_point():
            self._num_experts = output[0].shape[-1]
            self._chosen.append(output[2])


def padded_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """transformers' grouped product, with at least MIN_ROWS rows for each expert: how many tokens
    chose it then does not change the order of its sums.
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
    # So many that a token's result on a CPU does not depend on their number. Matrix products of
    # fewer rows (4 with AVX2, 16 with AVX512), and the last rows of odd numbers, take other code
    # paths, with sums in another order. And activation functions treat the last elements of a
    # tensor differently: those beyond whole pairs of vectors, of up to 32 elements.
    tables = (hf.get_input_embeddings(), hf.get_output_embeddings())
    vocabulary = {id(p) for table in tables if table is not None for p in table.parameters()}
    matrices = (p for p in hf.parameters() if p.ndim > 1 and id(p) not in vocabulary)
    widths = {width for matrix in matrices for width in matrix.shape}
    return max(MIN_ROWS, 32 // math.gcd(32, *widths))


def _check_layer_types(hf: PreTrainedModel) -> None:
    kinds = set(getattr(hf.config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise EngineError(f"{type(hf).__name__} cannot be served: it has layers of {others[0]}")


def is_batch_invariant(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a token's result must not depend on its batch; so where that is cheap enough."""
    # There each query token is a query block of its own, and keys come in multiples of WIDTH_STEP,
    # so that padding adds zeros in whole vectors. Several threads would split tensors, and with
    # them sums, differently for other sizes.
    return dtype is torch.float32 and device.type == "cpu" and torch.get_num_threads() == 1


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - of the interface; the batch makes its own
    scaling: float | None = None,
    sliding_window: int | None = None,
    batch: PackedBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stores the keys and values of a batch's rows, then each row attends to its sequence.

    transformers calls it in each layer; all other layers treat each token by itself. ``query`` is
    [1, heads, rows, dim], ``key`` and ``value`` [1, kv_heads, rows, dim]; the result is
    [1, rows, heads, dim]. Raises NotImplementedError when the model asks for anything else.
    """
    if batch is None:
        raise NotImplementedError("does not pass its arguments on to its attention")
    if asked := [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]:
        raise NotImplementedError(f"its attention uses {asked[0]}, which is not supported")

    keys, values = batch.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type] # an int
    _store(keys, key, batch.entries)
    _store(values, value, batch.entries)
    rows = query[0].transpose(0, 1)  # [rows, heads, dim]
    out = rows.new_zeros(*rows.shape[:2], values.shape[-1])
    n = len(batch.decoding)
    if n:
        mask = batch.mask(0, n, batch.width, sliding_window, query)
        seen_keys, seen_values = batch.of_decoding(keys), batch.of_decoding(values)
        out[:n] = _attend_rows(rows[:n], seen_keys, seen_values, mask, scaling)
    first = n
    for chunk in batch.chunks:
        end = first + chunk.end - chunk.start
        width = round_up(chunk.end, WIDTH_STEP)
        mask = batch.mask(first, end, width, sliding_window, query)
        seen_keys = keys[chunk.slot, None, :width].transpose(1, 2)
        seen_values = values[chunk.slot, None, :width].transpose(1, 2)
        if is_batch_invariant(query.dtype, query.device):
            shape = (end - first, -1, -1, -1)
            seen_keys, seen_values = seen_keys.expand(shape), seen_values.expand(shape)
            out[first:end] = _attend_rows(rows[first:end], seen_keys, seen_values, mask, scaling)
        else:
            block = query[:, :, first:end]
            out[first:end] = _attend_block(block, seen_keys, seen_values, mask, scaling)
        first = end
    return out[None], None


def _store(states: Tensor, new: Tensor, entries: Tensor) -> None:
    """Writes rows [1, heads, rows, dim] to their entries in [slots, tokens, heads, dim]."""
    states.flatten(0, 1).index_copy_(0, entries, new[0, :, : len(entries)].transpose(0, 1))


def _attend_rows(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """One query token a sequence: [n, heads, dim] over [n, kv_heads, width, dim]."""
    n, heads, dim = rows.shape
    mask = mask[:, None, None]
    if is_batch_invariant(rows.dtype, rows.device):
        # Heads of a group in one block, as below, would make the order of sums depend on width.
        return scaled_dot_product_attention(
            rows[:, :, None], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        ).squeeze(2)
    grouped = rows.reshape(n, keys.shape[1], -1, dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(n, heads, -1)


def _attend_block(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Many query tokens of one sequence: [1, heads, n, dim] over [1, kv_heads, width, dim]."""
    _, heads, n, dim = query.shape
    group = heads // keys.shape[1]  # they share keys: stacked as rows, no keys are repeated
    grouped = query.reshape(1, keys.shape[1], group * n, dim)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask.repeat(group, 1)[None, None], scale=scaling
    )
    return out.reshape(heads, n, -1).transpose(0, 1)

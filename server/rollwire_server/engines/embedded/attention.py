"""Attention of packed rows over the KV cache, registered with transformers.

A model sees one batch row ``[1, tokens]``. All other layers treat each token by itself; here each
row attends to its own sequence.

On one CPU thread in fp32 a token's result does not depend on the batch, bit for bit: each query
token is a query block of its own, and keys come in multiples of ``WIDTH_STEP``, so that padding
adds zeros in whole vectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rollwire_server.engines.embedded.kv_cache import WIDTH_STEP, round_up

if TYPE_CHECKING:
    from torch import Tensor, nn

    from rollwire_server.engines.embedded.batch import PackedBatch

ATTENTION = "rollwire_slots"
"""The name under which transformers knows ``attend``."""

# Arguments by which some models ask for more than a causal mask.
_NOT_COMPUTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


class UnservableModelError(Exception):
    """The model needs an attention that this engine does not compute."""


def is_batch_invariant(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a token's result must not depend on its batch; so where that is cheap enough."""
    # Several threads would split tensors, and with them sums, differently for other sizes.
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

    ``query`` is [1, heads, rows, dim], ``key`` and ``value`` [1, kv_heads, rows, dim]; the result
    is [1, rows, heads, dim]. Raises UnservableModelError when the model asks for anything else.
    """
    if batch is None:
        raise UnservableModelError("does not pass its arguments on to its attention")
    if asked := [name for name in _NOT_COMPUTED if kwargs.get(name) is not None]:
        raise UnservableModelError(f"its attention uses {asked[0]}, which is not supported")

    keys, values = batch.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type] # an int
    _store(keys, key, batch.entries)
    _store(values, value, batch.entries)
    rows = query[0].transpose(0, 1)  # [rows, heads, dim]
    out = rows.new_zeros(*rows.shape[:2], values.shape[-1])
    n = len(batch.decoding)
    if n:
        mask = batch.mask(0, n, batch.width, sliding_window, query)
        out[:n] = _attend_rows(
            rows[:n], batch.of_decoding(keys), batch.of_decoding(values), mask, scaling
        )
    first = n
    for chunk in batch.chunks:
        end = first + chunk.end - chunk.start
        width = round_up(chunk.end, WIDTH_STEP)
        mask = batch.mask(first, end, width, sliding_window, query)
        seen_keys = keys[chunk.slot, None, :width].transpose(1, 2)
        seen_values = values[chunk.slot, None, :width].transpose(1, 2)
        if is_batch_invariant(query.dtype, query.device):
            shape = (end - first, -1, -1, -1)
            out[first:end] = _attend_rows(
                rows[first:end],
                seen_keys.expand(shape),
                seen_values.expand(shape),
                mask,
                scaling,
            )
        else:
            out[first:end] = _attend_block(
                query[:, :, first:end], seen_keys, seen_values, mask, scaling
            )
        first = end
    return out[None], None


def _store(states: Tensor, new: Tensor, entries: Tensor) -> None:
    """Writes rows [1, heads, rows, dim] to their entries in [slots, tokens, heads, dim]."""
    states.flatten(0, 1).index_copy_(0, entries, new[0, :, : len(entries)].transpose(0, 1))


def _attend_rows(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
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
    """Many query tokens of one sequence: [1, heads, n, dim] over [1, kv_heads, width, dim].

    Heads that share keys are stacked as rows, so that no keys are repeated.
    """
    _, heads, n, dim = query.shape
    group = heads // keys.shape[1]
    grouped = query.reshape(1, keys.shape[1], group * n, dim)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask.repeat(group, 1)[None, None], scale=scaling
    )
    return out.reshape(heads, n, -1).transpose(0, 1)

"""Attention over a KV cache of slots, for token rows of many sequences packed into one batch.

The model sees one batch row ``[1, tokens]``: the tokens of all sequences that a step computes, one
after the other. Everything but attention treats tokens alone; attention is this function, which
transformers' models call through their attention interface.

On a CPU in fp32 the result of a token does not depend on what shares its batch, bit for bit: each
query token is a query block of its own, and the key width is a multiple of ``WIDTH_STEP``, so that
padding adds zeros in whole vectors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

ATTENTION = "rollwire_slots"
"""The name under which transformers knows ``attend``."""

WIDTH_STEP = 16

_IGNORED = frozenset({"dropout", "position_ids", "is_causal", "use_cache", "position_embeddings"})


class UnservableModelError(Exception):
    """The model asks its attention for something that this engine does not compute."""


def round_up(n: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``n``."""
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of the sequence in ``slot``."""

    slot: int
    start: int
    end: int


class KvCache:
    """Keys and values of ``slots`` sequences of up to ``context`` tokens, one pair a layer.

    A layer is made when its first keys arrive, so that their shape is the model's own business.
    Laid out [slot, token, head, dim].
    """

    def __init__(self, slots: int, context: int) -> None:
        self.slots = slots
        self.context = round_up(context, WIDTH_STEP)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; ``key`` and ``value`` are [1, heads, tokens, dim]."""
        if index not in self._layers:
            self._layers[index] = (self._empty(key), self._empty(value))
        return self._layers[index]

    def copy_prefixes(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first ``tokens`` entries of slots ``sources`` to slots ``targets``."""
        for key, value in self._layers.values():
            key[targets, :tokens] = key[sources, :tokens]
            value[targets, :tokens] = value[sources, :tokens]

    def free(self) -> int:
        """Drops the memory, which comes back with the next keys; returns its bytes."""
        freed = sum(t.nbytes for layer in self._layers.values() for t in layer)
        self._layers.clear()
        return freed

    def _empty(self, states: Tensor) -> Tensor:
        _, heads, _, dim = states.shape
        return states.new_zeros(self.slots, self.context, heads, dim)


@dataclass(slots=True)
class Batch:
    """The token rows of one step: first one token of each decoding slot, then chunks of prefill,
    then padding.

    Attributes:
        cache: Where keys and values go and come from.
        decoding: Slots, ascending; [n].
        positions: Of all rows, in their sequences; [rows].
        entries: Where each row but the padding goes in the cache, as slot * context + position.
        chunks: In the order of their rows.
        width: Keys that decoding rows may see, a multiple of WIDTH_STEP.
        batch_invariant: One query block a token, see the module.
    """

    cache: KvCache
    decoding: Tensor
    positions: Tensor
    entries: Tensor
    chunks: list[Chunk]
    width: int
    batch_invariant: bool
    _contiguous: tuple[int, int] | None = None
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n = len(self.decoding)
        if n and int(self.decoding[-1]) - int(self.decoding[0]) == n - 1:
            self._contiguous = (int(self.decoding[0]), int(self.decoding[-1]) + 1)

    def decoding_view(self, states: Tensor) -> Tensor:
        """The entries of the decoding slots, [n, heads, width, dim]; a view where slots adjoin."""
        if self._contiguous is not None:
            low, high = self._contiguous
            return states[low:high, : self.width].transpose(1, 2)
        return states[self.decoding, : self.width].transpose(1, 2)

    def mask(self, first: int, end: int, width: int, window: int | None, like: Tensor) -> Tensor:
        """What rows ``first`` to ``end`` see, as zeros and -inf: [rows, width]."""
        mask = self._masks.get((first, window))
        if mask is None:
            at = self.positions[first:end, None]
            keys = torch.arange(width, device=like.device)
            seen = keys <= at
            if window is not None:
                seen &= keys > at - window
            mask = torch.zeros(seen.shape, dtype=like.dtype, device=like.device)
            mask.masked_fill_(~seen, -torch.inf)
            self._masks[first, window] = mask
        return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface's; the batch knows who sees whom
    scaling: float | None = None,
    sliding_window: int | None = None,
    batch: Batch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stores the keys and values of a batch's rows and lets each row attend to its sequence.

    ``query`` is [1, heads, rows, dim], ``key`` and ``value`` [1, kv_heads, rows, dim]; the result
    is [1, rows, heads, dim]. Raises UnservableModelError when a model wants more than that.
    """
    if batch is None:
        raise UnservableModelError("does not hand its arguments on to its attention")
    unknown = sorted(k for k, v in kwargs.items() if v is not None and k not in _IGNORED)
    if unknown:
        raise UnservableModelError(f"its attention uses {', '.join(unknown)}")

    keys, values = batch.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type] # an int
    stored = len(batch.entries)
    keys.view(-1, *keys.shape[2:]).index_copy_(0, batch.entries, key[0, :, :stored].transpose(0, 1))
    values.view(-1, *values.shape[2:]).index_copy_(
        0, batch.entries, value[0, :, :stored].transpose(0, 1)
    )

    rows = query[0].transpose(0, 1)  # [rows, heads, dim]
    out = rows.new_zeros(rows.shape[0], rows.shape[1], values.shape[-1])
    n = len(batch.decoding)
    if n:
        mask = batch.mask(0, n, batch.width, sliding_window, query)
        out[:n] = _attend_rows(
            rows[:n],
            batch.decoding_view(keys),
            batch.decoding_view(values),
            mask,
            scaling,
            batch_invariant=batch.batch_invariant,
        )
    first = n
    for chunk in batch.chunks:
        end = first + chunk.end - chunk.start
        width = round_up(chunk.end, WIDTH_STEP)
        mask = batch.mask(first, end, width, sliding_window, query)
        chunk_keys = keys[chunk.slot, None, :width].transpose(1, 2)
        chunk_values = values[chunk.slot, None, :width].transpose(1, 2)
        if batch.batch_invariant:
            out[first:end] = _attend_rows(
                rows[first:end],
                chunk_keys.expand(end - first, -1, -1, -1),
                chunk_values.expand(end - first, -1, -1, -1),
                mask,
                scaling,
                batch_invariant=True,
            )
        else:
            out[first:end] = _attend_chunk(
                query[:, :, first:end], chunk_keys, chunk_values, mask, scaling
            )
        first = end
    return out[None], None


def _attend_rows(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
    *,
    batch_invariant: bool,
) -> Tensor:
    """One query token a sequence: [n, heads, dim] over [n, kv_heads, width, dim]."""
    n, heads, dim = rows.shape
    mask = mask[:, None, None]
    if batch_invariant:
        # Packing a group's heads into one block, as below, makes the order of sums depend on width.
        return scaled_dot_product_attention(
            rows[:, :, None], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        ).squeeze(2)
    grouped = rows.reshape(n, keys.shape[1], -1, dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(n, heads, -1)


def _attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Many query tokens of one sequence: [1, heads, n, dim] over [1, kv_heads, width, dim].

    The heads that share keys stand below each other as rows, so that no keys are repeated.
    """
    _, heads, n, dim = query.shape
    group = heads // keys.shape[1]
    grouped = query.reshape(1, keys.shape[1], group * n, dim)
    out = scaled_dot_product_attention(
        grouped, keys, values, attn_mask=mask.repeat(group, 1)[None, None], scale=scaling
    )
    return out.reshape(heads, n, -1).transpose(0, 1)

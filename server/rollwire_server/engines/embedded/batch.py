"""What one step computes: the KV cache, and the tokens of a step packed into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

WIDTH_STEP = 16
"""The number of keys that a row attends to is padded to a multiple of this."""


def round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class KvCache:
    """Keys and values of ``slots`` sequences, [slot, token, head, dim], two tensors a layer.

    A layer's heads and dims are those of the first keys and values that it stores. Entries that
    were never written are zero, and written ones are finite: padding is masked by adding -inf to
    scores, which does not hide NaN.
    """

    def __init__(self, slots: int, context: int, device: torch.device) -> None:
        self.slots = slots
        self.context = round_up(context, WIDTH_STEP)
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def resized(self, slots: int, context: int) -> KvCache:
        """An empty cache of another size for the same layers."""
        other = KvCache(slots, context, self.device)
        for index, (keys, values) in self._layers.items():
            other._layers[index] = (other._zeros(keys), other._zeros(values))
        return other

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer; ``key`` and ``value`` are [1, heads, tokens, dim]."""
        if index not in self._layers:
            by_token = (key.transpose(1, 2), value.transpose(1, 2))
            self._layers[index] = (self._zeros(by_token[0]), self._zeros(by_token[1]))
        return self._layers[index]

    def copy(self, sources: Tensor, targets: Tensor, tokens: int) -> None:
        """Copies the first ``tokens`` entries of slots ``sources`` to slots ``targets``."""
        for states in self._tensors():
            states[targets, :tokens] = states[sources, :tokens]

    def clear(self, slots: Tensor) -> None:
        for states in self._tensors():
            states[slots] = 0

    def free(self) -> int:
        """Frees the memory until ``reallocate``; returns the bytes freed."""
        freed = self.nbytes
        for states in self._tensors():
            states.untyped_storage().resize_(0)
        return freed

    def reallocate(self) -> None:
        for states in self._tensors():
            states.untyped_storage().resize_(states.numel() * states.itemsize)
            states.zero_()

    @property
    def nbytes(self) -> int:
        return sum(states.untyped_storage().nbytes() for states in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [states for layer in self._layers.values() for states in layer]

    def _zeros(self, like: Tensor) -> Tensor:
        """[slots, context, heads, dim], with heads and dim of ``like`` [_, _, heads, dim]."""
        return like.new_zeros(self.slots, self.context, *like.shape[2:])


@dataclass(frozen=True, slots=True)
class PrefixCopy:
    """KV entries of a common prefix that a slot copies from another instead of computing them."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``start`` to ``end`` (exclusive) of the sequence in ``slot``."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: copies first, then the last token of ``decoding``, and chunks."""

    copies: list[PrefixCopy]
    decoding: np.ndarray  # slots, ascending
    chunks: list[PrefillChunk]  # of other slots

    @property
    def slots(self) -> list[int]:
        return [*self.decoding.tolist(), *(chunk.slot for chunk in self.chunks)]

    def only(self, slots: list[int]) -> StepPlan:
        """The part of the plan for some slots. The parts may run in any order."""
        return StepPlan(
            [copy for copy in self.copies if copy.target in slots],
            self.decoding[np.isin(self.decoding, slots)],
            [chunk for chunk in self.chunks if chunk.slot in slots],
        )


@dataclass(slots=True)
class PackedBatch:
    """Token rows: one of each decoding slot, then the prefill chunks, then padding."""

    cache: KvCache
    input_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    entries: Tensor  # of all rows but the padding: slot * context + position
    decoding: Tensor  # slots, ascending
    chunks: list[PrefillChunk]
    width: int  # how many keys decoding rows may see, a multiple of WIDTH_STEP
    _adjacent: slice | None = None  # the decoding slots, if they are adjacent
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def of_decoding(self, states: Tensor) -> Tensor:
        """A layer's keys or values that decoding rows may see, [n, heads, width, dim]."""
        # A view where the slots are adjacent, else a copy.
        chosen = states[self.decoding if self._adjacent is None else self._adjacent, : self.width]
        return chosen.transpose(1, 2)

    @property
    def windows(self) -> set[int | None]:
        """The sliding windows that layers have asked for; None is full attention."""
        return {window for _, window in self._masks}

    def mask(self, first: int, end: int, width: int, window: int | None, like: Tensor) -> Tensor:
        """What rows ``first`` to ``end`` see of their sequence, as 0 and -inf: [rows, width]."""
        mask = self._masks.get((first, window))
        if mask is None:
            at = self.positions[first:end, None]
            keys = torch.arange(width, device=like.device)
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            self._masks[first, window] = mask
        return mask


def pack(
    cache: KvCache,
    tokens: np.ndarray,
    decoding: np.ndarray,
    last: np.ndarray,
    chunks: list[PrefillChunk],
    row_step: int,
) -> tuple[PackedBatch, np.ndarray, np.ndarray]:
    """Packs token ``last`` of each slot in ``decoding`` (ascending), and ``chunks``.

    ``tokens`` is [slots, context]. The batch is padded to a multiple of ``row_step`` rows. Also
    returns the slot and the position of each row but the padding.
    """
    slots = np.concatenate([decoding, *(np.full(c.end - c.start, c.slot) for c in chunks)])
    positions = np.concatenate([last, *(np.arange(c.start, c.end) for c in chunks)])
    rows = len(slots)
    host = np.zeros((3, round_up(rows, row_step)), dtype=np.int64)
    host[0, :rows] = tokens[slots, positions]
    host[1, :rows] = positions
    host[2, :rows] = slots * cache.context + positions
    device = torch.from_numpy(host).to(cache.device)
    n = len(decoding)
    adjacent = n > 0 and decoding[-1] - decoding[0] == n - 1
    batch = PackedBatch(
        cache=cache,
        input_ids=device[0],
        positions=device[1],
        entries=device[2, :rows],
        decoding=torch.from_numpy(decoding).to(cache.device),
        chunks=chunks,
        width=round_up(int(last.max(initial=0)) + 1, WIDTH_STEP),
        _adjacent=slice(int(decoding[0]), int(decoding[-1]) + 1) if adjacent else None,
    )
    return batch, slots, positions

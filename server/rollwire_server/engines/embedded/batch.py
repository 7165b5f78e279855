"""What one step computes: which tokens of which sequences, and those tokens packed into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from rollwire_server.engines.embedded.kv_cache import WIDTH_STEP, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from rollwire_server.engines.embedded.kv_cache import KvCache


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
    """What one step computes.

    Attributes:
        copies: Done before anything is computed.
        decoding: Slots whose last token is computed, ascending.
        chunks: Tokens of other slots.
    """

    copies: list[PrefixCopy]
    decoding: np.ndarray
    chunks: list[PrefillChunk]

    @property
    def slots(self) -> list[int]:
        return [*self.decoding.tolist(), *(chunk.slot for chunk in self.chunks)]

    def halves(self) -> tuple[StepPlan, StepPlan]:
        """The plan cut in two by slots. The result does not depend on which half runs first."""
        slots = self.slots
        at, n = len(slots) // 2, len(self.decoding)
        first = set(slots[:at])
        return (
            StepPlan(
                [copy for copy in self.copies if copy.target in first],
                self.decoding[:at],
                self.chunks[: max(0, at - n)],
            ),
            StepPlan(
                [copy for copy in self.copies if copy.target not in first],
                self.decoding[at:],
                self.chunks[max(0, at - n) :],
            ),
        )


@dataclass(slots=True)
class PackedBatch:
    """Token rows: one of each decoding slot, then the prefill chunks, then padding.

    Attributes:
        cache: Where keys and values are read and written.
        input_ids, positions: Of all rows; [rows].
        entries: Where each row but the padding is stored in the cache, as slot * context +
            position.
        decoding: Slots, ascending; [n].
        chunks: In the order of their rows.
        width: How many keys decoding rows may see, a multiple of WIDTH_STEP.
    """

    cache: KvCache
    input_ids: Tensor
    positions: Tensor
    entries: Tensor
    decoding: Tensor
    chunks: list[PrefillChunk]
    width: int
    _adjacent: slice | None = None  # the decoding slots, if they are adjacent
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def of_decoding(self, states: Tensor) -> Tensor:
        """A layer's keys or values that decoding rows may see, [n, heads, width, dim].

        A view where the slots are adjacent, else a copy.
        """
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

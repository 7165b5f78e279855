"""The token rows of one step, packed: of many sequences, one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from rollwire_server.engines.embedded.kv_cache import KvCache

WIDTH_STEP = 16
"""Keys that a row may see are padded to a multiple of this."""


def round_up(n: int, step: int) -> int:
    """The least multiple of ``step`` that is not below ``n``."""
    return -(-n // step) * step


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens ``start`` to ``end`` of the sequence in ``slot``."""

    slot: int
    start: int
    end: int


@dataclass(slots=True)
class Batch:
    """Token rows: first one of each decoding slot, then chunks of prefill, then padding.

    Attributes:
        cache: Where keys and values go to and come from.
        input_ids, positions: Of all rows; [rows].
        entries: Where each row but the padding goes in the cache, as slot * context + position.
        decoding: Slots, ascending; [n].
        chunks: In the order of their rows.
        width: Keys that decoding rows may see, a multiple of WIDTH_STEP.
    """

    cache: KvCache
    input_ids: Tensor
    positions: Tensor
    entries: Tensor
    decoding: Tensor
    chunks: list[Chunk]
    width: int
    _adjoining: slice | None = None
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def of_decoding(self, states: Tensor) -> Tensor:
        """What decoding rows may see of a layer's keys or values: [n, heads, width, dim], a view
        where the slots adjoin.
        """
        chosen = states[self.decoding if self._adjoining is None else self._adjoining, : self.width]
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
    chunks: list[Chunk],
    row_step: int,
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """A batch of tokens ``last`` of slots ``decoding`` (ascending), and of ``chunks``.

    ``tokens`` is [slots, context]. Returns the slots and positions of its rows, too; with padding
    there is a multiple of ``row_step`` of them.
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
    adjoin = n > 0 and decoding[-1] - decoding[0] == n - 1
    batch = Batch(
        cache=cache,
        input_ids=device[0],
        positions=device[1],
        entries=device[2, :rows],
        decoding=torch.from_numpy(decoding).to(cache.device),
        chunks=chunks,
        width=round_up(int(last.max(initial=0)) + 1, WIDTH_STEP),
        _adjoining=slice(int(decoding[0]), int(decoding[-1]) + 1) if adjoin else None,
    )
    return batch, slots, positions

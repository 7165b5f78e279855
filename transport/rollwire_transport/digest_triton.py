"""The sums of runs of bytes (see ``digest``) in one pass over a GPU's memory, and one launch.

torch alone writes and reads each word anew at every step of the mixing, some fifteen times, and
starts each of these steps for each run.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# A program's share: enough words to be worth its start, few enough to keep every SM busy with the
# smallest bucket.
_BLOCK, _ROUNDS, _WARPS = 1024, 8, 4
_CHUNK_BYTES = _BLOCK * _ROUNDS * 8


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are summed.

    Attributes:
        offset: Where they begin, in bytes from the base; a multiple of 8 as an address.
        length: How many they are. Those that fill up the last word's 8 bytes are read, too.
        first: The index of their first word in its tensor.
    """

    offset: int
    length: int
    first: int


class Runs:
    """Runs on one GPU, whose sums can be had again and again.

    Args:
        base: uint8 there; ``offset`` counts from its address.
        runs: One or more, whose memory has to stay.
        index: That of the bucket whose runs they are, for its digest.
    """

    def __init__(self, base: Tensor, runs: Sequence[Run], index: int = 0) -> None:
        self._base = base
        self._count = len(runs)
        rows = np.array([(r.offset, r.length, r.first, 0) for r in runs], dtype=np.int64)
        chunks = -(-rows[:, 1] // _CHUNK_BYTES)
        rows[:, 3] = np.cumsum(chunks) - chunks
        owners = np.repeat(np.arange(len(runs), dtype=np.int64), chunks)
        self._chunks = len(owners)
        table = np.concatenate([[index + 1, len(runs)], rows.ravel(), owners])
        self._table = _upload(torch.from_numpy(table), base.device)

    def sums(self, *, digest: bool) -> Tensor:
        """The digest of the bucket, if it is wanted, and the sum of each run: int64, shape
        (1 + runs,), on their device, without waiting for it.
        """
        device = self._table.device
        sums = torch.zeros(1 + self._count, dtype=torch.int64, device=device)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            if self._chunks:
                _sum_chunks[(self._chunks,)](
                    self._base, self._table, sums, _BLOCK, _ROUNDS, num_warps=_WARPS
                )
            if digest:
                _fold[(1,)](self._table, sums, num_warps=1)
        return sums


def _upload(table: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return table
    # Pinned, or else the copy would wait for all that was asked of the stream before.
    return table.pin_memory().to(device, non_blocking=True)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# The table: the bucket's index + 1; the number of runs; for each its offset, length, first index
# and first chunk; for each chunk its run.
@triton.jit  # type: ignore[untyped-decorator]
def _sum_chunks(base, table, sums, block: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk = tl.program_id(0).to(tl.int64)
    run = tl.load(table + 2 + 4 * tl.load(table + 1) + chunk)
    row = table + 2 + 4 * run
    before = (chunk - tl.load(row + 3)) * (block * rounds)  # of the run's words
    left = tl.load(row + 1) - 8 * before
    words = (base + tl.load(row) + 8 * before).to(tl.pointer_type(tl.int64))
    lanes = tl.arange(0, block)
    keys = (tl.load(row + 2) + before + lanes).to(tl.uint64) * 0x9E3779B97F4A7C15
    total = tl.zeros((block,), tl.uint64)
    if left >= 8 * block * rounds:
        for _ in tl.static_range(rounds):
            total += _mix(tl.load(words + lanes).to(tl.uint64, bitcast=True) + keys)
            words += block
            keys += (block * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    else:
        for _ in range(rounds):
            inside = 8 * lanes < left
            word = tl.load(words + lanes, mask=inside, other=0).to(tl.uint64, bitcast=True)
            spare = tl.where(inside, tl.maximum(8 * lanes + 8 - left, 0), 0)  # bytes of the last
            spare = (8 * spare).to(tl.uint64)
            total += tl.where(inside, _mix(((word << spare) >> spare) + keys), 0)
            words += block
            left -= 8 * block
            keys += (block * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    tl.atomic_add(sums + 1 + run, tl.sum(total.to(tl.int64, bitcast=True), 0), sem="relaxed")


@triton.jit
def _fold(table, sums):  # type: ignore[no-untyped-def]
    value = _mix(tl.load(table).to(tl.uint64, bitcast=True))
    for j in range(tl.load(table + 1)):
        total = tl.load(sums + 1 + j).to(tl.uint64, bitcast=True)
        value = _mix((value ^ total) + 0x9E3779B97F4A7C15)
    tl.store(sums, value.to(tl.int64, bitcast=True))

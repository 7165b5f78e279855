"""Sums of byte ranges and digests of buckets (see ``_digest``) by one launch that reads the memory
once.

torch alone reads and writes each word at every step of the mixing, some fifteen times, and launches
each of these steps for each range.
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

# A program's share: enough words to be worth its start, few enough that the smallest bucket keeps
# every SM busy.
_BLOCK, _ROUNDS, _WARPS = 1024, 16, 4
_CHUNK_BYTES = _BLOCK * _ROUNDS * 8

_META, _ROW = 5, 4  # words of a group's entry and of a range's


@dataclass(frozen=True, slots=True)
class ByteRange:
    offset: int  # in bytes from the base; as an address a multiple of 8
    length: int  # the last word's 8 bytes are all read
    first: int  # the index of the first word in its tensor


class GroupedSums:
    """Computes sums of groups of byte ranges on one GPU; one launch of a group at a time.

    ``indices`` has for each group the index of its bucket, on which its digest depends.
    """

    def __init__(
        self, groups: Sequence[Sequence[ByteRange]], indices: Sequence[int], device: torch.device
    ) -> None:
        self._device = device
        counts = np.array([len(ranges) for ranges in groups])
        begins = np.cumsum(counts) - counts
        rows = np.array(
            [(r.offset, r.length, r.first, 0) for group in groups for r in group], dtype=np.int64
        )
        chunks = -(-rows[:, 1] // _CHUNK_BYTES)
        before = np.cumsum(chunks) - chunks  # chunks of all ranges before this one
        rows[:, 3] = before - np.repeat(before[begins], counts)
        owners = np.repeat(np.arange(len(rows)) - np.repeat(begins, counts), chunks)
        rows_at = len(groups) * _META + begins * _ROW
        owners_at = len(groups) * _META + rows.size + before[begins]
        metas = [np.array(indices) + 1, counts, rows_at, owners_at, np.zeros_like(counts)]
        table = np.concatenate([np.column_stack(metas).ravel(), rows.ravel(), owners])
        self._table = torch.from_numpy(table.astype(np.int64)).to(device)
        self._programs = np.add.reduceat(chunks, begins).tolist()

    def sum(self, number: int, base: Tensor, out: Tensor, *, digest: bool) -> None:
        """Adds the sum of each range of a group to ``out``, without waiting for the device.

        Offsets count from ``base``. The sums begin at the fifth word of ``out``; the fourth is the
        digest of the bucket.
        """
        if not (programs := self._programs[number]):
            return
        on_gpu = self._device.type == "cuda"
        with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
            _sum_chunks[(programs,)](
                base, self._table, number * _META, out, digest, _BLOCK, _ROUNDS, num_warps=_WARPS
            )


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


# The table: for each group the bucket's index + 1, the number of ranges, where its rows and the
# owners of its chunks are, and how many programs are done; for each range its offset, length, first
# index, and first chunk in its group; for each chunk its range in its group.
@triton.jit(do_not_specialize=["at"])  # type: ignore[untyped-decorator]
def _sum_chunks(  # type: ignore[no-untyped-def]
    base, table, at, out, digest: tl.constexpr, block: tl.constexpr, rounds: tl.constexpr
):
    meta = table + at
    chunk = tl.program_id(0).to(tl.int64)
    run = tl.load(table + tl.load(meta + 3) + chunk)
    row = table + tl.load(meta + 2) + 4 * run
    before = (chunk - tl.load(row + 3)) * (block * rounds)  # of the range's words
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
    tl.atomic_add(out + 4 + run, tl.sum(total.to(tl.int64, bitcast=True), 0), sem="relaxed")
    if digest:
        done = tl.atomic_add(meta + 4, 1, sem="acq_rel")
        if done == tl.num_programs(0) - 1:  # all sums are there
            tl.store(meta + 4, 0)
            value = _mix(tl.load(meta).to(tl.uint64, bitcast=True))
            for j in range(tl.load(meta + 1)):
                total_j = tl.load(out + 4 + j, volatile=True).to(tl.uint64, bitcast=True)
                value = _mix((value ^ total_j) + 0x9E3779B97F4A7C15)
            tl.store(out + 3, value.to(tl.int64, bitcast=True))

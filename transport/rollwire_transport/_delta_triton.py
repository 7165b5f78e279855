"""Deltas on a GPU, in few launches (see ``_delta``): torch alone takes forty for each bucket, and
waits three times.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from rollwire_transport._digest_triton import _mix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_BLOCK, _WARPS = 4096, 8  # 16-bit words that a program compares
_CHUNK = 1024  # changed words that a program sums or writes


class BucketEncoder:
    """Encodes buckets of up to ``largest`` bytes on one device, one after the other.

    It takes one and a half times the memory of such a bucket.
    """

    def __init__(self, largest: int, device: torch.device) -> None:
        blocks = -(-largest // (2 * _BLOCK))
        self._values = torch.empty(blocks * _BLOCK, dtype=torch.int16, device=device)
        self._gaps = torch.empty(blocks * _BLOCK, dtype=torch.uint8, device=device)
        # Of each block: changed words, gap bytes after the first one, the first and the last
        # changed word; then where its words and gaps begin, and its first gap.
        self._blocks = torch.empty(7, blocks, dtype=torch.int32, device=device)

    def encode(self, old: Tensor, new: Tensor, out: Tensor) -> None:
        """Writes a delta to ``out``, as far as there is room, and makes ``old`` equal to ``new``.

        All are uint8. The first 16 bytes of ``out`` tell how long the delta is. Waits for nothing.
        """
        words = new.numel() // 2
        blocks = -(-words // _BLOCK)
        table = self._blocks
        with _on(new.device):
            _compare[(blocks,)](
                old.view(torch.int16), new.view(torch.int16), words,
                table, table.stride(0), self._values, self._gaps, _BLOCK, num_warps=_WARPS,
            )  # fmt: skip
            _place[(1,)](table, table.stride(0), blocks, out.view(torch.int64), 1024)
            _compact[(blocks,)](
                table, table.stride(0), self._values, self._gaps,
                out, out.view(torch.int64), out.numel(), _BLOCK, num_warps=_WARPS,
            )  # fmt: skip


class GpuChangedRuns:
    """Runs of changed words of 16 bits, each in a tensor of its own, on one device.

    Args:
        positions: int32, of all runs: positions in their buckets, ascending in each run.
        bits: int16, the new bits of these words.
        ends: Where each run ends among them.
        shifts: What is added to a run's positions, to get those in its tensor.
        tensors: The bytes of each run's tensor: whole words of 64 bits.
    """

    def __init__(
        self,
        positions: Tensor,
        bits: Tensor,
        ends: Sequence[int],
        shifts: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> None:
        self._positions = positions
        self._bits = bits
        self._tensors = tensors  # stay where they are
        end = np.array(ends, dtype=np.int64)
        begin = np.concatenate(([0], end[:-1]))
        chunks = -(-(end - begin) // _CHUNK)
        before = np.cumsum(chunks) - chunks
        base = tensors[0].data_ptr()
        offsets = np.array([tensor.data_ptr() - base for tensor in tensors], dtype=np.int64)
        rows = np.column_stack([begin, end, np.array(shifts, dtype=np.int64), offsets, before])
        owners = np.repeat(np.arange(len(ends)), chunks)
        table = np.concatenate([rows.ravel(), owners]).astype(np.int64)
        self._table = torch.from_numpy(table).to(positions.device)
        self._runs = len(ends)
        self._programs = int(chunks.sum())

    def sums(self) -> Tensor:
        """By how much each run changes the sum of its tensor (int64)."""
        out = torch.zeros(self._runs, dtype=torch.int64, device=self._positions.device)
        with _on(out.device):
            _sum_changes[(self._programs,)](
                self._tensors[0], self._table, self._runs, self._positions, self._bits, out, _CHUNK
            )
        return out

    def apply(self) -> None:
        """Writes the new bits; waits for nothing."""
        with _on(self._positions.device):
            _apply_changes[(self._programs,)](
                self._tensors[0], self._table, self._runs, self._positions, self._bits, _CHUNK
            )


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit
def _last_two(last_a, before_a, last_b, before_b):  # type: ignore[no-untyped-def]
    before = tl.where(last_b >= 0, tl.where(before_b >= 0, before_b, last_a), before_a)
    return tl.where(last_b >= 0, last_b, last_a), before


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["words", "stride"])  # type: ignore[untyped-decorator]
def _compare(old, new, words, table, stride, values, gaps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    begin = number * block
    inside = begin + lanes < words
    bits = tl.load(new + begin + lanes, mask=inside, other=0)
    changed = inside & (tl.load(old + begin + lanes, mask=inside, other=0) != bits)
    count = tl.sum(changed.to(tl.int32), 0)
    tl.store(table + number, count)
    if count > 0:
        tl.store(old + begin + lanes, bits, mask=changed)
        rank = tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(values + begin + rank, bits, mask=changed)
        here = tl.where(changed, lanes, -1)
        none = tl.full((block,), -1, tl.int32)
        last, before = tl.associative_scan((here, none), 0, _last_two)
        follows = changed & (before >= 0)
        gap = lanes - before - 1
        skips = tl.where(follows, gap // 255, 0)
        ends = tl.cumsum(tl.where(follows, skips + 1, 0), 0) - 1
        tl.store(gaps + begin + ends, (gap - skips * 255).to(tl.uint8), mask=follows)
        for skip in range(tl.max(skips, 0)):
            tl.store(gaps + begin + ends - 1 - skip, 255, mask=follows & (skip < skips))
        tl.store(table + stride + number, tl.max(ends, 0) + 1)
        tl.store(table + 2 * stride + number, begin + tl.min(tl.where(changed, lanes, block), 0))
        tl.store(table + 3 * stride + number, begin + tl.max(last, 0))
    else:
        tl.store(table + stride + number, 0)
        tl.store(table + 2 * stride + number, 0)
        tl.store(table + 3 * stride + number, -1)


@triton.jit(do_not_specialize=["stride", "blocks"])  # type: ignore[untyped-decorator]
def _place(table, stride, blocks, head, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    words = 0
    gap_bytes = 0
    last = -1
    for start in range(0, blocks, tile):
        at = start + tl.arange(0, tile)
        inside = at < blocks
        count = tl.load(table + at, mask=inside, other=0)
        inner = tl.load(table + stride + at, mask=inside, other=0)
        first = tl.load(table + 2 * stride + at, mask=inside, other=0)
        before = tl.load(table + 3 * stride + at - 1, mask=inside & (at > 0), other=-1)
        before = tl.maximum(tl.associative_scan(before, 0, _maximum), last)
        gap = tl.where(count > 0, first - before - 1, 0)
        taken = tl.where(count > 0, gap // 255 + 1 + inner, 0)
        tl.store(table + 4 * stride + at, words + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(table + 5 * stride + at, gap_bytes + tl.cumsum(taken, 0) - taken, mask=inside)
        tl.store(table + 6 * stride + at, gap, mask=inside)
        words += tl.sum(count, 0)
        gap_bytes += tl.sum(taken, 0)
        here = tl.load(table + 3 * stride + at, mask=inside, other=-1)
        last = tl.maximum(last, tl.max(here, 0))
    tl.store(head, gap_bytes)
    tl.store(head + 1, words)


@triton.jit(do_not_specialize=["stride", "room"])  # type: ignore[untyped-decorator]
def _compact(table, stride, values, gaps, out, head, room, block: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    count = tl.load(table + number)
    if count > 0:
        lanes = tl.arange(0, block)
        at = 16 + 2 * (tl.load(table + 4 * stride + number).to(tl.int64) + lanes)
        some = lanes < count
        bits = tl.load(values + number * block + lanes, mask=some, other=0)
        tl.store(out.to(tl.pointer_type(tl.int16)) + at // 2, bits, mask=some & (at + 2 <= room))
        begin = 16 + 2 * tl.load(head + 1) + tl.load(table + 5 * stride + number)
        gap = tl.load(table + 6 * stride + number)
        skips = gap // 255
        for start in range(0, skips, block):
            at = begin + start + lanes
            tl.store(out + at, 255, mask=(start + lanes < skips) & (at < room))
        begin += skips
        tl.store(out + begin, (gap - skips * 255).to(tl.uint8), mask=begin < room)
        some = lanes < tl.load(table + stride + number)
        inner = tl.load(gaps + number * block + lanes, mask=some, other=0)
        at = begin + 1 + lanes
        tl.store(out + at, inner, mask=some & (at < room))


# The table: for each run where it begins and ends, its shift, the offset of its tensor, and its
# first chunk; then the run of each chunk.
@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]
def _sum_changes(base, table, runs, positions, bits, out, block: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk = tl.program_id(0).to(tl.int64)
    run = tl.load(table + 5 * runs + chunk)
    row = table + 5 * run
    begin = tl.load(row)
    end = tl.load(row + 1)
    shift = tl.load(row + 2)
    tensor = (base + tl.load(row + 3)).to(tl.pointer_type(tl.int64))
    at = begin + (chunk - tl.load(row + 4)) * block + tl.arange(0, block)
    word = (tl.load(positions + at, mask=at < end, other=0) + shift) >> 2
    before = (tl.load(positions + at - 1, mask=(at < end) & (at > begin), other=0) + shift) >> 2
    # Several changed words of 16 bits may lie in one of 64: the first one counts for all.
    counts = (at < end) & ((at == begin) | (before != word))
    mask = tl.zeros((block,), tl.int64)
    merged = tl.zeros((block,), tl.int64)
    for k in tl.static_range(4):
        inside = counts & (at + k < end)
        position = tl.load(positions + at + k, mask=inside, other=0) + shift
        same = inside & (position >> 2 == word)
        moved = (position & 3) * 16
        new_bits = tl.load(bits + at + k, mask=same, other=0).to(tl.int64) & 0xFFFF
        mask |= tl.where(same, tl.full((block,), 0xFFFF, tl.int64) << moved, 0)
        merged |= tl.where(same, new_bits << moved, 0)
    old = tl.load(tensor + word, mask=counts, other=0)
    new = (old & ~mask) | merged
    key = word.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    change = _mix(new.to(tl.uint64, bitcast=True) + key) - _mix(
        old.to(tl.uint64, bitcast=True) + key
    )
    change = tl.where(counts, change, 0).to(tl.int64, bitcast=True)
    tl.atomic_add(out + run, tl.sum(change, 0), sem="relaxed")


@triton.jit(do_not_specialize=["runs"])  # type: ignore[untyped-decorator]
def _apply_changes(base, table, runs, positions, bits, block: tl.constexpr):  # type: ignore[no-untyped-def]
    chunk = tl.program_id(0).to(tl.int64)
    row = table + 5 * tl.load(table + 5 * runs + chunk)
    end = tl.load(row + 1)
    tensor = (base + tl.load(row + 3)).to(tl.pointer_type(tl.int16))
    at = tl.load(row) + (chunk - tl.load(row + 4)) * block + tl.arange(0, block)
    position = tl.load(positions + at, mask=at < end, other=0) + tl.load(row + 2)
    tl.store(tensor + position, tl.load(bits + at, mask=at < end, other=0), mask=at < end)

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
    from torch import Tensor

    from rollwire_transport._changed_runs import ChangedRuns

_BLOCK = 4096  # 64-bit words that a program compares
_TILE = 256  # of those that differ, at a time
_CHUNK = 1024  # changed 16-bit words that a program encodes, sums or writes
_GAPS = 4096  # that a program decodes


class GpuBucketEncoder:
    """Encodes so many buckets into one memory, one after the other. It waits for nothing: where the
    next delta begins is known to the device only.

    Buckets have up to ``largest`` bytes, and up to ``most`` of their words may change. Beside
    ``memory`` it takes about twice the memory of such a bucket.
    """

    def __init__(self, memory: Tensor, buckets: int, largest: int, most: int) -> None:
        words = -(-largest // (8 * _BLOCK)) * _BLOCK

        def room(count: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(count, dtype=dtype, device=memory.device)

        # The 64-bit words that differ, at the begin of each block's room: which ones, and the new
        # bits, of which those that changed are set in the third.
        self._lanes = room(words, torch.int16)
        self._differences = room(words, torch.int64)
        self._counts = room(2 * (words // _BLOCK), torch.int32)
        self._positions = room(most, torch.int32)
        self._gap_bytes = room(_chunks(most), torch.int32)
        self._memory = memory
        # Where the next delta begins, and where the memory ends.
        self._place = torch.tensor([0, memory.numel()]).to(memory.device)
        # Rows of 32 bytes: Triton compiles anew for memory with another alignment.
        self._results = torch.zeros(buckets, 4, dtype=torch.int64, device=memory.device)
        self._done = 0

    def encode(self, old: Tensor, new: Tensor, most: int, bucket_bytes: int) -> None:
        """See ``BucketEncoder``."""
        words = new.numel() // 8
        blocks = -(-words // _BLOCK)
        counts = self._counts[: 2 * blocks].view(2, blocks)
        chunks = _chunks(most)
        gap_bytes = self._gap_bytes[:chunks]
        place, memory = self._place, self._memory
        with _on(new.device):
            _compare[(blocks,)](
                old.view(torch.int64), new.view(torch.int64), words,
                self._lanes, self._differences, counts, blocks, _BLOCK,
            )  # fmt: skip
            ends = counts[1].cumsum(0, dtype=torch.int32)
            _list[(blocks,)](
                new.view(torch.int16), self._lanes, self._differences, counts, ends,
                self._positions, most, place, memory, _BLOCK, _TILE,
            )  # fmt: skip
            _measure_gaps[(chunks,)](self._positions, ends, blocks, most, gap_bytes, _CHUNK)
            gap_ends = gap_bytes.cumsum(0, dtype=torch.int32)
            _write_gaps[(chunks,)](
                self._positions, ends, blocks, most, gap_bytes, gap_ends, place, memory, _CHUNK,
            )  # fmt: skip
            _finish[(1,)](
                ends, blocks, most, gap_ends, chunks, place, memory, bucket_bytes,
                self._results[self._done],
            )  # fmt: skip
        self._done += 1

    def results(self) -> list[tuple[Tensor | None, int]]:
        """Waits for the device."""
        return [
            (self._memory[begin : begin + size] if size else None, count)
            for begin, size, count, _ in self._results[: self._done].tolist()
        ]


def _chunks(most: int) -> int:
    return max(-(-most // _CHUNK), 1)


def decode(delta: Tensor, gap_bytes: int, count: int) -> tuple[Tensor, Tensor]:
    """The positions of changed words (int32), and how many there are and the last one + 1 (int64).

    If there are not ``count``, the positions are of no use.
    """
    gaps = delta[16 + 2 * count :]
    positions = torch.zeros(count, dtype=torch.int32, device=delta.device)
    totals = torch.zeros(2, dtype=torch.int64, device=delta.device)
    if gap_bytes:
        chunks = -(-gap_bytes // _GAPS)
        steps = torch.empty(2, chunks, dtype=torch.int64, device=delta.device)
        with _on(delta.device):
            _measure_steps[(chunks,)](gaps, gap_bytes, steps, chunks, _GAPS)
            ends = steps.cumsum(1)
            _walk[(chunks,)](gaps, gap_bytes, steps, ends, chunks, positions, count, _GAPS)
            totals = ends[:, -1]
    return positions, totals


class GpuRunWriter:
    """Writes changed words where they belong, in one launch."""

    def __init__(self, runs: ChangedRuns) -> None:
        self._runs = runs  # whose tensors stay where they are
        end = np.array(runs.ends, dtype=np.int64)
        begin = np.concatenate(([0], end[:-1]))
        chunks = -(-(end - begin) // _CHUNK)
        before = np.cumsum(chunks) - chunks
        base = runs.tensors[0].data_ptr()
        offsets = np.array([tensor.data_ptr() - base for tensor in runs.tensors], dtype=np.int64)
        rows = np.column_stack([begin, end, np.array(runs.shifts, dtype=np.int64), offsets, before])
        owners = np.repeat(np.arange(len(runs.ends)), chunks)
        table = np.concatenate([rows.ravel(), owners]).astype(np.int64)
        self._table = torch.from_numpy(table).to(runs.positions.device)
        self._programs = int(chunks.sum())

    def sums(self) -> Tensor:
        """By how much each run changes the sum of its tensor (int64)."""
        runs, count = self._runs, len(self._runs.ends)
        out = torch.zeros(count, dtype=torch.int64, device=runs.positions.device)
        with _on(out.device):
            _sum_changes[(self._programs,)](
                runs.tensors[0], self._table, count, runs.positions, runs.bits, out, _CHUNK
            )
        return out

    def apply(self) -> None:
        """Writes the new bits; waits for nothing."""
        runs = self._runs
        with _on(runs.positions.device):
            _apply_changes[(self._programs,)](
                runs.tensors[0], self._table, len(runs.ends), runs.positions, runs.bits, _CHUNK
            )


def _on(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit(do_not_specialize=["words", "blocks"])  # type: ignore[untyped-decorator]
def _compare(  # type: ignore[no-untyped-def]
    old, new, words, lanes_out, differences, counts, blocks, block: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    at = number * block + lanes
    inside = at < words
    bits = tl.load(new + at, mask=inside, other=0)
    difference = tl.load(old + at, mask=inside, other=0) ^ bits
    differs = difference != 0
    rank = tl.cumsum(differs.to(tl.int32), 0) - 1
    tl.store(lanes_out + number * block + rank, lanes.to(tl.int16), mask=differs)
    tl.store(differences + number * block + rank, difference, mask=differs)
    tl.store(old + at, bits, mask=differs)
    changed = tl.zeros((block,), tl.int32)
    for k in tl.static_range(4):
        changed += (((difference >> 16 * k) & 0xFFFF) != 0).to(tl.int32)
    tl.store(counts + number, tl.sum(differs.to(tl.int32), 0))
    tl.store(counts + blocks + number, tl.sum(changed, 0))


@triton.jit(do_not_specialize=["most"])  # type: ignore[untyped-decorator]
def _list(  # type: ignore[no-untyped-def]
    new, lanes_in, differences, counts, ends, positions, most, place, memory,
    block: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    differing = tl.load(counts + number)
    done = tl.load(ends + number)
    done -= tl.load(counts + tl.num_programs(0) + number)
    out = (memory + tl.load(place) + 16).to(tl.pointer_type(tl.int16))
    left = tl.load(place + 1) - tl.load(place) - 16
    lanes = tl.arange(0, 4 * tile)
    for start in range(0, differing, tile):
        at = start + lanes // 4
        some = at < differing
        difference = tl.load(differences + number * block + at, mask=some, other=0)
        changed = ((difference >> 16 * (lanes % 4)) & 0xFFFF) != 0
        word = tl.load(lanes_in + number * block + at, mask=some, other=0).to(tl.int32)
        position = number.to(tl.int32) * (4 * block) + 4 * word + lanes % 4
        rank = done + tl.cumsum(changed.to(tl.int32), 0) - 1
        tl.store(positions + rank, position, mask=changed & (rank < most))
        bits = tl.load(new + position, mask=changed, other=0)
        tl.store(out + rank, bits, mask=changed & (2 * rank + 2 <= left))
        done += tl.sum(changed.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _gaps_of(positions, count, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    some = at < count
    before = tl.load(positions + at - 1, mask=some & (at > 0), other=-1)
    gap = tl.load(positions + at, mask=some, other=0) - before - 1
    return some, tl.where(some, gap, 0)


@triton.jit(do_not_specialize=["blocks", "most"])  # type: ignore[untyped-decorator]
def _measure_gaps(positions, ends, blocks, most, gap_bytes, chunk: tl.constexpr):  # type: ignore[no-untyped-def]
    count = tl.load(ends + blocks - 1)
    taken = 0
    if (count <= most) & (tl.program_id(0) * chunk < count):
        some, gap = _gaps_of(positions, count, chunk)
        taken = tl.sum(tl.where(some, gap // 255 + 1, 0), 0)
    tl.store(gap_bytes + tl.program_id(0), taken)


@triton.jit(do_not_specialize=["blocks", "most"])  # type: ignore[untyped-decorator]
def _write_gaps(  # type: ignore[no-untyped-def]
    positions, ends, blocks, most, gap_bytes, gap_ends, place, memory, chunk: tl.constexpr
):
    number = tl.program_id(0)
    count = tl.load(ends + blocks - 1)
    if (count <= most) & (number * chunk < count):
        some, gap = _gaps_of(positions, count, chunk)
        skips = gap // 255
        out = memory + tl.load(place)
        left = tl.load(place + 1) - tl.load(place)
        first = 16 + 2 * count + tl.load(gap_ends + number) - tl.load(gap_bytes + number)
        at = first + tl.cumsum(tl.where(some, skips + 1, 0), 0) - 1
        tl.store(out + at, (gap - skips * 255).to(tl.uint8), mask=some & (at < left))
        for skip in range(tl.max(skips, 0)):
            before = at - 1 - skip
            tl.store(out + before, 255, mask=some & (skip < skips) & (before < left))


@triton.jit(do_not_specialize=["blocks", "most", "chunks", "bucket_bytes"])
def _finish(  # type: ignore[no-untyped-def]
    ends, blocks, most, gap_ends, chunks, place, memory, bucket_bytes, result
):
    count = tl.load(ends + blocks - 1).to(tl.int64)
    gap_bytes = tl.load(gap_ends + chunks - 1).to(tl.int64)
    size = 16 + 2 * count + gap_bytes
    first = tl.load(place)
    is_sent = (count <= most) & (size < bucket_bytes) & (first + size <= tl.load(place + 1))
    size = tl.where(is_sent, size, 0)
    head = (memory + first).to(tl.pointer_type(tl.int64))
    tl.store(head, gap_bytes, mask=is_sent)
    tl.store(head + 1, count, mask=is_sent)
    tl.store(place, first + (size + 15) // 16 * 16)
    tl.store(result, first)
    tl.store(result + 1, size)
    tl.store(result + 2, count)


@triton.jit  # type: ignore[untyped-decorator]
def _steps_of(gaps, gap_bytes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    gap = tl.load(gaps + at, mask=at < gap_bytes, other=255).to(tl.int32)
    changed = (gap != 255).to(tl.int32)
    return changed, tl.where(at < gap_bytes, gap + changed, 0)


@triton.jit(do_not_specialize=["gap_bytes", "chunks"])  # type: ignore[untyped-decorator]
def _measure_steps(gaps, gap_bytes, steps, chunks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    changed, step = _steps_of(gaps, gap_bytes, block)
    tl.store(steps + tl.program_id(0), tl.sum(changed, 0).to(tl.int64))
    tl.store(steps + chunks + tl.program_id(0), tl.sum(step, 0).to(tl.int64))


@triton.jit(do_not_specialize=["gap_bytes", "chunks", "count"])  # type: ignore[untyped-decorator]
def _walk(gaps, gap_bytes, steps, ends, chunks, positions, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    changed, step = _steps_of(gaps, gap_bytes, block)
    number = tl.program_id(0)
    rank = tl.load(ends + number) - tl.load(steps + number) + tl.cumsum(changed, 0) - 1
    before = tl.load(ends + chunks + number) - tl.load(steps + chunks + number)
    position = (before + tl.cumsum(step, 0) - 1).to(tl.int32)
    tl.store(positions + rank, position, mask=(changed != 0) & (rank < count))


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

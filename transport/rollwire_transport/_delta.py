"""Deltas: what differs between two versions of the same tensors, bit for bit.

**Delta of a bucket.** The bytes of a bucket, padding included, are read as 16-bit words: of a
wider element the words that changed are sent. All numbers are little-endian::

    g, the number of gap bytes                (u64)
    n, the number of changed words            (u64)
    the new bits of these words, in order     (n times u16)
    the gaps                                  (g times u8)

A gap below 255 is one changed word, after so many unchanged ones. 255 skips 255 unchanged words.
A bucket's bytes are sent instead if more than a third of its words changed, if its delta would
not be smaller, or if the deltas before it took all the room (see ``DeltaEncoder``). The size tells
which it is.

**How it travels.** Each bucket's delta is a tensor of bytes in an update of its own, which is sent
in full (``delta_layout``).
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollwire_transport._changed_runs import ChangedRuns
from rollwire_transport._digest import triton_kernels
from rollwire_transport._errors import ManifestError
from rollwire_transport._layout import padded_nbytes, plan
from rollwire_transport._manifest import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from rollwire_transport._manifest import Bucket, Manifest

logger = logging.getLogger(__name__)

HEAD_BYTES = 16

_SKIP = 255
_WORDS = 4  # of 16 bits in one of 64


def full_size(bucket: Bucket) -> int:
    """The size of a bucket that is sent in full."""
    last = bucket.spans[-1]
    return last.bucket_offset + last.length


def delta_layout(manifest: Manifest) -> Manifest:
    """The layout in which the deltas of a manifest's buckets travel: uint8 tensors whose names are
    the buckets' indices.
    """
    return plan([TensorSpec(str(i), "uint8", (b.size,)) for i, b in enumerate(manifest.buckets)])


class DeltaEncoder:
    """Encodes the buckets of an update in their order. On a GPU it waits for nothing.

    All deltas together take a sixth of the update at most: what finds no room is sent in full.

    Args:
        bucket_bytes: The size of each.
        device: Where they lie.
    """

    def __init__(self, bucket_bytes: Sequence[int], device: torch.device) -> None:
        self._sizes = iter(bucket_bytes)
        room = padded_nbytes(sum(bucket_bytes) // 6 + len(bucket_bytes) * HEAD_BYTES)
        memory = torch.empty(room, dtype=torch.uint8, device=device)
        largest = max(bucket_bytes)
        kernels = delta_kernels(device.type)
        self._encoder = (
            BucketEncoder(memory)
            if kernels is None
            else kernels.GpuBucketEncoder(memory, len(bucket_bytes), largest, _most(largest))
        )

    def encode(self, old: Tensor, new: Tensor) -> None:
        """Finds the delta that makes ``new`` of ``old``, and makes ``old`` equal to it.

        Both are the next bucket with its padding: uint8, contiguous, a multiple of 64 long.
        """
        size = next(self._sizes)
        self._encoder.encode(old, new, _most(size), size)

    def results(self) -> list[tuple[Tensor | None, int]]:
        """The delta of each bucket that was encoded, None if it is sent in full; and how many words
        of 16 bits have changed.
        """
        return self._encoder.results()


def _most(bucket_bytes: int) -> int:
    """How many words of such a bucket may change: a third."""
    return bucket_bytes // 6


class BucketEncoder:
    """Encodes buckets into one memory, one after the other."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._begin = 0
        self._results: list[tuple[Tensor | None, int]] = []

    def encode(self, old: Tensor, new: Tensor, most: int, bucket_bytes: int) -> None:
        """Makes ``old`` equal to ``new``. There is no delta if more than ``most`` words changed."""
        # Most words of 64 bits are unchanged, so that the rest works on few.
        touched = (old.view(torch.int64) != new.view(torch.int64)).nonzero().squeeze(1)
        old_words, new_words = (data.view(torch.int16).view(-1, _WORDS) for data in (old, new))
        rows, columns = (old_words[touched] != new_words[touched]).nonzero(as_tuple=True)
        positions = touched[rows] * _WORDS + columns
        bits = new_words.view(-1)[positions]
        old_words.view(-1).index_copy_(0, positions, bits)
        delta = None
        if positions.numel() <= most:
            delta = self._write(positions, bits, bucket_bytes)
        self._results.append((delta, positions.numel()))

    def _write(self, positions: Tensor, bits: Tensor, bucket_bytes: int) -> Tensor | None:
        count = positions.numel()
        gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
        skips = gaps // _SKIP
        ends = skips.cumsum(0) + torch.arange(count, device=skips.device)  # of each one's gap
        gap_bytes = int(ends[-1]) + 1 if count else 0
        first_gap = HEAD_BYTES + 2 * count
        size = first_gap + gap_bytes
        if size >= bucket_bytes or self._begin + size > self._memory.numel():
            return None
        delta = self._memory[self._begin :][:size]
        self._begin += -(-size // HEAD_BYTES) * HEAD_BYTES
        delta[:HEAD_BYTES].view(torch.int64).copy_(torch.tensor([gap_bytes, count]))
        delta[HEAD_BYTES:first_gap].view(torch.int16).copy_(bits)
        delta[first_gap:].fill_(_SKIP)[ends] = (gaps - skips * _SKIP).to(torch.uint8)
        return delta

    def results(self) -> list[tuple[Tensor | None, int]]:
        """See ``DeltaEncoder``."""
        return self._results


class DecodedDelta(NamedTuple):
    """The changed words of 16 bits of a bucket: their positions (int32), and their new bits
    (int16).

    ``totals`` (int64) are the number of positions and the last one + 1. Unless it is that of the
    bits and this is within the bucket, the rest is of no use.
    """

    positions: Tensor
    bits: Tensor
    totals: Tensor


def decode(delta: Tensor, head: Sequence[int]) -> DecodedDelta:
    """The changed words of a delta (uint8, at a multiple of 16), of which ``head`` are the first
    two numbers.

    Raises:
        ManifestError: It is no delta.
    """
    gap_bytes, count = head
    begin = HEAD_BYTES + 2 * count
    if not 0 <= count <= gap_bytes or begin + gap_bytes != delta.numel():
        raise not_a_delta()
    if (kernels := delta_kernels(delta.device.type)) is not None:
        positions, totals = kernels.decode(delta, gap_bytes, count)
    else:
        positions, totals = _decode(delta[begin:])
    return DecodedDelta(positions, delta[HEAD_BYTES:begin].view(torch.int16), totals)


def _decode(gaps: Tensor) -> tuple[Tensor, Tensor]:
    changed = gaps != _SKIP
    steps = gaps.int().add_(changed)
    positions = steps.cumsum(0, dtype=torch.int32).sub_(1)[changed]
    return positions, torch.stack([changed.sum(), steps.sum(dtype=torch.int64)])


def not_a_delta() -> ManifestError:
    return ManifestError(["what arrived is not the delta of a bucket"])


@functools.cache
def delta_kernels(device_type: str) -> ModuleType | None:
    """The kernels of a GPU, compiled; None where torch alone must do."""
    if triton_kernels(device_type) is None:
        return None
    try:
        return _compiled_kernels(device_type)
    except Exception as error:  # whatever it is, torch alone does it too
        logger.warning("deltas are slower without Triton: %s: %s", type(error).__name__, error)
        return None


def _compiled_kernels(device_type: str) -> ModuleType:
    from rollwire_transport import _delta_triton

    room = torch.zeros(128, dtype=torch.uint8, device=device_type)
    _delta_triton.GpuBucketEncoder(room, 1, 64, 32).encode(room[:64], room[64:], 32, 64)
    for count in (0, 1):  # gaps at a multiple of 16, and elsewhere
        _delta_triton.decode(room, len(room) - HEAD_BYTES - 2 * count, count)
    one = torch.zeros(1, dtype=torch.int32, device=device_type)
    writer = _delta_triton.GpuRunWriter(ChangedRuns(one, one.short(), [1], [0], [room]))
    writer.sums()
    writer.apply()
    return _delta_triton

"""Deltas: what differs between two versions of the same tensors, bit for bit.

**Delta of a bucket.** The bytes of a bucket, padding included, are read as 16-bit words: of a
wider element the words that changed are sent. All numbers are little-endian::

    g, the number of gap bytes                (u64)
    n, the number of changed words            (u64)
    the new bits of these words, in order     (n times u16)
    the gaps                                  (g times u8)

A gap below 255 is one changed word, after so many unchanged ones. 255 skips 255 unchanged words.
If a bucket's delta would not be smaller than the bucket, the bucket's bytes are sent instead; the
size tells which it is.

**How it travels.** Each bucket's delta is a tensor of bytes in an update of its own, which is sent
in full (``delta_layout``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rollwire_transport._errors import ManifestError
from rollwire_transport._layout import padded_nbytes, plan
from rollwire_transport._manifest import TensorSpec

if TYPE_CHECKING:
    from rollwire_transport._manifest import Bucket, Manifest

_HEAD_BYTES = 16
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


class EncodedDelta(NamedTuple):
    """The delta of a bucket (uint8), and the positions (int64) and new bits (int16) of the 16-bit
    words that changed.
    """

    delta: Tensor
    positions: Tensor
    bits: Tensor


def encode(old: Tensor, new: Tensor, bucket_bytes: int) -> EncodedDelta | None:
    """The delta that makes ``new`` of ``old``; None if it would not be smaller than the bucket.

    Both are a bucket with its padding: uint8, contiguous, a multiple of 64 long.
    """
    # Most words of 64 bits are unchanged, so that the rest works on few.
    touched = (old.view(torch.int64) != new.view(torch.int64)).nonzero().squeeze(1)
    if _HEAD_BYTES + 3 * touched.numel() >= bucket_bytes:  # a word of 16 bits takes three bytes
        return None
    old_words, new_words = (bytes_.view(torch.int16).view(-1, _WORDS) for bytes_ in (old, new))
    differs = old_words[touched] != new_words[touched]
    rows, columns = differs.nonzero(as_tuple=True)
    positions = touched[rows] * _WORDS + columns
    count = positions.numel()
    gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    skips = gaps // _SKIP
    ends = skips.cumsum(0) + torch.arange(count, device=skips.device)  # where each one's gap is
    gap_bytes = int(ends[-1]) + 1 if count else 0
    begin = _HEAD_BYTES + 2 * count
    if begin + gap_bytes >= bucket_bytes:
        return None
    bits = new_words.view(-1)[positions]
    delta = torch.full((begin + gap_bytes,), _SKIP, dtype=torch.uint8, device=new.device)
    head = torch.tensor([gap_bytes, count], dtype=torch.int64)
    delta[:_HEAD_BYTES].view(torch.int64).copy_(head, non_blocking=True)
    delta[_HEAD_BYTES:begin].view(torch.int16).copy_(bits)
    delta[begin:][ends] = (gaps - skips * _SKIP).to(torch.uint8)
    return EncodedDelta(delta, positions, bits)


def decode(delta: Tensor, bucket_bytes: int) -> tuple[Tensor, Tensor]:
    """The positions (int64, ascending) and new bits (int16) of the changed words of a bucket.

    ``delta`` is uint8 and begins at a multiple of 16.

    Raises:
        ManifestError: It is not the delta of a bucket with so many bytes.
    """
    problem = ManifestError(["what arrived is not the delta of a bucket"])
    if delta.numel() < _HEAD_BYTES:
        raise problem
    gap_bytes, count = delta[:_HEAD_BYTES].view(torch.int64).tolist()
    begin = _HEAD_BYTES + 2 * count
    if not 0 <= count <= gap_bytes or begin + gap_bytes != delta.numel():
        raise problem
    gaps = delta[begin:]
    changed = gaps != _SKIP
    positions = ((gaps.long() + changed).cumsum(0) - 1)[changed]
    if positions.numel() != count:
        raise problem
    if count and int(positions[-1]) >= padded_nbytes(bucket_bytes) // 2:
        raise problem
    return positions, delta[_HEAD_BYTES:begin].view(torch.int16)

"""How tensors are laid into buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire_transport._manifest import Bucket, Manifest, Span, TensorSpec
from rollwire_transport._tensors import DTYPES, nbytes
from rollwire_transport._validation import ALIGNMENT, check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

# The trainer holds a few buckets. Between GPUs, what one costs beside its bytes wants them large.
_SMALLEST, _LARGEST = 64 << 20, 256 << 20
_BUCKETS = 64


def padded_nbytes(size: int) -> int:
    """The bytes that ``size`` ones of a tensor take in a bucket, with what fills them up."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def packed_nbytes(specs: Iterable[TensorSpec]) -> int:
    """The bytes that tensors take one after the other."""
    return sum(padded_nbytes(nbytes(spec)) for spec in specs)


def packed_views(specs: Iterable[TensorSpec], memory: Tensor) -> dict[str, Tensor]:
    """Tensors one after the other in a memory, as in the buckets of a plan: those come straight
    into them.

    Args:
        specs: In the plan's order, without aliases.
        memory: uint8, one-dimensional, of ``packed_nbytes``, aligned as any allocation is.
    """
    tensors, begin = {}, 0
    for spec in specs:
        piece = memory[begin : begin + nbytes(spec)]
        tensors[spec.name] = piece.view(DTYPES[spec.dtype]).view(spec.shape)
        begin += padded_nbytes(nbytes(spec))
    return tensors


def plan(
    tensors: Sequence[TensorSpec],
    *,
    bucket_bytes: int | None = None,
    partial: bool = False,
) -> Manifest:
    """Lays tensors into buckets of ``bucket_bytes`` in their order, the last one shorter.

    By default buckets are a 64th of the whole, but no less than 64 MiB and no more than 256 MiB.

    A tensor that does not fit in what is left of a bucket goes on in the next; small ones share
    one. Aliases come last among the manifest's tensors, and travel in no bucket; nor do empty
    tensors. Equal arguments give an equal manifest.

    Raises:
        ManifestError: No manifest of these tensors is valid.
        ValueError: ``bucket_bytes`` is not a positive multiple of 64.
    """
    if bucket_bytes is not None and (bucket_bytes <= 0 or bucket_bytes % ALIGNMENT):
        raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT}")
    check_tensors(tensors)
    if bucket_bytes is None:
        share = sum(nbytes(t) for t in tensors if t.alias_of is None) // _BUCKETS
        bucket_bytes = min(max(padded_nbytes(share), _SMALLEST), _LARGEST)
    ordered = sorted(tensors, key=lambda t: t.alias_of is not None)
    buckets: list[Bucket] = []
    spans: list[Span] = []
    used = 0  # of the bucket that is being filled, padding included

    def close_bucket() -> None:
        nonlocal spans, used
        last = spans[-1]
        buckets.append(Bucket(last.bucket_offset + last.length, tuple(spans)))
        spans, used = [], 0

    for index, spec in enumerate(ordered):
        if spec.alias_of is not None:
            break
        offset, size = 0, nbytes(spec)
        while offset < size:
            length = min(size - offset, bucket_bytes - used)
            spans.append(Span(index, offset, used, length))
            offset += length
            used += padded_nbytes(length)
            if used == bucket_bytes:
                close_bucket()
    if spans:
        close_bucket()
    return Manifest(tuple(ordered), tuple(buckets), partial=partial)

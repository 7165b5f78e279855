"""How tensors lie in buckets: one after the other, each padded to a multiple of 64 bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire_transport._manifest import Bucket, Manifest, Span, TensorSpec
from rollwire_transport._tensors import DTYPES, nbytes
from rollwire_transport._validation import ALIGNMENT, check_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch
    from torch import Tensor

# A sender holds three buckets. Between GPUs a bucket has fixed costs, so that larger is faster.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES = 64 << 20, 256 << 20
_BUCKETS = 64


def plan(
    tensors: Sequence[TensorSpec],
    *,
    bucket_bytes: int | None = None,
    partial: bool = False,
) -> Manifest:
    """Lays tensors into buckets of ``bucket_bytes`` in their order; the last one is shorter.

    A tensor that does not fit into the rest of a bucket continues in the next one; small tensors
    share one. Aliases come last among the manifest's tensors and are in no bucket, and neither are
    empty tensors. Equal arguments give an equal manifest.

    Args:
        tensors: In the order in which they are sent.
        bucket_bytes: A positive multiple of 64. Default: a 64th of the whole, at least 64 MiB and
            at most 256 MiB.
        partial: Tensors that are not named keep their values.

    Raises:
        ManifestError: No manifest of these tensors is valid.
        ValueError: ``bucket_bytes`` is not a positive multiple of 64.
    """
    if bucket_bytes is not None and (bucket_bytes <= 0 or bucket_bytes % ALIGNMENT):
        raise ValueError(f"bucket_bytes must be a positive multiple of {ALIGNMENT}")
    check_tensors(tensors)
    if bucket_bytes is None:
        share = sum(nbytes(t) for t in tensors if t.alias_of is None) // _BUCKETS
        bucket_bytes = min(max(padded_nbytes(share), _MIN_BUCKET_BYTES), _MAX_BUCKET_BYTES)
    ordered = sorted(tensors, key=lambda t: t.alias_of is not None)
    buckets: list[Bucket] = []
    spans: list[Span] = []
    used = 0  # bytes of the bucket that is being filled, with padding

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


def padded_nbytes(size: int) -> int:
    """The bytes that ``size`` bytes of a tensor take in a bucket, with padding."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def packed_nbytes(specs: Iterable[TensorSpec]) -> int:
    """The bytes that tensors take one after the other, with padding; see ``packed_views``."""
    return sum(padded_nbytes(nbytes(spec)) for spec in specs)


def packed_views(specs: Iterable[TensorSpec], memory: Tensor) -> dict[str, Tensor]:
    """Views of one memory as tensors that lie as in the buckets of a plan.

    A ``Receiver`` receives straight into such tensors, without a second copy.

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


def in_place_view(
    bucket: Bucket, targets: Mapping[int, Tensor], device: torch.device
) -> Tensor | None:
    """A bucket's bytes as one view over its tensors, or None if they do not lie as in the bucket.

    The view includes the padding after the last tensor in its storage, since digests read it.

    Args:
        bucket: Of a manifest.
        targets: The bytes of each tensor, by its index in the manifest.
        device: Where the bucket is received, with its index.
    """
    base = targets[bucket.spans[0].tensor]
    if base.device != device:
        return None
    begins = {
        (target.untyped_storage().data_ptr(), target.storage_offset() + offset)
        for target, offset in (
            (targets[span.tensor], span.tensor_offset - span.bucket_offset) for span in bucket.spans
        )
    }
    if len(begins) > 1:
        return None
    ((address, begin),) = begins
    inside = 0 <= begin <= base.untyped_storage().nbytes() - padded_nbytes(bucket.size)
    if not inside or (address + begin) % ALIGNMENT:
        return None
    return base.as_strided((bucket.size,), (1,), begin)

"""How tensors lie in buckets, and whether a manifest is valid and fits a server's schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire_transport._errors import ManifestError
from rollwire_transport._manifest import (
    DTYPES,
    ITEMSIZES,
    Bucket,
    Encoding,
    Manifest,
    Span,
    TensorSpec,
    nbytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import Tensor


# Every span begins at a multiple of this in its bucket and in its tensor. It is a cache line, the
# widest vector load, and a multiple of every element size and of the digest's 8-byte words: a span
# can be viewed as elements or words, and no word of a tensor is split between two buckets.
ALIGNMENT = 64
MAX_DIMENSIONS = 64  # torch's own limit
MAX_TENSOR_BYTES = 1 << 48  # more than any machine has; bounds the arithmetic on sizes
MAX_BUCKET_BYTES = 1 << 30  # each end reserves a few buffers of the largest bucket
MAX_NAME_BYTES = 4096


def validate(manifest: Manifest) -> None:
    """Checks that a manifest is consistent in itself.

    Raises:
        ManifestError: With all problems.
    """
    sizes: list[int | None] = []
    problems = list(_tensor_problems(manifest.tensors, sizes))
    problems += _encoding_problems(manifest)
    problems += _bucket_problems(manifest, sizes)
    if problems:
        raise ManifestError(problems)


def check_tensors(tensors: Sequence[TensorSpec]) -> None:
    """Checks that a manifest can be planned for these tensors; raises as ``validate``."""
    if problems := list(_tensor_problems(tensors, [])):
        raise ManifestError(problems)


def compare(manifest: Manifest, schema: Sequence[TensorSpec]) -> None:
    """Checks that a valid manifest has the tensors of a schema.

    An alias of the schema may be left out if its source is there: both names share the memory.

    Raises:
        ManifestError: With every tensor that is unknown, missing (unless the manifest is partial),
            or of another dtype, shape or alias.
    """
    wanted = {spec.name: spec for spec in schema}
    given = {spec.name: spec for spec in manifest.tensors}
    problems = []
    for name, spec in given.items():
        if (want := wanted.get(name)) is None:
            problems.append(f"{name} is unknown here")
            continue
        problems += [
            f"{name} has {what} {got}, expected {want_}"
            for what, got, want_ in (
                ("dtype", spec.dtype, want.dtype),
                ("shape", list(spec.shape), list(want.shape)),
                ("alias_of", spec.alias_of or "nothing", want.alias_of or "nothing"),
            )
            if got != want_
        ]
    if not manifest.partial:
        problems += [
            f"{name} is missing"
            for name, spec in wanted.items()
            if name not in given and spec.alias_of not in given
        ]
    if problems:
        raise ManifestError(problems)


def _tensor_problems(tensors: Sequence[TensorSpec], sizes: list[int | None]) -> Iterator[str]:
    """Also fills ``sizes`` with the tensors' bytes, None where unknown."""
    specs: dict[str, TensorSpec] = {}
    for index, spec in enumerate(tensors):
        label = _label(index, spec)
        if not 0 < len(spec.name.encode(errors="surrogatepass")) <= MAX_NAME_BYTES:
            yield f"{label}: its name must have 1 to {MAX_NAME_BYTES} bytes"
        if not _is_text(spec.name):
            yield f"{label}: its name is not valid Unicode"
        if spec.name in specs:
            yield f"{label}: an earlier tensor has the same name"
        specs.setdefault(spec.name, spec)
        size: int | None = ITEMSIZES.get(spec.dtype)
        if size is None:
            yield f"{label}: unknown dtype {spec.dtype[:80]!r}"
        if len(spec.shape) > MAX_DIMENSIONS:
            yield f"{label}: more than {MAX_DIMENSIONS} dimensions"
            size = None
        elif size is not None:
            size = _bounded_product(size, spec.shape)
            if size is None:
                yield f"{label}: absurd shape {list(spec.shape)}"
        sizes.append(size)
    for index, spec in enumerate(tensors):
        if spec.alias_of is None:
            continue
        label = _label(index, spec)
        source = specs.get(spec.alias_of)
        if source is None or source.alias_of is not None:
            yield f"{label}: alias of {spec.alias_of[:80]!r}, which is not a tensor that is sent"
        elif (source.dtype, source.shape) != (spec.dtype, spec.shape):
            yield f"{label}: alias of {spec.alias_of[:80]!r}, which has another dtype or shape"
    if not any(t.alias_of is None for t in tensors):
        yield "there are no tensors"


def _label(index: int, spec: TensorSpec) -> str:
    return f"tensor {index} ({spec.name[:80]!a})"


def _is_text(name: str) -> bool:
    return name.isascii() or not any("\ud800" <= character <= "\udfff" for character in name)


def _bounded_product(size: int, shape: tuple[int, ...]) -> int | None:
    if min(shape, default=0) < 0:
        return None
    if 0 in shape:
        return 0 if max(shape) <= MAX_TENSOR_BYTES else None
    for dimension in shape:
        size *= dimension
        if size > MAX_TENSOR_BYTES:
            return None
    return size


def _encoding_problems(manifest: Manifest) -> Iterator[str]:
    is_delta = manifest.encoding is Encoding.DELTA
    if is_delta and manifest.base_digest is None:
        yield "a delta needs base_digest"
    elif is_delta and not manifest.buckets:
        yield "a delta needs a bucket"
    elif not is_delta and manifest.base_digest is not None:
        yield "base_digest belongs to deltas"


def _bucket_problems(manifest: Manifest, sizes: list[int | None]) -> Iterator[str]:
    """Spans must follow each other in their bucket without overlap.

    The spans of a tensor, in the order in which they are sent, must follow each other without
    overlap or gap.
    """
    covered = [0] * len(sizes)
    for number, bucket in enumerate(manifest.buckets):
        label = f"bucket {number}"
        if not bucket.spans:
            yield f"{label} is empty"
        if not 0 < bucket.size <= MAX_BUCKET_BYTES:
            yield f"{label} has an absurd size of {bucket.size} bytes"
        if bucket.sender != 0:
            yield f"{label} comes from sender {bucket.sender}: there is one sender, 0"
        end = 0
        for span in bucket.spans:
            where = f"{label}: the span of tensor {span.tensor} at {span.bucket_offset}"
            if not 0 <= span.tensor < len(sizes):
                yield f"{where}: there is no such tensor"
                continue
            if manifest.tensors[span.tensor].alias_of is not None:
                yield f"{where}: an alias is not sent"
                continue
            if span.length <= 0:
                yield f"{where} has length {span.length}"
                continue
            if span.bucket_offset % ALIGNMENT or span.tensor_offset % ALIGNMENT:
                yield f"{where} does not begin at a multiple of {ALIGNMENT}"
            if span.bucket_offset < end:
                yield f"{where} overlaps the one before it, which ends at {end}"
            elif span.bucket_offset - end >= ALIGNMENT:
                yield f"{where} leaves a gap after {end}"
            end = span.bucket_offset + span.length
            if span.tensor_offset != covered[span.tensor]:
                yield (
                    f"{where} begins at byte {span.tensor_offset} of its tensor, "
                    f"of which {covered[span.tensor]} came before"
                )
            covered[span.tensor] = span.tensor_offset + span.length
        fits = bucket.size <= end if manifest.encoding is Encoding.DELTA else bucket.size == end
        if bucket.spans and not fits:
            yield f"{label} has {bucket.size} bytes, but its last span ends at {end}"
    for index, (spec, size, came) in enumerate(zip(manifest.tensors, sizes, covered, strict=True)):
        if spec.alias_of is None and size is not None and came != size:
            yield f"{_label(index, spec)} has {size} bytes, its spans end at {came}"


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

    ``targets`` has the bytes of each tensor by its index in the manifest. The padding after the
    last tensor must be in its storage, since digests read it.
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

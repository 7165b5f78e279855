"""A trainer's copy of what it published last: what changes next is found by comparison with it."""

from __future__ import annotations

import functools
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._bucket_digest import HEADER_WORDS, BucketDigester, HostCopy, UpdateDigest
from rollwire_transport._cast import Casts
from rollwire_transport._delta import DeltaEncoder
from rollwire_transport._digest import sum_digests
from rollwire_transport._layout import (
    ALIGNMENT,
    in_place_view,
    packed_views,
    padded_nbytes,
    validate,
)
from rollwire_transport._manifest import Encoding, as_bytes, nbytes
from rollwire_transport._sender import PackingStatus
from rollwire_transport._source import SourceReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rollwire_transport._manifest import Bucket, Manifest, Span, TensorSpec
    from rollwire_transport._source import Source

_PINNED_BYTES = 1 << 30
"""Pinned memory is allocated in pieces of this size: torch rounds each up to a power of two."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What changed between two versions.

    Attributes:
        manifest: Its layout, which names the version that it builds on.
        tensors: What is sent, in the ``delta_layout`` of the manifest; functions give those that
            are assembled when their turn comes.
        changed_words: 16-bit words of the tensors that differ.
        words: All of them.
    """

    manifest: Manifest
    tensors: Mapping[str, Tensor | Callable[[], Tensor]]
    changed_words: int
    words: int

    @property
    def nbytes(self) -> int:
        return sum(bucket.size for bucket in self.manifest.buckets)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors of an update, in memory that the trainer does not change.

    Attributes:
        tensors: All that are sent, in the manifest's dtypes.
        digests: The digest of each.
        delta: What changed since the last snapshot; None if not all tensors were part of one, or
            all are empty.
        casts: By name, the dtypes from which tensors were cast.
    """

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]
    delta: Delta | None
    casts: Mapping[str, str]

    @property
    def digest(self) -> int:
        """The digest of the whole update."""
        return sum_digests(self.digests.values())


class PublishedCopy:
    """A copy of a trainer's tensors, which takes as much memory as they do in the servers' dtypes.

    Args:
        device: Where it lies: the tensors' device, or the CPU.

    Attributes:
        packing: The bucket that is being copied now, to be read from another thread: a source may
            be slow, or hang.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.packing: PackingStatus | None = None
        self._tensors: dict[TensorSpec, Tensor] = {}
        self._digests: dict[TensorSpec, int] = {}  # of those that hold what was published last

    def forget(self) -> None:
        """The last snapshot was not published: the next delta cannot build on it."""
        self._digests.clear()

    def take(
        self,
        manifest: Manifest,
        source: Source,
        *,
        device: torch.device,
        cast: bool = True,
        stop: threading.Event | None = None,
    ) -> Snapshot:
        """Reads a source to its end into the copy; then the trainer may change its tensors.

        A snapshot is good until the next one is taken.

        Args:
            manifest: A plan of the tensors.
            source: See ``Sender.send``.
            device: Where the tensors lie, and are compared.
            cast: Whether floating-point tensors of other dtypes are cast to the manifest's.
            stop: Once it is set, the source is asked for nothing more.

        Raises:
            ManifestError, TensorSourceError, TransportError: As ``Sender.send``.
            RuntimeError: There is no memory for the copy.
        """
        validate(manifest)
        sent = [spec for spec in manifest.tensors if spec.alias_of is None]
        # Should this fail, they hold a bit of both.
        base = [self._digests.pop(spec, None) for spec in sent]
        known = [digest for digest in base if digest is not None]
        self._allocate([spec for spec in sent if spec not in self._tensors], device)
        tensors = {spec.name: self._tensors[spec] for spec in sent}
        comparison = _Comparison(manifest, tensors, device, known=len(known) == len(sent))
        casts = Casts() if cast else None
        reader = SourceReader(
            manifest, source, 0, casts, self._on_request, stop or threading.Event()
        )
        try:
            for index, bucket in enumerate(manifest.buckets):
                first = manifest.tensors[bucket.spans[0].tensor].name
                self.packing = PackingStatus(first, time.monotonic())
                comparison.take(index, functools.partial(reader.pack, bucket))
            self.packing = PackingStatus("", time.monotonic())
            reader.finish()
            if casts is not None:
                casts.check()
            digests = comparison.digests()
        finally:
            self.packing = PackingStatus("", time.monotonic())  # it may hang as it is closed too
            reader.close()
            self.packing = None
        self._digests |= {spec: digests[spec.name] for spec in sent}
        delta = None
        if comparison.known and manifest.buckets:
            delta = comparison.delta(sum_digests(known))
        return Snapshot(tensors, digests, delta, {} if casts is None else casts.dtypes)

    def _allocate(self, specs: Sequence[TensorSpec], device: torch.device) -> None:
        pinned = device.type == "cuda" and self.device.type == "cpu"
        for slab in _slabs(specs, _PINNED_BYTES) if pinned else [specs]:
            size = sum(padded_nbytes(nbytes(spec)) for spec in slab)
            memory = torch.zeros(size, dtype=torch.uint8, device=self.device, pin_memory=pinned)
            views = packed_views(slab, memory)
            self._tensors |= {spec: views[spec.name] for spec in slab}

    def _on_request(self, tensor: str, *, another_came: bool = False) -> None:
        if self.packing is not None:
            started_at = time.monotonic() if another_came else self.packing.started_at
            self.packing = PackingStatus(tensor, started_at)


class _Comparison:
    """Compares buckets of a trainer's tensors with the copy, and copies what differs."""

    def __init__(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        *,
        known: bool,
    ) -> None:
        self.known = known
        self._manifest = manifest
        self._device = device
        self._copies = {
            index: as_bytes(tensors[spec.name])
            for index, spec in enumerate(manifest.tensors)
            if spec.alias_of is None
        }
        largest = max((padded_nbytes(bucket.size) for bucket in manifest.buckets), default=0)
        self._new = torch.zeros(largest, dtype=torch.uint8, device=device)
        if known and manifest.buckets:
            self._encoder = DeltaEncoder([bucket.size for bucket in manifest.buckets], device)
        self._digester = BucketDigester(manifest.buckets, 0, device)
        self._records: list[HostCopy] = []

    def take(self, index: int, pack: Callable[[Tensor], None]) -> None:
        bucket = self._manifest.buckets[index]
        copy = self._view(bucket)
        # There is nothing to compare with: it goes straight to its place.
        straight = copy is not None and not self.known
        new = copy if copy is not None and straight else self._new[: padded_nbytes(bucket.size)]
        pack(new[: bucket.size])
        for begin, end in _padding(bucket):
            new[begin:end].zero_()
        self._records.append(HostCopy(self._digester.record(index, new)))
        if self.known:
            old = _assembled(bucket, self._copies, self._device) if copy is None else copy
            self._encoder.encode(old, new)
        if copy is None:
            for span in bucket.spans:
                _copy_of(span, self._copies).copy_(_piece(new, span))

    def digests(self) -> dict[str, int]:
        digest = UpdateDigest(self._manifest)
        for index, record in enumerate(self._records):
            digest.add_bucket(index, record.read()[HEADER_WORDS:])
        return digest.tensors()

    def delta(self, base_digest: int) -> Delta:
        buckets, tensors, changed = [], {}, 0
        results = zip(self._manifest.buckets, self._encoder.results(), strict=True)
        for index, (bucket, (delta, words)) in enumerate(results):
            tensors[str(index)] = self._whole(bucket) if delta is None else delta
            buckets.append(bucket if delta is None else replace(bucket, size=delta.numel()))
            changed += words
        manifest = replace(
            self._manifest,
            buckets=tuple(buckets),
            encoding=Encoding.DELTA,
            base_digest=base_digest,
        )
        return Delta(manifest, tensors, changed, sum(map(_words, self._manifest.buckets)))

    def _whole(self, bucket: Bucket) -> Tensor | Callable[[], Tensor]:
        """The new bytes of a bucket. A function, if they have to be assembled: there may be no room
        for all of these at once.
        """
        if (copy := self._view(bucket)) is not None:
            return copy[: bucket.size]
        copies, device = self._copies, self._device  # not the rest of this object
        return lambda: _assembled(bucket, copies, device)[: bucket.size]

    def _view(self, bucket: Bucket) -> Tensor | None:
        """The copy's bytes of a bucket with their padding, if they lie as in the bucket."""
        view = in_place_view(bucket, self._copies, self._new.device)
        if view is None:
            return None
        return view.as_strided((padded_nbytes(bucket.size),), (1,), view.storage_offset())


def _assembled(bucket: Bucket, copies: Mapping[int, Tensor], device: torch.device) -> Tensor:
    """A bucket of these copies, with its padding, in memory of its own."""
    assembled = torch.empty(padded_nbytes(bucket.size), dtype=torch.uint8, device=device)
    for begin, end in _padding(bucket):
        assembled[begin:end].zero_()
    for span in bucket.spans:
        _piece(assembled, span).copy_(_copy_of(span, copies), non_blocking=True)
    return assembled


def _copy_of(span: Span, copies: Mapping[int, Tensor]) -> Tensor:
    return copies[span.tensor][span.tensor_offset :][: span.length]


def _piece(bucket: Tensor, span: Span) -> Tensor:
    return bucket[span.bucket_offset :][: span.length]


def _words(bucket: Bucket) -> int:
    return sum((span.length + 1) // 2 for span in bucket.spans)


def _padding(bucket: Bucket) -> Iterator[tuple[int, int]]:
    for span in bucket.spans:
        end = span.bucket_offset + span.length
        if end % ALIGNMENT:
            yield end, padded_nbytes(end)


def _slabs(specs: Sequence[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    slab: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if slab and size + nbytes(spec) > max_bytes:
            yield slab
            slab, size = [], 0
        slab.append(spec)
        size += padded_nbytes(nbytes(spec))
    if slab:
        yield slab

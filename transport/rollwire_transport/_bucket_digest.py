"""The header that is sent with a bucket, and the digests of an update bucket by bucket.

A bucket's *record* is int64, shape (4 + spans,): its header, then the sums of its spans (see
``_digest``). The header is what is sent: a magic number that names the format, the bucket's index
in the manifest, its size in bytes, its digest. Both ends compute the record and compare headers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._digest import (
    bucket_digest,
    digest_of_sum,
    span_sum,
    sum_digests,
    triton_kernels,
)
from rollwire_transport._errors import DigestMismatch, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_transport._manifest import Bucket, Manifest

HEADER_WORDS = 4
_MAGIC = int.from_bytes(b"rollwb\x00\x01", "little")  # the zero is the number of the transfer
_ALIGNMENT_WORDS = 2  # Triton compiles anew for memory with another alignment


def magic(transfer: int) -> int:
    """A group's first word of every header in its transfer of this number."""
    return _MAGIC + (transfer % 256 << 48)


class BucketDigester:
    """Computes the records of the buckets of a manifest from ``first`` on, each once."""

    def __init__(
        self, buckets: Sequence[Bucket], first: int, device: torch.device, transfer: int = 0
    ) -> None:
        self._buckets = buckets
        self._first = first
        words: list[int] = []
        begins = []
        for index, bucket in enumerate(buckets, start=first):
            begins.append(len(words))
            words += [magic(transfer), index, bucket.size, 0, *[0] * len(bucket.spans)]
            words += [0] * (-len(words) % _ALIGNMENT_WORDS)
        records = torch.tensor(words, dtype=torch.int64, device=device)
        self._records = [
            records[begin : begin + HEADER_WORDS + len(bucket.spans)]
            for begin, bucket in zip(begins, buckets, strict=True)
        ]
        self._grouped_sums = None
        if buckets and (triton := triton_kernels(device.type)) is not None:
            self._grouped_sums = triton.GroupedSums(
                [
                    [
                        triton.ByteRange(s.bucket_offset, s.length, s.tensor_offset // 8)
                        for s in b.spans
                    ]
                    for b in buckets
                ],
                range(first, first + len(buckets)),
                device,
            )

    def record(self, index: int, data: Tensor) -> Tensor:
        """The record of a bucket, without waiting for its device.

        ``data`` begins at a multiple of 64 and can be read up to the next multiple of 8.
        """
        number = index - self._first
        record = self._records[number]
        if self._grouped_sums is not None:
            self._grouped_sums.sum(number, data, record, digest=True)
        else:
            sums = torch.stack([span_sum(data, span) for span in self._buckets[number].spans])
            record[HEADER_WORDS:] = sums
            record[HEADER_WORDS - 1] = bucket_digest(index, sums.tolist())
        return record


def check_header(header: Sequence[int], expected: Sequence[int], peer: int | None) -> None:
    """Compares the header that came with a bucket with the one that was computed here."""
    got_magic, got_index, got_size, sent_digest = header
    wanted_magic, index, size, digest = expected
    if got_magic != wanted_magic:
        raise TransportError(
            f"bucket {index} has no header of this format and transfer: both ends must "
            "run the same format of rollwire's transport",
            peer,
        )
    if (got_index, got_size) != (index, size):
        raise TransportError(
            f"the header is of bucket {got_index} with {got_size} bytes, expected was bucket "
            f"{index} with {size}: both ends must hold the same manifest and first bucket",
            peer,
        )
    if sent_digest != digest:
        raise DigestMismatch(
            f"bucket {index} was sent with digest {sent_digest % (1 << 64):016x} and arrived with "
            f"{digest % (1 << 64):016x}",
            peer,
        )


class UpdateDigest:
    """The digests of an update's tensors, from the span sums of its buckets.

    A bucket that is sent again replaces its entry.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._sums: dict[int, tuple[int, ...]] = {}
        self._tensors: dict[str, int] | None = None

    def add_bucket(self, index: int, sums: Sequence[int]) -> None:
        self._sums[index] = tuple(sums)
        self._tensors = None

    def precompute(self) -> None:
        # It takes a while for many tensors, and who asks for them later may be an event loop.
        if len(self._sums) == len(self._manifest.buckets):
            self.tensors()

    def tensors(self) -> dict[str, int]:
        """The digest of each tensor, without aliases; RuntimeError if a bucket is missing."""
        if self._tensors is not None:
            return self._tensors
        buckets = self._manifest.buckets
        if missing := len(buckets) - len(self._sums):
            raise RuntimeError(f"{missing} of {len(buckets)} buckets are missing: no digest yet")
        totals = [0] * len(self._manifest.tensors)
        for index, bucket in enumerate(buckets):
            for span, total in zip(bucket.spans, self._sums[index], strict=True):
                totals[span.tensor] += total
        self._tensors = {
            spec.name: digest_of_sum(spec, total)
            for spec, total in zip(self._manifest.tensors, totals, strict=True)
            if spec.alias_of is None
        }
        return self._tensors

    def total(self) -> int:
        return sum_digests(self.tensors().values())


class HostCopy:
    """A copy of int64 numbers in host memory. Only reading it waits for their device."""

    def __init__(self, numbers: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # Pinned, or else the copy would wait for the device.
            self._here = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))
        else:
            self._here = numbers

    def read(self) -> list[int]:
        if self._done is not None:
            self._done.synchronize()
        return self._here.tolist()

"""What travels with a bucket so that the other end can tell whether it is the one, and whole.

A bucket's *record*, int64, shape (4 + spans,): its header, and the sums of its spans (see
``digest``). The header, which travels, is the magic number, which also tells the format; the
bucket's index in the manifest; its real size in bytes; its digest. Both ends compute the record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollwire_transport._digest import bucket_digest, span_sum, triton_kernels
from rollwire_transport._errors import DigestMismatch, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from rollwire_transport._manifest import Bucket

HEADER = 4  # words
_ALIGNMENT = 2  # words; Triton compiles anew for memory that begins elsewhere
MAGIC = int.from_bytes(b"rollwb\x00\x01", "little")


class Sealer:
    """Computes the records of buckets on one device, each once.

    Args:
        buckets: Those of a manifest from ``first`` on.
        first: The index of the first.
        device: Where their bytes will be.
    """

    def __init__(self, buckets: Sequence[Bucket], first: int, device: torch.device) -> None:
        self._buckets = buckets
        self._first = first
        blanks: list[int] = []
        begins = []
        for index, bucket in enumerate(buckets, start=first):
            begins.append(len(blanks))
            blanks += [MAGIC, index, bucket.size, 0, *[0] * len(bucket.spans)]
            blanks += [0] * (-len(blanks) % _ALIGNMENT)
        records = torch.tensor(blanks, dtype=torch.int64, device=device)
        self._records = [
            records[begin : begin + HEADER + len(bucket.spans)]
            for begin, bucket in zip(begins, buckets, strict=True)
        ]
        self._sets = None
        if buckets and (gpu := triton_kernels(device.type)) is not None:
            self._sets = gpu.Sets(
                [
                    [gpu.Run(s.bucket_offset, s.length, s.tensor_offset // 8) for s in b.spans]
                    for b in buckets
                ],
                range(first, first + len(buckets)),
                device,
            )

    def seal(self, index: int, data: Tensor) -> Tensor:
        """The record of a bucket, on its device, without waiting for it.

        Args:
            index: In the manifest.
            data: Its bytes: uint8, contiguous, beginning at a multiple of 64 as an address, with
                bytes up to the next multiple of 8 behind them.
        """
        number = index - self._first
        record = self._records[number]
        if self._sets is not None:
            self._sets.sum(number, data, record, digest=True)
        else:
            sums = torch.stack([span_sum(data, span) for span in self._buckets[number].spans])
            record[HEADER:] = sums
            record[HEADER - 1] = bucket_digest(index, sums.tolist())
        return record


def check_header(header: Sequence[int], expected: Sequence[int], peer: str | None) -> None:
    """Compares the header that came with a bucket with what it has to be.

    Raises:
        DigestMismatch: The digests differ.
        TransportError: It is no header, or that of another bucket.
    """
    magic, its_index, its_size, told = header
    _, index, size, computed = expected
    if magic != MAGIC:
        raise TransportError(
            f"bucket {index} came with something that is no header of this format: both ends must "
            "run the same format of rollwire's transport",
            peer,
        )
    if (its_index, its_size) != (index, size):
        raise TransportError(
            f"the header tells of bucket {its_index} with {its_size} bytes, expected was bucket "
            f"{index} with {size}: both ends must hold the same manifest and first bucket",
            peer,
        )
    if told != computed:
        raise DigestMismatch(
            f"bucket {index} was sent with digest {told % (1 << 64):016x} and arrived with "
            f"{computed % (1 << 64):016x}",
            peer,
        )

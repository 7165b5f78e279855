"""The header that travels with each bucket.

Four little-endian 64-bit words, as an int64 tensor: the magic number, which also tells the format;
the bucket's index in the manifest; its real size in bytes; its digest (see ``digest``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollwire_transport.errors import DigestMismatch, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

WORDS = 4
MAGIC = int.from_bytes(b"rollwb\x00\x01", "little")


def write_headers(first: int, sizes: Sequence[int], device: torch.device) -> Tensor:
    """The headers of buckets that follow each other: shape (buckets, 4), their digests left to
    fill in, in the last column.
    """
    words = [[MAGIC, index, size, 0] for index, size in enumerate(sizes, start=first)]
    return torch.tensor(words, dtype=torch.int64, device=device).view(-1, WORDS)


def read_header(header: Sequence[int], index: int, size: int, peer: str | None) -> int:
    """The digest that a header's words tell, as int64, after a look at the rest of them.

    Raises:
        TransportError: It is no header, or that of another bucket.
    """
    magic, its_index, its_size, digest = header
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
    return digest


def check_digest(index: int, told: int, computed: int, peer: str | None) -> None:
    """Compares a bucket's digests, both as int64.

    Raises:
        DigestMismatch: They differ.
    """
    if told != computed:
        raise DigestMismatch(
            f"bucket {index} was sent with digest {told % (1 << 64):016x} and arrived with "
            f"{computed % (1 << 64):016x}",
            peer,
        )

"""The header that travels with each bucket.

Four little-endian 64-bit words, as an int64 tensor: the magic number, which also tells the format;
the bucket's index in the manifest; its real size in bytes; its digest (see ``digest``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollwire_transport.errors import DigestMismatch, TransportError

WORDS = 4
MAGIC = int.from_bytes(b"rollwb\x00\x01", "little")


def write_header(index: int, size: int, digest: int, device: torch.device) -> Tensor:
    """A header as a tensor of shape (4,)."""
    signed = digest - (1 << 64) if digest >> 63 else digest
    return torch.tensor([MAGIC, index, size, signed], dtype=torch.int64, device=device)


def read_header(header: Tensor, index: int, size: int, peer: str | None) -> int:
    """The digest that a header tells, after a look at the rest of it.

    Raises:
        TransportError: It is no header, or that of another bucket.
    """
    magic, its_index, its_size, digest = header.tolist()
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
    return int(digest) & (1 << 64) - 1


def check_digest(index: int, told: int, computed: int, peer: str | None) -> None:
    """Compares a bucket's digests.

    Raises:
        DigestMismatch: They differ.
    """
    if told != computed:
        raise DigestMismatch(
            f"bucket {index} was sent with digest {told:016x} and arrived with {computed:016x}",
            peer,
        )

"""Memory for the buckets that are to come: where their tensors lie, or a buffer that some share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollwire_transport._bucket_header import HEADER
from rollwire_transport._bucket_layout import padded_nbytes
from rollwire_transport._validation import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from rollwire_transport._manifest import Bucket

# One bucket is unpacked, and the one before looked at, while two are under way.
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one bucket comes.

    Attributes:
        index: Of the bucket.
        header: int64, shape (4,).
        payload: Its bytes: uint8.
        in_place: They are those of its tensors, and need no unpacking.
        buffer: What goes with the turn of this slot, whether it is used or not.
    """

    index: int
    header: Tensor
    payload: Tensor
    in_place: bool
    buffer: Tensor | None


class Slots:
    """Slots for the buckets from ``first`` on, a few at a time.

    Args:
        buckets: Of the manifest.
        first: The first that comes.
        homes: The memory of each that comes in place, from ``first`` on; None for the others.
        device: Where they come.
        header_device: Where their headers do.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        first: int,
        homes: Sequence[Tensor | None],
        device: torch.device,
        header_device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._first = self._next = first
        self._homes = homes
        guests = [b.size for b, home in zip(buckets[first:], homes, strict=True) if home is None]
        # Not kept for the next group: an aborted link may still write into what it was given.
        self._free = [
            torch.empty(max(guests), dtype=torch.uint8, device=device) if guests else None
            for _ in homes[:_AT_ONCE]
        ]
        self._headers = torch.zeros(len(homes), HEADER, dtype=torch.int64, device=header_device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def take(self) -> Slot | None:
        """For the next bucket; None if it is not its turn yet, or no bucket is left."""
        index = self._next
        if not self._free or index == len(self._buckets):
            return None
        self._next += 1
        buffer, home = self._free.pop(), self._homes[index - self._first]
        payload = home
        if payload is None:
            assert buffer is not None  # noqa: S101 - there are buffers if one bucket needs them
            payload = buffer[: self._buckets[index].size]
        header = self._headers[index - self._first]
        return Slot(index, header, payload, home is not None, buffer)

    def give_back(self, slot: Slot) -> None:
        """The turn of one that has come, and with whose buffer nobody has anything to do any more,
        a device included.
        """
        self._free.append(slot.buffer)


def in_place_view(
    bucket: Bucket, targets: Mapping[int, Tensor], device: torch.device
) -> Tensor | None:
    """The memory of a bucket's tensors as one, if they lie on ``device`` as they do in the bucket,
    with what fills the last one up: digests read it.

    Args:
        bucket: Of a manifest.
        targets: The bytes of each tensor, by its index.
        device: Where the bucket comes, with its index.
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

"""The server's end of a transfer."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollwire_transport._bucket_digest import (
    HEADER_WORDS,
    BucketDigester,
    HostCopy,
    UpdateDigest,
    check_header,
    magic,
)
from rollwire_transport._concurrency import fast_thread_switching
from rollwire_transport._errors import ManifestError, TransportError, TransportTimeout
from rollwire_transport._layout import in_place_view, validate
from rollwire_transport._manifest import as_bytes, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from rollwire_transport._links.base import Link, Transfer
    from rollwire_transport._manifest import Bucket, Manifest

# One bucket is unpacked and the one before it verified, while two are being received.
_SLOTS = 4

# On a GPU, each request of this process interrupts another one that samples there. So buckets that
# need no unpacking are verified many at a time.
_DIGEST_SECONDS = 0.1


class Receiver:
    """Receives an update into tensors, over one group after another until all is there.

    ``next_bucket``, ``received_bytes`` and ``complete`` may be read from any thread.

    Args:
        manifest: The layout of the update.
        destination: A contiguous tensor for each name that is sent (aliases may be left out), on
            any device. Holds garbage until ``complete``. Where tensors lie in one memory on the
            link's device as in the buckets (see ``packed_views``), buckets are received in place,
            and padding between the tensors is overwritten.

    Raises:
        ManifestError: The manifest is not valid, or the destination does not fit it.
    """

    def __init__(self, manifest: Manifest, destination: Mapping[str, Tensor]) -> None:
        validate(manifest)
        self._manifest = manifest
        self._update_digest = UpdateDigest(manifest)
        self._targets = _bytes_by_index(manifest, destination)
        self._next_bucket = 0
        self._received_bytes = 0

    @property
    def next_bucket(self) -> int:
        """All buckets before this one are received and verified."""
        return self._next_bucket

    @property
    def received_bytes(self) -> int:
        """Bytes of the buckets before ``next_bucket``."""
        return self._received_bytes

    @property
    def complete(self) -> bool:
        """Whether every bucket is received and verified."""
        return self._next_bucket == len(self._manifest.buckets)

    @property
    def digests(self) -> dict[str, int]:
        """The digest of each tensor, without aliases, once complete."""
        return self._update_digest.tensors()

    @property
    def digest(self) -> int:
        """The digest of the whole update, once complete."""
        return self._update_digest.total()

    def receive(self, link: Link, *, first_bucket: int, bucket_timeout: float) -> None:
        """Receives the buckets from ``first_bucket`` on; returns when all are here.

        Whatever fails, the link is aborted before this raises, so that the others learn of it.

        Args:
            link: A connected link of a rank above 0.
            first_bucket: Where the sender begins; buckets that are here already are verified and
                unpacked again.
            bucket_timeout: Seconds to wait for one bucket.

        Raises:
            DigestMismatch: A bucket's bytes are not what was sent.
            TransportError: The sender, or a relay before this end, failed.
        """
        try:
            with fast_thread_switching(), link.stream_context():
                self._receive_buckets(link, first_bucket, bucket_timeout)
            link.finish()
            self._update_digest.precompute()
        except BaseException as error:
            link.abort()
            # Whoever keeps the error must not keep the destination with it.
            traceback.clear_frames(error.__traceback__)
            raise

    def release(self) -> None:
        """Drops the destination; nothing can be received after this."""
        self._targets = {}

    def _receive_buckets(self, link: Link, first_bucket: int, bucket_timeout: float) -> None:
        """A bucket's stages: in flight, arrived, digested on its device, verified here."""
        if not 0 <= first_bucket <= self._next_bucket:
            raise TransportError(
                f"the sender begins at bucket {first_bucket}, but here {self._next_bucket} is the "
                "first that is missing",
                link.upstream,
            )
        buckets = self._manifest.buckets
        digester = BucketDigester(buckets[first_bucket:], first_bucket, link.device, link.transfers)
        views = self._in_place_views(first_bucket, link.device)
        slots = SlotPool(buckets, first_bucket, views, link.device, link.header_device)
        in_flight: deque[tuple[Slot, Transfer]] = deque()
        arrived: list[Slot] = []
        digested: deque[_DigestedSlots] = deque()
        last_digest_at = time.monotonic()

        def post_receives() -> None:
            while (slot := slots.acquire()) is not None:
                in_flight.append((slot, link.receive(slot.header, slot.payload)))

        def digest_arrived() -> None:
            nonlocal last_digest_at
            last_digest_at = time.monotonic()
            if arrived:
                batch = arrived.copy()
                arrived.clear()
                digested.append(self._digest_and_unpack(batch, digester, link.upstream))

        def verify_oldest() -> None:
            batch = digested.popleft()
            try:
                self._verify(batch, link.upstream)
            except TransportError:
                arrived.clear()
                digested.clear()
                raise
            for slot in batch.slots:
                if not slot.in_place:
                    slots.release(slot)

        post_receives()
        try:
            while in_flight:
                slot, transfer = in_flight.popleft()
                self._wait(slot, transfer, bucket_timeout, link)
                arrived.append(slot)
                if slot.in_place:
                    slots.release(slot)
                    post_receives()
                    recent = time.monotonic() - last_digest_at < _DIGEST_SECONDS
                    if recent and _digests_in_batches(link.device):
                        continue
                digest_arrived()
                if len(digested) > 1:  # the device works on the newer ones meanwhile
                    verify_oldest()
                    post_receives()
        except BaseException:
            # At once: a device that waits for a bucket that never comes would hold up other work.
            link.abort()
            raise
        finally:
            digest_arrived()
            while digested:
                verify_oldest()

    def _in_place_views(self, first: int, device: torch.device) -> list[Tensor | None]:
        """Where the buckets from ``first`` on can be received in place.

        Not those that are verified already: only what has the right digest may overwrite them.
        """
        device = torch.empty(0, device=device).device  # with its index
        return [
            None if index < self._next_bucket else in_place_view(bucket, self._targets, device)
            for index, bucket in enumerate(self._manifest.buckets[first:], start=first)
        ]

    def _wait(self, slot: Slot, transfer: Transfer, timeout: float, link: Link) -> None:
        try:
            transfer.wait(timeout)
        except TransportTimeout:
            # If the sender sends a bucket of another size, that never comes, but its header does.
            if any(header := slot.header.tolist()):
                expected = (
                    *(magic(link.transfers), slot.index, slot.payload.numel()),
                    header[-1],
                )
                check_header(header, expected, link.upstream)
            raise

    def _digest_and_unpack(
        self, batch: Sequence[Slot], digester: BucketDigester, peer: int
    ) -> _DigestedSlots:
        records = []
        for slot in batch:
            records.append(digester.record(slot.index, slot.payload))
            if slot.index < self._next_bucket:  # verified already: verify again before the copy
                self._verify(_DigestedSlots.of([slot], records[-1:]), peer)
            if not slot.in_place:
                self._unpack(slot)
        # The host copies are queued after the unpacking: once they are here, that is done too.
        return _DigestedSlots.of(batch, records)

    def _unpack(self, slot: Slot) -> None:
        for span in self._manifest.buckets[slot.index].spans:
            piece = slot.payload[span.bucket_offset : span.bucket_offset + span.length]
            target = self._targets[span.tensor]
            there = target[span.tensor_offset : span.tensor_offset + span.length]
            there.copy_(piece, non_blocking=piece.is_cuda)

    def _verify(self, batch: _DigestedSlots, peer: int) -> None:
        """Compares headers; afterwards the device has no work left with these slots."""
        headers, records = iter(batch.headers.read()), iter(batch.records.read())
        for slot in batch.slots:
            bucket = self._manifest.buckets[slot.index]
            header = list(itertools.islice(headers, HEADER_WORDS))
            record = list(itertools.islice(records, HEADER_WORDS + len(bucket.spans)))
            check_header(header, record[:HEADER_WORDS], peer)
            self._update_digest.add_bucket(slot.index, record[HEADER_WORDS:])
            if slot.index == self._next_bucket:
                self._received_bytes += bucket.size
                self._next_bucket += 1


def _digests_in_batches(device: torch.device) -> bool:
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Slot:
    """Memory for the bucket of this index."""

    index: int
    header: Tensor
    payload: Tensor
    in_place: bool  # the payload is the memory of the bucket's tensors, and needs no unpacking
    buffer: Tensor | None  # of the pool, whether it is used or not


class SlotPool:
    """Slots for the buckets from ``first`` on, in their order, a few at a time.

    From there on ``views`` has the memory of each bucket that is received in place, else None.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        first: int,
        views: Sequence[Tensor | None],
        device: torch.device,
        header_device: torch.device,
    ) -> None:
        self._buckets = buckets
        self._first = self._next = first
        self._views = views
        sizes = [b.size for b, view in zip(buckets[first:], views, strict=True) if view is None]
        # Not kept for the next group: an aborted link may still write into its buffers.
        self._free = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) if sizes else None
            for _ in views[:_SLOTS]
        ]
        self._headers = torch.zeros(
            len(views), HEADER_WORDS, dtype=torch.int64, device=header_device
        )
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def acquire(self) -> Slot | None:
        index = self._next
        if not self._free or index == len(self._buckets):
            return None
        self._next += 1
        buffer, view = self._free.pop(), self._views[index - self._first]
        payload = view
        if payload is None:
            assert buffer is not None  # noqa: S101 - there are buffers if one bucket needs them
            payload = buffer[: self._buckets[index].size]
        header = self._headers[index - self._first]
        return Slot(index, header, payload, view is not None, buffer)

    def release(self, slot: Slot) -> None:
        """Returns a slot once its bucket has arrived and no device work uses its buffer."""
        self._free.append(slot.buffer)


@dataclass(frozen=True, slots=True)
class _DigestedSlots:
    """Buckets that have arrived: the headers that came with them, and the records computed here."""

    slots: tuple[Slot, ...]
    headers: HostCopy
    records: HostCopy

    @classmethod
    def of(cls, slots: Sequence[Slot], records: list[Tensor]) -> _DigestedSlots:
        headers = [slot.header for slot in slots]
        return cls(tuple(slots), HostCopy(torch.cat(headers)), HostCopy(torch.cat(records)))


def _bytes_by_index(manifest: Manifest, destination: Mapping[str, Tensor]) -> dict[int, Tensor]:
    targets, problems = {}, []
    for index, spec in enumerate(manifest.tensors):
        if spec.alias_of is not None:
            continue
        tensor = destination.get(spec.name)
        if tensor is None:
            problems.append(f"{spec.name} has no destination")
        elif describe(spec.name, tensor) != spec:
            problems.append(f"{spec.name} has a destination of another dtype or shape")
        elif not tensor.is_contiguous():
            problems.append(f"{spec.name} has a destination that is not contiguous")
        else:
            targets[index] = as_bytes(tensor)
    if problems:
        raise ManifestError(problems)
    return targets

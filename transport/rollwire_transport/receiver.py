"""The server's end of a transfer."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport.checks import ManifestError, validate
from rollwire_transport.errors import TransportError, TransportTimeout
from rollwire_transport.host_copy import HostCopy
from rollwire_transport.ledger import Ledger
from rollwire_transport.sealing import HEADER, MAGIC, Sealer, check_header
from rollwire_transport.switching import promptly
from rollwire_transport.tensors import as_bytes, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_transport.links.base import Link, Transfer
    from rollwire_transport.manifest import Bucket, Manifest

# One bucket is unpacked, and the one before looked at, while two are under way.
_BUFFERS = 4


class Receiver:
    """Receives an update into tensors, over one group after another until all is there.

    ``next_bucket``, ``received_bytes`` and ``complete`` may be read from any thread.

    Args:
        manifest: The layout of the update.
        destination: A contiguous tensor for each name that is sent (aliases may be left out), on
            any device. Holds garbage until ``complete``.

    Raises:
        ManifestError: The manifest is not valid, or the destination does not fit it.
    """

    def __init__(self, manifest: Manifest, destination: Mapping[str, Tensor]) -> None:
        validate(manifest)
        self._manifest = manifest
        self._ledger = Ledger(manifest)
        self._targets = _targets(manifest, destination)
        self._next_bucket = 0
        self._received_bytes = 0

    @property
    def next_bucket(self) -> int:
        """All buckets before this one are here, verified."""
        return self._next_bucket

    @property
    def received_bytes(self) -> int:
        """Bytes of the buckets before ``next_bucket``."""
        return self._received_bytes

    @property
    def complete(self) -> bool:
        """Whether every bucket is here, verified."""
        return self._next_bucket == len(self._manifest.buckets)

    @property
    def digests(self) -> dict[str, int]:
        """The digest of each tensor, aliases left out, once complete."""
        return self._ledger.digests()

    @property
    def digest(self) -> int:
        """The digest of the whole update, once complete."""
        return self._ledger.digest()

    def receive(self, link: Link, *, first_bucket: int, bucket_timeout: float) -> None:
        """Receives the buckets from ``first_bucket`` on; returns when all are here.

        Whatever fails, the link is aborted before this raises, so that the others learn of it.

        Args:
            link: A fresh link of a rank above 0.
            first_bucket: Where the sender begins; buckets that are here already are verified and
                unpacked again.
            bucket_timeout: Seconds to wait for one bucket.

        Raises:
            DigestMismatch: A bucket's bytes are not what was sent.
            TransportError: The sender, or a relay before this end, failed.
        """
        try:
            with promptly(), link.lane():
                self._receive(link, first_bucket, bucket_timeout)
            link.finish(bucket_timeout)
            self._ledger.settle()
        except BaseException:
            link.abort()
            raise

    def _receive(self, link: Link, first_bucket: int, bucket_timeout: float) -> None:
        if not 0 <= first_bucket <= self._next_bucket:
            raise TransportError(
                f"the sender begins at bucket {first_bucket}, but here {self._next_bucket} is the "
                "first that is missing",
                link.upstream,
            )
        buckets = self._manifest.buckets
        sealer = Sealer(buckets[first_bucket:], first_bucket, link.device)
        slots = _Slots(buckets, first_bucket, link.device)
        in_flight: deque[tuple[_Slot, Transfer]] = deque()
        arrived: deque[_Arrival] = deque()

        def post() -> None:
            while (slot := slots.take()) is not None:
                in_flight.append((slot, link.receive(slot.header, slot.payload)))

        def look() -> None:
            arrival = arrived.popleft()
            try:
                self._enter(arrival, link.upstream)
            except TransportError:
                arrived.clear()
                raise
            slots.give_back(arrival.slot)

        post()
        try:
            while in_flight:
                slot, transfer = in_flight.popleft()
                self._wait(slot, transfer, bucket_timeout, link.upstream)
                arrived.append(self._take(slot, sealer, link.upstream))
                if len(arrived) > 1:  # while a device is at one, the one before is looked at
                    look()
                    post()
        finally:
            while arrived:
                look()

    def _wait(self, slot: _Slot, transfer: Transfer, timeout: float, peer: str) -> None:
        try:
            transfer.wait(timeout)
        except TransportTimeout:
            # A bucket of another size never comes in its place, but its header does.
            if any(header := slot.header.tolist()):
                expected = (MAGIC, slot.index, slot.payload.numel(), header[-1])
                check_header(header, expected, peer)
            raise

    def _take(self, slot: _Slot, sealer: Sealer, peer: str) -> _Arrival:
        """Unpacks a bucket, which nobody has looked at yet; a device is only told to."""
        record = sealer.seal(slot.index, slot.payload)
        if slot.index < self._next_bucket:  # only by what was sent may it be replaced
            self._enter(_Arrival.of(slot, record), peer)
        for span in self._manifest.buckets[slot.index].spans:
            piece = slot.payload[span.bucket_offset : span.bucket_offset + span.length]
            target = self._targets[span.tensor]
            there = target[span.tensor_offset : span.tensor_offset + span.length]
            # What a device copies is there once the record is, which comes after it.
            there.copy_(piece, non_blocking=piece.is_cuda)
        return _Arrival.of(slot, record)

    def _enter(self, arrival: _Arrival, peer: str) -> None:
        """Notes a bucket if it is what was sent; a device is done with it then."""
        index, numbers = arrival.slot.index, arrival.header_and_record.read()
        header, record = numbers[:HEADER], numbers[HEADER:]
        check_header(header, record[:HEADER], peer)
        self._ledger.enter(index, record[HEADER:])
        if index == self._next_bucket:
            self._received_bytes += self._manifest.buckets[index].size
            self._next_bucket += 1


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where one bucket comes."""

    index: int
    header: Tensor
    payload: Tensor
    buffer: Tensor


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A bucket that has come: what came with it, and what should have."""

    slot: _Slot
    header_and_record: HostCopy

    @classmethod
    def of(cls, slot: _Slot, record: Tensor) -> _Arrival:
        return cls(slot, HostCopy(torch.cat([slot.header, record])))


class _Slots:
    """Memory for the buckets from ``first`` on, some of which share theirs."""

    def __init__(self, buckets: Sequence[Bucket], first: int, device: torch.device) -> None:
        self._buckets = buckets
        self._first = self._next = first
        sizes = [bucket.size for bucket in buckets[first:]]
        # Not kept for the next group: an aborted link may still write into what it was given.
        self._free = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in sizes[:_BUFFERS]
        ]
        self._headers = torch.zeros(len(sizes), HEADER, dtype=torch.int64, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def take(self) -> _Slot | None:
        """For the next bucket; None if no memory is free, or no bucket left."""
        index = self._next
        if not self._free or index == len(self._buckets):
            return None
        self._next += 1
        buffer = self._free.pop()
        payload = buffer[: self._buckets[index].size]
        return _Slot(index, self._headers[index - self._first], payload, buffer)

    def give_back(self, slot: _Slot) -> None:
        """The memory of one with which nobody has anything to do any more, a device included."""
        self._free.append(slot.buffer)


def _targets(manifest: Manifest, destination: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """The bytes of each tensor that is sent, by its index."""
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

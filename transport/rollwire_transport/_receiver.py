"""The server's end of a transfer."""

from __future__ import annotations

import itertools
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport._bucket_header import HEADER, MAGIC, Sealer, check_header
from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._host_copy import HostCopy
from rollwire_transport._ledger import Ledger
from rollwire_transport._slots import Slots, in_place_view
from rollwire_transport._tensors import as_bytes, describe
from rollwire_transport._thread_switching import fast_thread_switching
from rollwire_transport._validation import ManifestError, validate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_transport._links.base import Link, Transfer
    from rollwire_transport._manifest import Manifest
    from rollwire_transport._slots import Slot

# A GPU goes from one process to another for each thing that this one asks of it, and another that
# samples on it waits. So buckets that need no unpacking are verified many at a time.
_SEAL_SECONDS = 0.1


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
            with fast_thread_switching(), link.lane():
                self._receive(link, first_bucket, bucket_timeout)
            link.finish(bucket_timeout)
            self._ledger.settle()
        except BaseException as error:
            link.abort()
            # Whoever keeps the error does not keep the destination with it.
            traceback.clear_frames(error.__traceback__)
            raise

    def release(self) -> None:
        """Lets go of the destination, into which nothing can be received any more."""
        self._targets = {}

    def _receive(self, link: Link, first_bucket: int, bucket_timeout: float) -> None:
        if not 0 <= first_bucket <= self._next_bucket:
            raise TransportError(
                f"the sender begins at bucket {first_bucket}, but here {self._next_bucket} is the "
                "first that is missing",
                link.upstream,
            )
        buckets = self._manifest.buckets
        sealer = Sealer(buckets[first_bucket:], first_bucket, link.device)
        homes = self._homes(first_bucket, link.device)
        slots = Slots(buckets, first_bucket, homes, link.device, link.header_device)
        in_flight: deque[tuple[Slot, Transfer]] = deque()
        come: list[Slot] = []
        sealed: deque[_Sealed] = deque()
        last_seal = time.monotonic()

        def post() -> None:
            while (slot := slots.take()) is not None:
                in_flight.append((slot, link.receive(slot.header, slot.payload)))

        def seal() -> None:
            nonlocal last_seal
            last_seal = time.monotonic()
            if come:
                some = come.copy()
                come.clear()
                sealed.append(self._seal(some, sealer, link.upstream))

        def look() -> None:
            some = sealed.popleft()
            try:
                self._enter(some, link.upstream)
            except TransportError:
                come.clear()
                sealed.clear()
                raise
            for slot in some.slots:
                if not slot.in_place:
                    slots.give_back(slot)

        post()
        try:
            while in_flight:
                slot, transfer = in_flight.popleft()
                self._wait(slot, transfer, bucket_timeout, link.upstream)
                come.append(slot)
                if slot.in_place:
                    slots.give_back(slot)
                    post()
                    if _patient(link.device) and time.monotonic() - last_seal < _SEAL_SECONDS:
                        continue
                seal()
                if len(sealed) > 1:  # while a device is at some, those before are looked at
                    look()
                    post()
        except BaseException:
            # Now: a device that waits for what never comes may hold up what else is asked of it.
            link.abort()
            raise
        finally:
            seal()
            while sealed:
                look()

    def _homes(self, first: int, device: torch.device) -> list[Tensor | None]:
        """Where the buckets from ``first`` on come in place: not those that are here already, which
        only what was sent may replace.
        """
        device = torch.empty(0, device=device).device  # with its index
        return [
            None if index < self._next_bucket else in_place_view(bucket, self._targets, device)
            for index, bucket in enumerate(self._manifest.buckets[first:], start=first)
        ]

    def _wait(self, slot: Slot, transfer: Transfer, timeout: float, peer: str) -> None:
        try:
            transfer.wait(timeout)
        except TransportTimeout:
            # A bucket of another size never comes in its place, but its header does.
            if any(header := slot.header.tolist()):
                expected = (MAGIC, slot.index, slot.payload.numel(), header[-1])
                check_header(header, expected, peer)
            raise

    def _seal(self, come: Sequence[Slot], sealer: Sealer, peer: str) -> _Sealed:
        """Computes records, and unpacks what is not in place; a device is only told to."""
        records = []
        for slot in come:
            records.append(sealer.seal(slot.index, slot.payload))
            if slot.index < self._next_bucket:
                self._enter(_Sealed.of([slot], records[-1:]), peer)
            if not slot.in_place:
                self._unpack(slot)
        # What a device copies is there once these are, which come after it.
        return _Sealed.of(come, records)

    def _unpack(self, slot: Slot) -> None:
        for span in self._manifest.buckets[slot.index].spans:
            piece = slot.payload[span.bucket_offset : span.bucket_offset + span.length]
            target = self._targets[span.tensor]
            there = target[span.tensor_offset : span.tensor_offset + span.length]
            there.copy_(piece, non_blocking=piece.is_cuda)

    def _enter(self, some: _Sealed, peer: str) -> None:
        """Notes buckets that are what was sent; a device is done with them then."""
        headers, records = iter(some.headers.read()), iter(some.records.read())
        for slot in some.slots:
            bucket = self._manifest.buckets[slot.index]
            header = list(itertools.islice(headers, HEADER))
            record = list(itertools.islice(records, HEADER + len(bucket.spans)))
            check_header(header, record[:HEADER], peer)
            self._ledger.enter(slot.index, record[HEADER:])
            if slot.index == self._next_bucket:
                self._received_bytes += bucket.size
                self._next_bucket += 1


@dataclass(frozen=True, slots=True)
class _Sealed:
    """Buckets that have come; of each the header that came with it, and the record."""

    slots: tuple[Slot, ...]
    headers: HostCopy
    records: HostCopy

    @classmethod
    def of(cls, slots: Sequence[Slot], records: list[Tensor]) -> _Sealed:
        headers = [slot.header for slot in slots]
        return cls(tuple(slots), HostCopy(torch.cat(headers)), HostCopy(torch.cat(records)))


def _patient(device: torch.device) -> bool:
    """Whether buckets in place wait for each other to be verified."""
    return device.type != "cpu"


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

"""The trainer's end of a transfer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwire_transport._bucket_header import HEADER, Sealer
from rollwire_transport._errors import SourceError, TransportError
from rollwire_transport._host_copy import HostCopy
from rollwire_transport._ledger import Ledger
from rollwire_transport._tensors import (
    DTYPES,
    as_bytes,
    close_source,
    describe,
    materialize,
    nbytes,
)
from rollwire_transport._thread_switching import fast_thread_switching
from rollwire_transport._validation import ManifestError, validate

if TYPE_CHECKING:
    from rollwire_transport._links.base import Link, Transfer
    from rollwire_transport._manifest import Bucket, Manifest, Span, TensorSpec

Source = Callable[[], Iterable[tuple[str, Tensor | Callable[[], Tensor]]]]

# One bucket is packed while two are under way.
_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class PackingStatus:
    """A bucket that is being packed.

    Attributes:
        tensor: What the source was asked for last.
        since: When the bucket was begun, by ``time.monotonic``.
    """

    tensor: str
    since: float


class Sender:
    """Sends an update, bucket by bucket, over one group after another until all is there.

    Attributes:
        packing: The bucket that is being packed now, for who watches from another thread: a source
            may take its time, or hang.

    Raises:
        ManifestError: The manifest is not valid.
    """

    def __init__(self, manifest: Manifest) -> None:
        validate(manifest)
        self._manifest = manifest
        self._ledger = Ledger(manifest)
        self.packing: PackingStatus | None = None

    @property
    def digests(self) -> dict[str, int]:
        """The digest of each tensor, aliases left out, once every bucket was sent."""
        return self._ledger.digests()

    @property
    def digest(self) -> int:
        """The digest of the whole update, once every bucket was sent."""
        return self._ledger.digest()

    def send(
        self,
        link: Link,
        source: Source,
        *,
        first_bucket: int = 0,
        bucket_timeout: float,
        progress: Callable[[int], None] | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        """Sends the buckets from ``first_bucket`` on; returns when every receiver has them.

        Whatever fails, the link is aborted before this raises, so that the others learn of it.

        Args:
            link: A fresh link of rank 0.
            source: Gives an iterator of (name, tensor) in the manifest's order; aliases may be
                left out. It is advanced when a bucket needs the next tensor, and each tensor is
                let go of before the next one is asked for. Any strides, any device. A DTensor is
                gathered when it is needed, which all ranks of its mesh have to do side by side. A
                function in place of a tensor is called when the tensor is needed: not for those
                before ``first_bucket``.
            first_bucket: The lowest one that a receiver misses.
            bucket_timeout: Seconds that one bucket may take.
            progress: Called with the bytes of the update that are sent, those before
                ``first_bucket`` included, after each bucket.
            stop: Once it is set the source is asked for nothing more. What waits for a receiver is
                ended by the link's ``abort``.

        Raises:
            ManifestError: The source gives something else than the manifest says. The buckets
                before that tensor were sent.
            SourceError: The source raised something.
            TransportError: A receiver failed; ``peer`` names it. Or ``stop`` was set.
        """
        buckets = self._manifest.buckets
        if not 0 <= first_bucket <= len(buckets):
            raise ValueError(f"first_bucket is {first_bucket}, there are {len(buckets)} buckets")
        reader = _Reader(self._manifest, source, self._ask, stop or threading.Event())
        try:
            with fast_thread_switching(), link.lane():
                self._send(link, reader, first_bucket, bucket_timeout, progress or (lambda _: None))
            link.finish(bucket_timeout)
            self._ledger.settle()
        except BaseException as error:
            link.abort()
            # Whoever keeps the error does not keep tensors and buffers with it.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self.packing = None
            reader.close()

    def _send(
        self,
        link: Link,
        reader: _Reader,
        first_bucket: int,
        bucket_timeout: float,
        progress: Callable[[int], None],
    ) -> None:
        buckets = self._manifest.buckets
        largest = max((b.size for b in buckets[first_bucket:]), default=0)
        sealer = Sealer(buckets[first_bucket:], first_bucket, link.device)
        sent = sum(b.size for b in buckets[:first_bucket])
        packed: deque[_Packed] = deque()  # whose sums are not entered yet
        in_flight: deque[_Flight] = deque()

        def note() -> None:
            bucket = packed.popleft()
            # A device may have been told only to gather and to copy so far. What a slow link took
            # before is not the source's time.
            self.packing = PackingStatus(bucket.tensor, time.monotonic())
            self._ledger.enter(bucket.index, bucket.record.read()[HEADER:])
            self.packing = None

        def land() -> Tensor:
            nonlocal sent
            flight = in_flight.popleft()
            note()
            flight.transfer.wait(bucket_timeout)
            sent += buckets[flight.index].size
            progress(sent)
            return flight.buffer

        try:
            for index in range(first_bucket, len(buckets)):
                bucket = buckets[index]
                if len(in_flight) < _BUFFERS:
                    buffer = torch.empty(largest, dtype=torch.uint8, device=link.device)
                else:
                    buffer = land()
                payload = buffer[: bucket.size]
                self.packing = PackingStatus(reader.tensor_of(bucket.spans[0]), time.monotonic())
                reader.pack(bucket, payload)
                record = sealer.seal(index, payload)
                packed.append(_Packed(index, self.packing.tensor, HostCopy(record)))
                transfer = link.send(record[:HEADER], payload)
                self.packing = None
                in_flight.append(_Flight(index, buffer, transfer))
            while in_flight:
                land()
        finally:
            while packed:  # a receiver may have it
                note()

    def _ask(self, tensor: str) -> None:
        """Notes what the source is asked for."""
        if self.packing is not None:
            self.packing = PackingStatus(tensor, self.packing.since)


@dataclass(frozen=True, slots=True)
class _Packed:
    """A bucket that is on its way into its buffer, or there."""

    index: int
    tensor: str  # what the source was asked for last
    record: HostCopy


@dataclass(frozen=True, slots=True)
class _Flight:
    """A bucket under way to the receivers."""

    index: int
    buffer: Tensor
    transfer: Transfer


class _Reader:
    """Walks a source beside the manifest, one tensor at a time.

    Args:
        manifest: The layout.
        source: What is walked.
        asking: Called with the name of a tensor before the source is asked for it.
        stop: Once it is set nothing more is asked for.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        asking: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._specs = manifest.tensors
        self._aliases = {spec.name for spec in manifest.tensors if spec.alias_of is not None}
        self._source = source
        self._asking = asking
        self._stop = stop
        self._items: Iterator[tuple[str, Tensor | Callable[[], Tensor]]] | None = None
        self._index = -1
        self._given: Any = None  # what a source gives is what it likes
        self._tensor: Tensor | None = None

    def tensor_of(self, span: Span) -> str:
        """Its name."""
        return self._specs[span.tensor].name

    def close(self) -> None:
        """Ends the source, in the thread that it ran in."""
        self._given = self._tensor = None
        items, self._items = self._items, None
        close_source(items)

    def pack(self, bucket: Bucket, payload: Tensor) -> None:
        """Copies a bucket's spans out of the source; buckets come in their order."""
        for span in bucket.spans:
            while self._index < span.tensor:
                self._advance()
            if self._tensor is None:
                self._take()
            self._copy(span, payload[span.bucket_offset : span.bucket_offset + span.length])

    def _advance(self) -> None:
        """Moves on to the next tensor, which may not be needed."""
        self._given = self._tensor = None
        self._index += 1
        spec = self._specs[self._index]
        self._check_wanted()
        self._asking(spec.name)
        while True:
            with _told(spec.name):
                if self._items is None:
                    self._items = iter(self._source())
                item = next(self._items, None)
            if item is None:
                raise ManifestError(
                    [f"tensor {self._index} ({spec.name}): the source ended before it"]
                )
            try:
                name, self._given = item
            except (TypeError, ValueError) as error:
                raise self._other(f"a {type(item).__name__}, not a name and a tensor") from error
            del item
            if name not in self._aliases:
                break
        if name != spec.name:
            raise self._other(name)

    def _take(self) -> None:
        """The tensor itself, whole."""
        self._check_wanted()
        spec, given = self._specs[self._index], self._given
        self._given = None
        with _told(spec.name):
            tensor = materialize(given)
            del given
        try:
            found = describe(spec.name, tensor)
        except ValueError as error:
            raise self._other(f"what cannot travel: {error}") from error
        if found != spec:
            raise self._other(_words(found))
        if tensor.is_meta:
            raise self._other(f"{spec.name} on the meta device, which holds nothing")
        self._tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.is_cuda:  # let go of before the device has read it: its memory is kept so long
            tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def _check_wanted(self) -> None:
        if self._stop.is_set():
            raise TransportError("the transfer was ended here")

    def _other(self, given: str) -> ManifestError:
        wanted = _words(self._specs[self._index])
        return ManifestError(
            [f"tensor {self._index} is {wanted} in the manifest, the source gave {given}"]
        )

    def _copy(self, span: Span, target: Tensor) -> None:
        assert self._tensor is not None  # noqa: S101 - _take has set it
        spec = self._specs[self._index]
        if not self._tensor.is_contiguous():
            if span.length == nbytes(spec):  # straight into the bucket, whatever its strides
                target.view(DTYPES[spec.dtype]).view(spec.shape).copy_(self._tensor)
                return
            self._tensor = self._tensor.contiguous()
        data = as_bytes(self._tensor)
        target.copy_(data[span.tensor_offset : span.tensor_offset + span.length])


@contextlib.contextmanager
def _told(tensor: str) -> Iterator[None]:
    """Says of what the source raises which tensor it was asked for."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:  # of a loop of its own: here is none
        raise SourceError(tensor, error) from error


def _words(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"

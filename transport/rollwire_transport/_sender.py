"""The trainer's end of a transfer."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_transport._bucket_digest import HEADER_WORDS, BucketDigester, HostCopy, UpdateDigest
from rollwire_transport._cast import Casts
from rollwire_transport._concurrency import fast_thread_switching
from rollwire_transport._layout import validate
from rollwire_transport._source import SourceReader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from rollwire_transport._links.base import Link, Transfer
    from rollwire_transport._manifest import Manifest
    from rollwire_transport._source import Source

# One bucket is packed while two are being sent.
_BUFFERS = 3


@dataclass(frozen=True, slots=True)
class PackingStatus:
    """A bucket that is being packed.

    Attributes:
        tensor: What the source was asked for last; "": its end.
        started_at: When packing the bucket began, or the source gave a tensor before its turn, by
            ``time.monotonic``.
    """

    tensor: str
    started_at: float


class Sender:
    """Sends an update bucket by bucket, over one group after another until all is there.

    Args:
        manifest: The layout, and the dtypes that receivers expect.
        cast: Whether floating-point tensors of other dtypes are cast to these, each piece as it is
            packed.

    Attributes:
        packing: The bucket that is being packed now, to be read from another thread: a source may
            be slow, or hang.

    Raises:
        ManifestError: The manifest is not valid.
    """

    def __init__(self, manifest: Manifest, *, cast: bool = True) -> None:
        validate(manifest)
        self._manifest = manifest
        self._casts = Casts() if cast else None
        self._update_digest = UpdateDigest(manifest)
        self.packing: PackingStatus | None = None

    @property
    def digests(self) -> dict[str, int]:
        """The digest of each tensor, without aliases, once every bucket was sent."""
        return self._update_digest.tensors()

    @property
    def digest(self) -> int:
        """The digest of the whole update, once every bucket was sent."""
        return self._update_digest.total()

    @property
    def casts(self) -> dict[str, str]:
        """By name, the dtypes from which tensors were cast."""
        return {} if self._casts is None else dict(self._casts.dtypes)

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
        """Sends the buckets from ``first_bucket`` on; returns when the link is done with them.

        Receivers may get the last ones a little later. Whatever fails, the link is aborted before
        this raises.

        Args:
            link: A connected link of rank 0.
            source: Returns an iterable of (name, tensor) of all tensors; aliases may be left out.
                The manifest's order is the best: it is advanced when a bucket needs the next
                tensor, and each tensor is dropped before the next one is asked for. A tensor that
                comes before its turn is copied to host memory until then. Once all is packed the
                source is run to its end. Any strides, any device. A DTensor is gathered when it is
                needed, which all ranks of its mesh must do together. A function in place of a
                tensor is called when the tensor is needed: not for those before ``first_bucket``.
                In place of a tensor that packs experts, their matrices may come (``matrices_in``).
            first_bucket: The lowest one that a receiver misses.
            bucket_timeout: Seconds that one bucket may take.
            progress: Called after each bucket with the bytes of the update that are sent, those
                before ``first_bucket`` included.
            stop: Once it is set, the source is asked for nothing more. To end a wait for a
                receiver, abort the link.

        Raises:
            ManifestError: The source does not give what the manifest says; the buckets before that
                tensor were sent. Or a cast made a finite value infinite; this is checked once all
                is packed.
            TensorSourceError: The source raised.
            TransportError: A receiver failed, and ``peer`` names it; or ``stop`` was set.
        """
        buckets = self._manifest.buckets
        if not 0 <= first_bucket <= len(buckets):
            raise ValueError(f"first_bucket is {first_bucket}, there are {len(buckets)} buckets")
        stop = stop or threading.Event()
        reader = SourceReader(
            self._manifest, source, first_bucket, self._casts, self._on_request, stop
        )
        try:
            with fast_thread_switching(), link.stream_context():
                self._send_buckets(
                    link, reader, first_bucket, bucket_timeout, progress or (lambda _: None)
                )
            link.finish()
            self._update_digest.precompute()
        except BaseException as error:
            link.abort()
            # Whoever keeps the error must not keep tensors and buffers with it.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self.packing = PackingStatus("", time.monotonic())  # it may hang as it is closed too
            reader.close()
            self.packing = None

    def _send_buckets(
        self,
        link: Link,
        reader: SourceReader,
        first_bucket: int,
        bucket_timeout: float,
        progress: Callable[[int], None],
    ) -> None:
        buckets = self._manifest.buckets
        largest = max((b.size for b in buckets[first_bucket:]), default=0)
        digester = BucketDigester(buckets[first_bucket:], first_bucket, link.device, link.transfers)
        sent = sum(b.size for b in buckets[:first_bucket])
        in_flight: deque[_BucketInFlight] = deque()

        def complete_oldest() -> Tensor:
            nonlocal sent
            bucket = in_flight[0]
            self._add_digest(bucket)
            assert bucket.transfer is not None  # noqa: S101 - ``send`` has returned it
            bucket.transfer.wait(bucket_timeout)
            in_flight.popleft()
            sent += buckets[bucket.index].size
            progress(sent)
            return bucket.buffer

        try:
            for index in range(first_bucket, len(buckets)):
                bucket = buckets[index]
                buffer = link.buffer(largest) if len(in_flight) < _BUFFERS else complete_oldest()
                payload = buffer[: bucket.size]
                first_tensor = self._manifest.tensors[bucket.spans[0].tensor].name
                self.packing = PackingStatus(first_tensor, time.monotonic())
                reader.pack(bucket, payload)
                record = digester.record(index, payload)
                packed = _BucketInFlight(index, buffer, self.packing.tensor, HostCopy(record))
                in_flight.append(packed)
                packed.transfer = link.send(record[:HEADER_WORDS], payload)
                self.packing = None
            if first_bucket < len(buckets):
                self.packing = PackingStatus("", time.monotonic())
                reader.finish()
                self.packing = None
            while in_flight:
                complete_oldest()
            if self._casts is not None:
                self._casts.check()
        finally:
            for packed in in_flight:  # a receiver may have it
                self._add_digest(packed)

    def _add_digest(self, bucket: _BucketInFlight) -> None:
        # The device may still gather and copy what the source gave, so the wait is the source's
        # time. What a slow link took before is not.
        self.packing = PackingStatus(bucket.last_tensor, time.monotonic())
        self._update_digest.add_bucket(bucket.index, bucket.record.read()[HEADER_WORDS:])
        self.packing = None

    def _on_request(self, tensor: str, *, another_came: bool = False) -> None:
        if self.packing is not None:
            started_at = time.monotonic() if another_came else self.packing.started_at
            self.packing = PackingStatus(tensor, started_at)


@dataclass(slots=True)
class _BucketInFlight:
    """A bucket from the time it is packed until the link is done with its buffer."""

    index: int
    buffer: Tensor
    last_tensor: str  # that the source was asked for
    record: HostCopy
    transfer: Transfer | None = None

"""The trainer's end of a transfer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rollwire_transport.checks import ManifestError, validate
from rollwire_transport.digest import span_sums
from rollwire_transport.header import write_header
from rollwire_transport.ledger import Ledger
from rollwire_transport.tensors import DTYPES, as_bytes, describe, nbytes

if TYPE_CHECKING:
    from rollwire_transport.links.base import Link, Transfer
    from rollwire_transport.manifest import Bucket, Manifest, Span, TensorSpec

Source = Callable[[], Iterable[tuple[str, Tensor]]]

# One bucket is packed while two are under way.
_BUFFERS = 3


class Sender:
    """Sends an update, bucket by bucket, over one group after another until all is there.

    Raises:
        ManifestError: The manifest is not valid.
    """

    def __init__(self, manifest: Manifest) -> None:
        validate(manifest)
        self._manifest = manifest
        self._ledger = Ledger(manifest)

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
    ) -> None:
        """Sends the buckets from ``first_bucket`` on; returns when every receiver has them.

        Whatever fails, the link is aborted before this raises, so that the others learn of it.

        Args:
            link: A fresh link of rank 0.
            source: Gives an iterator of (name, tensor) in the manifest's order; aliases may be
                left out. It is advanced when a bucket needs the next tensor, and each tensor is
                let go of before the next one is asked for. Any strides, any device.
            first_bucket: The lowest one that a receiver misses.
            bucket_timeout: Seconds that one bucket may take.
            progress: Called with the bytes of the update that are sent, those before
                ``first_bucket`` included, after each bucket.

        Raises:
            ManifestError: The source gives something else than the manifest says. The buckets
                before that tensor were sent.
            TransportError: A receiver failed; ``peer`` names it.
        """
        buckets = self._manifest.buckets
        if not 0 <= first_bucket <= len(buckets):
            raise ValueError(f"first_bucket is {first_bucket}, there are {len(buckets)} buckets")
        try:
            with link.lane():
                self._send(link, source, first_bucket, bucket_timeout, progress or (lambda _: None))
            link.finish(bucket_timeout)
        except BaseException:
            link.abort()
            raise

    def _send(
        self,
        link: Link,
        source: Source,
        first_bucket: int,
        bucket_timeout: float,
        progress: Callable[[int], None],
    ) -> None:
        buckets = self._manifest.buckets
        largest = max((b.size for b in buckets[first_bucket:]), default=0)
        sent = sum(b.size for b in buckets[:first_bucket])
        reader = _Reader(self._manifest, source())
        in_flight: deque[_Flight] = deque()

        def land() -> Tensor:
            nonlocal sent
            flight = in_flight.popleft()
            flight.transfer.wait(bucket_timeout)
            sent += flight.size
            progress(sent)
            return flight.buffer

        for index in range(first_bucket, len(buckets)):
            bucket = buckets[index]
            if len(in_flight) < _BUFFERS:
                buffer = torch.empty(largest, dtype=torch.uint8, device=link.device)
            else:
                buffer = land()
            payload = buffer[: bucket.size]
            reader.pack(bucket, payload)
            digest = self._ledger.enter(index, span_sums(payload, bucket.spans))
            header = write_header(index, bucket.size, digest, link.device)
            in_flight.append(_Flight(link.send(header, payload), buffer, bucket.size))
        while in_flight:
            land()


@dataclass(frozen=True, slots=True)
class _Flight:
    transfer: Transfer
    buffer: Tensor
    size: int


class _Reader:
    """Walks a source beside the manifest, one tensor at a time."""

    def __init__(self, manifest: Manifest, source: Iterable[tuple[str, Tensor]]) -> None:
        self._specs = manifest.tensors
        self._aliases = {spec.name for spec in manifest.tensors if spec.alias_of is not None}
        self._source: Iterator[tuple[str, Tensor]] = iter(source)
        self._index = -1
        self._tensor: Tensor | None = None

    def pack(self, bucket: Bucket, payload: Tensor) -> None:
        """Copies a bucket's spans out of the source; buckets come in their order."""
        for span in bucket.spans:
            while self._index < span.tensor:
                self._advance()
            self._copy(span, payload[span.bucket_offset : span.bucket_offset + span.length])

    def _advance(self) -> None:
        self._tensor = None
        self._index += 1
        spec = self._specs[self._index]
        for name, tensor in self._source:
            if name not in self._aliases:
                _check(self._index, spec, name, tensor)
                self._tensor = tensor.detach().resolve_conj().resolve_neg()
                return
        raise ManifestError([f"tensor {self._index} ({spec.name}): the source ended before it"])

    def _copy(self, span: Span, target: Tensor) -> None:
        assert self._tensor is not None  # noqa: S101 - _advance has set it
        spec = self._specs[self._index]
        if not self._tensor.is_contiguous():
            if span.length == nbytes(spec):  # straight into the bucket, whatever its strides
                target.view(DTYPES[spec.dtype]).view(spec.shape).copy_(self._tensor)
                return
            self._tensor = self._tensor.contiguous()
        data = as_bytes(self._tensor)
        target.copy_(data[span.tensor_offset : span.tensor_offset + span.length])


def _check(index: int, spec: TensorSpec, name: str, tensor: Tensor) -> None:
    if hasattr(tensor, "full_tensor"):
        raise ManifestError([f"tensor {index} ({name}) is a DTensor: gather it with full_tensor()"])
    got = describe(name, tensor)
    if (got.name, got.dtype, got.shape) != (spec.name, spec.dtype, spec.shape):
        raise ManifestError(
            [
                f"tensor {index} is {spec.name} {spec.dtype} {list(spec.shape)} in the manifest, "
                f"the source gave {got.name} {got.dtype} {list(got.shape)}"
            ]
        )

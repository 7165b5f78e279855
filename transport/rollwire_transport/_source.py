"""The tensors of an update as the sender gets them, one at a time, in the manifest's order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwire_transport._errors import ManifestError, TensorSourceError, TransportError
from rollwire_transport._tensors import DTYPES, as_bytes, describe, nbytes

if TYPE_CHECKING:
    import threading

    from rollwire_transport._manifest import Bucket, Manifest, Span, TensorSpec

logger = logging.getLogger(__name__)

Source = Callable[[], Iterable[tuple[str, Tensor | Callable[[], Tensor]]]]


def materialize(given: Tensor | Callable[[], Tensor]) -> Tensor:
    """What a source gives, as a local tensor.

    A function is called. A DTensor is gathered, which all ranks of its mesh must do together.
    """
    tensor = given() if callable(given) else given
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def close_source(items: object) -> None:
    """Ends what a source gave to iterate over, in the thread that iterated."""
    if (close := getattr(items, "close", None)) is None:  # no generator
        return
    try:
        close()
    except Exception:
        logger.exception("the source raised when it was closed")


class SourceReader:
    """Reads a source along with the manifest and packs its tensors into buckets.

    Args:
        manifest: The layout.
        source: See ``Sender.send``.
        on_request: Called with a tensor's name before the source is asked for it.
        stop: Once it is set, the source is asked for nothing more.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        on_request: Callable[[str], None],
        stop: threading.Event,
    ) -> None:
        self._specs = manifest.tensors
        self._aliases = {spec.name for spec in manifest.tensors if spec.alias_of is not None}
        self._source = source
        self._on_request = on_request
        self._stop = stop
        self._items: Iterator[tuple[str, Tensor | Callable[[], Tensor]]] | None = None
        self._index = -1
        self._given: Any = None  # whatever the source gave for that index
        self._tensor: Tensor | None = None

    def pack(self, bucket: Bucket, payload: Tensor) -> None:
        """Copies a bucket's spans into ``payload``; buckets are packed in their order."""
        for span in bucket.spans:
            while self._index < span.tensor:
                self._advance()
            if self._tensor is None:
                self._tensor = self._read_tensor()
            self._copy(span, payload[span.bucket_offset : span.bucket_offset + span.length])

    def close(self) -> None:
        """Ends the source, in the thread in which it ran."""
        self._given = self._tensor = None
        items, self._items = self._items, None
        close_source(items)

    def _advance(self) -> None:
        """Moves on to the next tensor, which may not be needed itself."""
        self._given = self._tensor = None  # freed before the next one is asked for
        self._index += 1
        spec = self._specs[self._index]
        self._check_stop()
        self._on_request(spec.name)
        while True:
            with _source_errors(spec.name):
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
                what = f"a {type(item).__name__}, not a name and a tensor"
                raise self._unexpected(what) from error
            del item
            if name not in self._aliases:
                break
        if name != spec.name:
            raise self._unexpected(name)

    def _read_tensor(self) -> Tensor:
        self._check_stop()
        spec, given = self._specs[self._index], self._given
        self._given = None
        with _source_errors(spec.name):
            tensor = materialize(given)
            del given
        try:
            found = describe(spec.name, tensor)
        except ValueError as error:
            raise self._unexpected(f"what cannot be sent: {error}") from error
        if found != spec:
            raise self._unexpected(_summary(found))
        if tensor.is_meta:
            raise self._unexpected(f"{spec.name} on the meta device, which holds no data")
        if tensor.is_cuda:
            # It is dropped before the device has read it; its memory is kept until then.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor.detach().resolve_conj().resolve_neg()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TransportError("this end stopped the transfer")

    def _unexpected(self, given: str) -> ManifestError:
        wanted = _summary(self._specs[self._index])
        return ManifestError(
            [f"tensor {self._index} is {wanted} in the manifest, the source gave {given}"]
        )

    def _copy(self, span: Span, target: Tensor) -> None:
        assert self._tensor is not None  # noqa: S101 - ``pack`` has set it
        spec = self._specs[self._index]
        if not self._tensor.is_contiguous():
            if span.length == nbytes(spec):  # straight into the bucket, whatever its strides
                target.view(DTYPES[spec.dtype]).view(spec.shape).copy_(self._tensor)
                return
            self._tensor = self._tensor.contiguous()
        data = as_bytes(self._tensor)
        target.copy_(data[span.tensor_offset : span.tensor_offset + span.length])


@contextlib.contextmanager
def _source_errors(tensor: str) -> Iterator[None]:
    """Adds to what the source raises which tensor it was asked for."""
    try:
        yield
    # CancelledError: from an event loop of the source's own; none runs in this thread.
    except (Exception, asyncio.CancelledError) as error:
        raise TensorSourceError(tensor, error) from error


def _summary(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"

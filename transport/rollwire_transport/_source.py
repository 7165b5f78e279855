"""The tensors as the trainer gives them, one at a time, packed into buckets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rollwire_transport._cast import Casts, castable
from rollwire_transport._errors import ManifestError, TensorSourceError, TransportError
from rollwire_transport._manifest import DTYPES, as_bytes, describe, nbytes

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
    """Ends what a source gave to iterate over; called in the thread that iterated."""
    if (close := getattr(items, "close", None)) is None:  # no generator
        return
    try:
        close()
    except BaseException:  # as below
        logger.exception("the source raised when it was closed")


class SourceReader:
    """Reads a source along with the manifest and packs its tensors into buckets.

    With ``casts``, floating-point tensors are cast to the dtypes of the manifest.

    A tensor that the source gives before its turn is gathered at once and copied to host memory:
    its own memory may be reused as soon as the source goes on. ``on_request`` is called with a
    tensor's name before the source is asked for it, and with ``another_came`` if one has.
    """

    def __init__(
        self,
        manifest: Manifest,
        source: Source,
        first_bucket: int,
        casts: Casts | None,
        on_request: Callable[..., None],
        stop: threading.Event,
    ) -> None:
        self._casts = casts
        self._specs = manifest.tensors
        sent = [i for i, spec in enumerate(manifest.tensors) if spec.alias_of is None]
        self._indices = {manifest.tensors[i].name: i for i in sent}
        self._aliases = {spec.name for spec in manifest.tensors if spec.alias_of is not None}
        self._source = source
        self._on_request = on_request
        self._stop = stop
        self._items: Iterator[tuple[str, Tensor | Callable[[], Tensor]]] | None = None
        needed = manifest.buckets[first_bucket:]
        self._first = needed[0].spans[0].tensor if needed else len(self._specs)
        self._index = self._first - 1
        self._seen: set[str] = set()  # what the source gave
        self._held: dict[int, Tensor] = {}  # by index: what came before its turn
        self._given: Any = None  # whatever the source gave for the present index
        self._tensor: Tensor | None = None

    def pack(self, bucket: Bucket, payload: Tensor) -> None:
        for span in bucket.spans:
            while self._index < span.tensor:
                self._advance(span.tensor)
            if self._tensor is None:
                self._tensor = self._read_tensor(span.tensor)
            self._copy(span, payload[span.bucket_offset : span.bucket_offset + span.length])

    def finish(self) -> None:
        """Runs the source to its end, once all buckets are packed: it may have something to do
        there, and it may have given too much or too little.
        """
        self._given = self._tensor = None
        while (name := self._take("its end")) is not None:
            self._given = None  # empty, as all others have had their turn
            self._check_known(name)
        if missing := [name for name in self._indices if name not in self._seen]:
            raise self._ended_before(missing[0])

    def close(self) -> None:
        self._given = self._tensor = None
        self._held.clear()
        items, self._items = self._items, None
        close_source(items)

    def _advance(self, index: int) -> None:
        self._given = self._tensor = None  # freed before the next one is asked for
        self._index = index
        if index in self._held:
            self._given = self._held.pop(index)
            return
        spec = self._specs[index]
        self._on_request(spec.name)
        while True:
            if (name := self._take(spec.name)) is None:
                raise self._ended_before(spec.name)
            if (came := self._check_known(name)) == index:
                return
            self._hold(came)
            self._on_request(spec.name, another_came=True)

    def _take(self, wanted: str) -> str | None:
        """The name of the source's next tensor, which is in ``_given``; None at its end."""
        while True:
            self._check_stop()
            with _source_errors(wanted):
                if self._items is None:
                    self._items = iter(self._source())
                item = next(self._items, None)
            if item is None:
                return None
            try:
                name, self._given = item
            except (TypeError, ValueError) as error:
                what = f"a {type(item).__name__}, not a name and a tensor"
                raise ManifestError([f"the source gave {what}, when {wanted} was due"]) from error
            del item
            if name not in self._aliases:
                return str(name)

    def _check_known(self, name: str) -> int:
        """The tensor's index; ManifestError if the manifest has none, or it came before."""
        if (index := self._indices.get(name)) is None:
            raise ManifestError([f"the source gave {name}, which is not in the manifest"])
        if name in self._seen:
            raise ManifestError([f"the source gave {name} twice"])
        self._seen.add(name)
        return index

    def _hold(self, index: int) -> None:
        if index >= self._first and nbytes(self._specs[index]):
            self._held[index] = self._copy_whole(index, self._read_tensor(index), "cpu")
        self._given = None

    def _ended_before(self, name: str) -> ManifestError:
        return ManifestError([f"tensor {self._indices[name]} ({name}): the source ended before it"])

    def _read_tensor(self, index: int) -> Tensor:
        self._check_stop()
        spec, given = self._specs[index], self._given
        self._given = None
        with _source_errors(spec.name):
            tensor = materialize(given)
            del given
        try:
            found = describe(spec.name, tensor)
        except ValueError as error:
            raise self._unexpected(spec, f"what cannot be sent: {error}") from error
        if found != spec and not self._can_cast(found, spec):
            raise self._unexpected(spec, _summary(found))
        if tensor.is_meta:
            what = f"{spec.name} on the meta device, which holds no data"
            raise self._unexpected(spec, what)
        if tensor.is_cuda:
            # It is dropped before the device has read it; its memory is kept until then.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return tensor.detach().resolve_conj().resolve_neg()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TransportError("this end stopped the transfer")

    def _unexpected(self, spec: TensorSpec, given: str) -> ManifestError:
        number, wanted = self._indices[spec.name], _summary(spec)
        return ManifestError(
            [f"tensor {number} is {wanted} in the manifest, the source gave {given}"]
        )

    def _can_cast(self, found: TensorSpec, spec: TensorSpec) -> bool:
        return (
            self._casts is not None
            and castable(found.dtype, spec.dtype)
            and replace(found, dtype=spec.dtype) == spec
        )

    def _copy(self, span: Span, target: Tensor) -> None:
        tensor, spec = self._tensor, self._specs[self._index]
        assert tensor is not None  # noqa: S101 - ``pack`` has set it
        dtype = DTYPES[spec.dtype]
        if not tensor.is_contiguous():
            if span.length == nbytes(spec):  # straight into the bucket, whatever its strides
                self._copy_elements(spec, tensor, target.view(dtype).view(spec.shape))
                return
            self._tensor = tensor = self._copy_whole(self._index, tensor, tensor.device)
        if tensor.dtype == dtype:
            data = as_bytes(tensor)
            target.copy_(data[span.tensor_offset : span.tensor_offset + span.length])
            return
        first, count = span.tensor_offset // dtype.itemsize, span.length // dtype.itemsize
        elements = as_bytes(tensor).view(tensor.dtype)[first : first + count]
        self._copy_elements(spec, elements, target.view(dtype))

    def _copy_whole(self, index: int, tensor: Tensor, device: torch.device | str) -> Tensor:
        spec = self._specs[index]
        copy = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=device)
        self._copy_elements(spec, tensor, copy)
        return copy

    def _copy_elements(self, spec: TensorSpec, source: Tensor, target: Tensor) -> None:
        if self._casts is None:
            target.copy_(source)
        else:
            self._casts.copy(spec.name, source, target)


@contextlib.contextmanager
def _source_errors(tensor: str) -> Iterator[None]:
    try:
        yield
    # Such as SystemExit, or CancelledError of an event loop of the source's own: this thread has
    # neither a loop nor a program to end.
    except BaseException as error:
        raise TensorSourceError(tensor, error) from error


def _summary(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.dtype} {list(spec.shape)}"

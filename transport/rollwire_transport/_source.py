"""The tensors as the trainer gives them, one at a time, packed into buckets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rollwire_transport._cast import Casts, castable, shrinks_safely
from rollwire_transport._errors import ManifestError, TensorSourceError, TransportError
from rollwire_transport._manifest import DTYPES, as_bytes, describe, nbytes
from rollwire_transport._names import matrices_in, packed_around

if TYPE_CHECKING:
    import threading

    from rollwire_transport._manifest import Bucket, Manifest, TensorSpec


logger = logging.getLogger(__name__)


class Gathered(NamedTuple):
    """A local tensor, and the dtype of its shards if they were cast before it was gathered."""

    tensor: Tensor
    cast_from: torch.dtype | None = None


Given = Tensor | Callable[[], Tensor | Gathered]
Source = Callable[[], Iterable[tuple[str, Given]]]


def materialize(given: Given, dtype: torch.dtype | None = None) -> Gathered:
    """What a source gives, as a local tensor.

    A function is called. A DTensor is gathered, which all ranks of its mesh must do together. If
    ``dtype`` is smaller, and no value can overflow in it, each rank first casts its shard to it.
    All ranks must give the same ``dtype``.
    """
    tensor: Any = given() if callable(given) else given
    if isinstance(tensor, Gathered):
        return tensor
    if (gather := getattr(tensor, "full_tensor", None)) is None:
        return Gathered(tensor)
    if dtype is None or not shrinks_safely(tensor.dtype, dtype) or _is_partial(tensor):
        return Gathered(gather())
    return Gathered(tensor.detach().to(dtype).full_tensor(), tensor.dtype)


def _is_partial(tensor: Any) -> bool:
    """Whether the ranks' tensors are summed, which rounds otherwise if they are cast first."""
    return any(placement.is_partial() for placement in tensor.placements)


def close_source(items: object) -> None:
    """Ends what a source gave to iterate over; called in the thread that iterated."""
    if (close := getattr(items, "close", None)) is None:  # no generator
        return
    try:
        close()
    except BaseException:  # as below
        logger.exception("the source raised when it was closed")


class _Item(NamedTuple):
    """What a source gives at once: a tensor of the manifest, or a part of one.

    Attributes:
        spec: Its own name and shape, and the dtype in which it is sent.
        tensor: Index of the manifest's tensor.
        begin, end: Its bytes in that tensor.
    """

    spec: TensorSpec
    tensor: int
    begin: int
    end: int


class SourceReader:
    """Reads a source along with the manifest and packs its tensors into buckets.

    With ``casts``, floating-point tensors are cast to the dtypes of the manifest. Instead of a
    tensor that packs matrices of experts, the source may give these (see ``matrices_in``).

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
        self._indices = {
            spec.name: i for i, spec in enumerate(manifest.tensors) if spec.alias_of is None
        }
        self._aliases = {spec.name for spec in manifest.tensors if spec.alias_of is not None}
        self._parts: dict[int, dict[str, _Item]] = {}  # of packed tensors, as far as asked for
        self._source = source
        self._on_request = on_request
        self._stop = stop
        self._items: Iterator[tuple[str, Given]] | None = None
        needed = manifest.buckets[first_bucket:]
        first = needed[0].spans[0] if needed else None
        # Where in which tensor the first byte is that is needed.
        self._first = (first.tensor, first.tensor_offset) if first else (len(self._specs), 0)
        self._seen: set[str] = set()  # what the source gave
        self._given_bytes: dict[int, int] = {}  # of tensors that it gave in parts
        self._held: dict[tuple[int, int], tuple[_Item, Tensor]] = {}  # what came before its turn
        self._item: _Item | None = None  # what is packed at present
        self._given: Any = None  # whatever the source gave for it
        self._tensor: Tensor | None = None

    def pack(self, bucket: Bucket, payload: Tensor) -> None:
        for span in bucket.spans:
            begin, end = span.tensor_offset, span.tensor_offset + span.length
            while begin < end:
                item = self._item
                if item is None or item.tensor != span.tensor or item.end <= begin:
                    item = self._advance(span.tensor, begin)
                if self._tensor is None:
                    self._tensor = self._read_tensor(item)
                stop = min(end, item.end)
                place = span.bucket_offset + begin - span.tensor_offset
                self._copy(item, begin - item.begin, payload[place : place + stop - begin])
                begin = stop

    def finish(self) -> None:
        """Runs the source to its end, once all buckets are packed: it may have something to do
        there, and it may have given too much or too little.
        """
        self._item = self._given = self._tensor = None
        while (name := self._take("its end")) is not None:
            self._given = None  # empty, as all others have had their turn
            self._find(name)
        for name, index in self._indices.items():
            if name not in self._seen and not self._came_in_parts(index):
                raise self._ended_before(name)

    def close(self) -> None:
        self._given = self._tensor = None
        self._held.clear()
        items, self._items = self._items, None
        close_source(items)

    def _advance(self, index: int, offset: int) -> _Item:
        """The item that has this byte of a tensor; it is asked for, unless it came before."""
        self._given = self._tensor = self._item = None  # freed before the next one is asked for
        if (held := self._held.pop((index, offset), None)) is not None:
            self._item, self._given = held
            return self._item
        name = self._specs[index].name
        self._on_request(name)
        while (came := self._take(name)) is not None:
            item = self._find(came)
            if item.tensor == index and item.begin <= offset < item.end:
                self._item = item
                return item
            self._hold(item)
            self._on_request(name, another_came=True)
        raise self._ended_before(name)

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

    def _find(self, name: str) -> _Item:
        """What the source gave; ManifestError if the manifest has none, or it came before."""
        index = self._indices.get(name)
        item = self._find_part(name) if index is None else _whole(self._specs[index], index)
        if item is None:
            raise ManifestError([f"the source gave {name}, which is not in the manifest"])
        others_came = item.tensor in self._given_bytes
        if index is None:
            others_came = self._specs[item.tensor].name in self._seen
            given = self._given_bytes.get(item.tensor, 0)
            self._given_bytes[item.tensor] = given + item.end - item.begin
        if others_came or item.spec.name in self._seen:
            raise ManifestError([f"the source gave {name} twice"])
        self._seen.add(item.spec.name)
        return item

    def _find_part(self, name: str) -> _Item | None:
        for packed, known_as in packed_around(name):
            if (index := self._indices.get(packed)) is None:
                continue
            if (parts := self._parts.get(index)) is None:
                parts = self._parts[index] = _parts_of(self._specs[index], index)
            if (item := parts.get(known_as)) is not None:
                return item
        return None

    def _came_in_parts(self, index: int) -> bool:
        return self._given_bytes.get(index) == nbytes(self._specs[index])

    def _hold(self, item: _Item) -> None:
        index, offset = self._first
        if item.begin < item.end and (item.tensor, item.end) > (index, offset):
            copy = self._copy_whole(item, self._read_tensor(item), "cpu")
            self._held[item.tensor, item.begin] = item, copy
        self._given = None

    def _ended_before(self, name: str) -> ManifestError:
        return ManifestError([f"tensor {self._indices[name]} ({name}): the source ended before it"])

    def _read_tensor(self, item: _Item) -> Tensor:
        self._check_stop()
        spec, given = item.spec, self._given
        self._given = None
        with _source_errors(spec.name):
            tensor, cast_from = materialize(given)
            del given
        try:
            found = describe(spec.name, tensor)
        except ValueError as error:
            raise self._unexpected(item, f"what cannot be sent: {error}") from error
        if found != spec and not self._can_cast(found, spec):
            raise self._unexpected(item, _summary(found))
        if tensor.is_meta:
            what = f"{spec.name} on the meta device, which holds no data"
            raise self._unexpected(item, what)
        if tensor.is_cuda:
            # It is dropped before the device has read it; its memory is kept until then.
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
        if cast_from is not None and self._casts is not None:
            self._casts.record(self._specs[item.tensor].name, cast_from)
        return tensor.detach().resolve_conj().resolve_neg()

    def _check_stop(self) -> None:
        if self._stop.is_set():
            raise TransportError("this end stopped the transfer")

    def _unexpected(self, item: _Item, given: str) -> ManifestError:
        wanted = _summary(item.spec)
        return ManifestError(
            [f"tensor {item.tensor} is {wanted} in the manifest, the source gave {given}"]
        )

    def _can_cast(self, found: TensorSpec, spec: TensorSpec) -> bool:
        return (
            self._casts is not None
            and castable(found.dtype, spec.dtype)
            and replace(found, dtype=spec.dtype) == spec
        )

    def _copy(self, item: _Item, begin: int, target: Tensor) -> None:
        """Copies as many bytes of the present tensor as ``target`` has, from ``begin`` on."""
        tensor, spec = self._tensor, item.spec
        assert tensor is not None  # noqa: S101 - ``pack`` has set it
        dtype = DTYPES[spec.dtype]
        if not tensor.is_contiguous():
            if len(target) == nbytes(spec):  # straight into the bucket, whatever its strides
                self._copy_elements(item, tensor, target.view(dtype).view(spec.shape))
                return
            self._tensor = tensor = self._copy_whole(item, tensor, tensor.device)
        if tensor.dtype == dtype:
            target.copy_(as_bytes(tensor)[begin : begin + len(target)])
            return
        first, count = begin // dtype.itemsize, len(target) // dtype.itemsize
        elements = as_bytes(tensor).view(tensor.dtype)[first : first + count]
        self._copy_elements(item, elements, target.view(dtype))

    def _copy_whole(self, item: _Item, tensor: Tensor, device: torch.device | str) -> Tensor:
        copy = torch.empty(item.spec.shape, dtype=DTYPES[item.spec.dtype], device=device)
        self._copy_elements(item, tensor, copy)
        return copy

    def _copy_elements(self, item: _Item, source: Tensor, target: Tensor) -> None:
        if self._casts is None:
            target.copy_(source)
        else:
            self._casts.copy(self._specs[item.tensor].name, source, target)


def _whole(spec: TensorSpec, index: int) -> _Item:
    return _Item(spec, index, 0, nbytes(spec))


def _parts_of(packed: TensorSpec, index: int) -> dict[str, _Item]:
    """The matrices that a source may give in place of a packed tensor, by name."""
    parts: dict[str, _Item] = {}
    end = 0
    for spec in found.matrices if (found := matrices_in(packed)) else ():
        begin, end = end, end + nbytes(spec)
        parts[spec.name] = _Item(spec, index, begin, end)
    return parts


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

"""A callable source: checked against the servers' schema while it gives its tensors."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import rollwire_transport as transport

from rollwire_client._concurrency import run_in_thread
from rollwire_client._errors import PublishError, SourceError
from rollwire_client._publishing.experts import unpack
from rollwire_client._publishing.problems import mismatch
from rollwire_client._publishing.schema import check_given
from rollwire_client._publishing.tensors import memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_client._publishing.names import ServerNames
    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.tensors import ChangeDetector, TensorOrFunction, TensorSource
    from rollwire_client._publishing.tied import TiedTensors


@dataclass(slots=True)
class GivenOrder:
    """The servers' names of a publisher's tensors, in the order in which its last source gave them.

    An update is laid out in this order, so that nothing has to be held until its turn.
    """

    names: tuple[str, ...] = ()

    def sort(self, specs: Sequence[TensorSpec]) -> list[TensorSpec]:
        places = {name: place for place, name in enumerate(self.names)}
        return sorted(specs, key=lambda spec: places.get(spec.name, len(places)))


@dataclass(slots=True)
class CheckedSource:
    """Gives each tensor once, by its name on the servers; of those that are tied there, the first.

    Experts may come packed or each by itself, whatever the servers have.
    Tensors may come in any order. One that the servers do not know, or that has another shape, or a
    dtype that cannot be cast, raises SchemaMismatchError; so does one that is missing at the end,
    unless it is ``partial``.
    """

    source: TensorSource
    names: ServerNames
    order: GivenOrder
    detector: ChangeDetector
    coordinator: Coordinator | None
    tied: TiedTensors
    partial: bool = False
    cast: bool = True
    _calls: int = 0

    def __call__(self) -> Iterator[tuple[str, TensorOrFunction]]:
        self._calls += 1
        source = self.detector.watch_source(self.source)
        if self.coordinator is not None:
            source = self.coordinator.iterate(source)
        missing = {spec.name: None for spec in self.names.schema if spec.alias_of is None}
        given: dict[str, str] = {}  # what is sent, and by which of the servers' names it came
        order: dict[str, None] = {}  # of the servers' tensors
        tied = {spec.alias_of for spec in self.names.schema}
        memory: dict[str, object] = {}  # of those that other names share on the servers
        items = iter(source())
        try:
            while True:
                if not missing:  # at its end it may change them itself
                    self.detector.check()
                    if self.coordinator is not None:
                        self.coordinator.check_unchanged()
                if (item := next(items, None)) is None:
                    break
                try:
                    local_name, value = item
                except (TypeError, ValueError):
                    raise mismatch(
                        f"the source gave a {type(item).__name__}, not a name and a tensor"
                    ) from None
                del item  # the generator must not keep a tensor that its reader has dropped
                match = check_given(local_name, value, self.names, cast=self.cast)
                name = match.spec.alias_of or match.spec.name
                held_in = memory_of(value) if name in tied else None
                if self.coordinator is not None:
                    # A part is held in host memory, to be cast as it is packed.
                    dtype = match.spec.dtype if self.cast and not self.partial else None
                    value = self.coordinator.gather(local_name, value, dtype)
                if (packed := match.part_of) in missing:
                    del missing[packed]
                    missing |= dict.fromkeys(self.names.matrices(packed))
                sent = match.names if match.packs else (name,)
                if missing.keys() >= {*sent}:
                    for one in sent:
                        del missing[one]
                        given[one] = one if match.packs else match.names[0]
                        order[packed or one] = None
                    memory[name] = held_in
                    if match.packs:
                        yield from unpack(local_name, value, match)
                    else:
                        yield name, value
                elif given.get(name, match.names[0]) == match.names[0]:
                    raise mismatch(f"the source gave {local_name} twice")
                elif held_in is None or held_in != memory[name]:
                    self.tied.add(match.names[0], given[name], value)
                del value
        finally:
            transport.close_source(items)
            if not self.partial and len(order) >= len(self.order.names):  # also if it failed
                self.order.names = tuple(order)
        if not self.partial:
            self._check_complete(list(missing))

    def _check_complete(self, missing: Sequence[str]) -> None:
        if missing and self._calls > 1:
            raise SourceError(
                f"the source ended without {missing[0]} when it was called again for another "
                "transport group: each call must return a fresh iterator of all tensors; nothing "
                "was committed, the servers keep what they serve"
            )
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise mismatch(f"the source ended without {missing[0]}{more}")

    async def read(self, device: torch.device | None, timeout: float) -> dict[str, Tensor]:
        """Copies of all that it gives, in host memory; ``timeout`` is in seconds for each tensor.

        For an update of some tensors: which these are has to be known before it is announced.

        Raises:
            SourceError: It raised, or took too long.
            SchemaMismatchError, TensorsChangedError: As when it is read.
        """
        reading = _Reading(self)
        done = run_in_thread(transport.on_side_stream(device, reading.run))
        try:
            while not done.done():
                left = timeout - (time.monotonic() - reading.asked_at)
                if left <= 0:
                    done.cancel()
                    raise SourceError(
                        f"the source did not provide its next tensor within {timeout:g} s: its "
                        "thread stays behind; nothing was sent, the servers keep what they serve"
                    )
                await asyncio.wait([done], timeout=left)
        finally:
            reading.stop.set()
            if not done.done():  # cancelled: the tensors are in use until then
                await asyncio.wait([done], timeout=timeout)
                done.cancel()
        try:
            return done.result()
        except PublishError:
            raise
        except Exception as error:
            raise SourceError(
                f"the source raised {type(error).__name__}: {error}; nothing was sent, the servers "
                "keep what they serve"
            ) from error


@dataclass(slots=True)
class _Reading:
    source: CheckedSource
    stop: threading.Event = field(default_factory=threading.Event)
    asked_at: float = field(default_factory=time.monotonic)

    def run(self) -> dict[str, Tensor]:
        tensors = {}
        items = self.source()
        try:
            for name, value in items:
                tensor, _ = transport.materialize(value)
                tensors[name] = tensor.detach().to("cpu", copy=True)
                del value, tensor
                self.asked_at = time.monotonic()
                if self.stop.is_set():
                    break
        finally:
            transport.close_source(items)
        return tensors

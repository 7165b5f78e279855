"""Notices that a trainer's tensors change in place while they are being sent.

Two things tell: torch's version counters, which count what is written in place, and optimizers, as
the fused ones write past those counters. Neither sees what is written through ``tensor.data`` or by
a CUDA graph, nor to tensors made under ``torch.inference_mode()``, nor what a copy was made of.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rollwire_client._errors import TensorsChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from rollwire_client._publishing.schema import Given, Source

    _Counter = Callable[[], int | None]  # None: nobody has the tensor any more


class Changes:
    """What became of the tensors of one publish since they were noted; a context manager, within
    which optimizers are noticed too. It keeps none of their memory. Any thread may use it.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[str, _Counter, int | None]] = []
        self._places: dict[int, tuple[str, StorageWeakRef]] = {}  # by the address of their memory
        self._stepped: dict[str, None] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_pre_hook(self._step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def note(self, name: str, given: object) -> None:
        """From now on a change of this tensor is noticed; of what is no tensor, nothing."""
        if not isinstance(given, torch.Tensor):
            return
        with self._lock:
            for tensor in _parts(given):
                if not tensor.is_inference():  # those have no counter
                    counter = _counter(tensor)
                    self._counters.append((name, counter, counter()))
            if (storage := _storage(given)) is not None:
                self._places[storage.data_ptr()] = name, StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def noting(self, source: Source) -> Source:
        """``source``, whose tensors are noted before anybody reads them."""

        def noted() -> Iterator[tuple[str, Given]]:
            for item in source():
                try:
                    name, given = item
                except (TypeError, ValueError):
                    yield item  # for whoever reads it to refuse
                    continue
                del item
                yield name, self.noted(name, given)
                del given

        return noted

    def noted(self, name: str, given: Given) -> Given:
        """What a source gives, which is noted; a function notes what it returns."""
        if isinstance(given, torch.Tensor) or not callable(given):
            self.note(name, given)
            return given

        def call() -> Tensor:
            tensor = given()
            self.note(name, tensor)
            return tensor

        return call

    def check(self) -> None:
        """Raises TensorsChangedError if a tensor has changed since it was noted."""
        with self._lock:
            changed = dict(self._stepped)
            for name, counter, before in self._counters:
                if counter() not in {before, None}:
                    changed[name] = None
        if changed:
            raise TensorsChangedError(_told(list(changed)))

    def _step(
        self, optimizer: torch.optim.Optimizer, given: tuple[object, ...], named: dict[str, object]
    ) -> None:
        """Notes which of the tensors an optimizer changes next."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if type(optimizer).__module__.startswith("torch.optim.") and len(given) == 1 and not named:
            # What has no gradient stays as it is, unless a closure is given, which computes them.
            parameters = [p for p in parameters if p.grad is not None]
        with self._lock:
            for parameter in parameters:
                if (storage := _storage(parameter)) is None:
                    continue
                place = self._places.get(storage.data_ptr())
                # Memory that was given back may be another tensor's by now.
                if place and not place[1].expired():  # type: ignore[no-untyped-call]
                    self._stepped[place[0]] = None


def _told(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} changed in place while being sent; nothing was committed, the servers "
        "keep the weights they have: await the handle's `released` before tensors change, as by "
        "an optimizer's step"
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _parts(tensor: Tensor) -> list[Tensor]:
    """The tensor, and of a DTensor its shard here: each has a counter of its own."""
    here = _here(tensor)
    return [tensor] if here is tensor else [tensor, here]


def _here(tensor: Tensor) -> Tensor:
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory; None where there is none."""
    try:
        storage = _here(tensor).untyped_storage()
        return storage if storage.data_ptr() else None
    except (RuntimeError, NotImplementedError):  # a kind of its own
        return None


def _counter(tensor: Tensor) -> _Counter:
    """Reads the tensor's version counter."""
    if type(tensor) not in _PLAIN:
        there = weakref.ref(tensor)
        return lambda: None if (it := there()) is None else _version(it)
    # A tensor of the same counter, without the memory: ``tensor`` may be a view that nobody keeps.
    probe = tensor.detach()
    probe.data = _empty(tensor.dtype, tensor.device)
    return lambda: _version(probe)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - the name by which torch documents it

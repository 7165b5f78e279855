"""Detects that a trainer's tensors change in place while they are being sent.

Two signals are used: torch's version counters, which count in-place writes, and a hook on
optimizers, because fused optimizers write past those counters. Neither sees writes through
``tensor.data`` or by a CUDA graph, changes of tensors made under ``torch.inference_mode()``, or
changes of what a copy was made from.
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

    from rollwire_client._publishing.tensor_source import TensorOrFunction, TensorSource

    _Counter = Callable[[], int | None]  # None: the tensor is gone


class ChangeDetector:
    """Detects changes of the tensors of one publish, from any thread; keeps none of their memory.

    A context manager: optimizers are observed within it only.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[str, _Counter, int | None]] = []
        self._storages: dict[int, tuple[str, StorageWeakRef]] = {}  # by address
        self._optimized: dict[str, None] = {}  # an ordered set
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def watch(self, name: str, value: object) -> None:
        """Detects changes of this tensor from now on; ignores what is no tensor."""
        if not isinstance(value, torch.Tensor):
            return
        with self._lock:
            for tensor in _with_local_shard(value):
                if not tensor.is_inference():  # those have no counter
                    counter = _counter(tensor)
                    self._counters.append((name, counter, counter()))
            if (storage := _storage(value)) is not None:
                self._storages[storage.data_ptr()] = name, StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def watch_source(self, source: TensorSource) -> TensorSource:
        """Wraps ``source``: its tensors are watched from when it gives them."""

        def watched() -> Iterator[tuple[str, TensorOrFunction]]:
            for item in source():
                try:
                    name, value = item
                except (TypeError, ValueError):
                    yield item  # for the reader to refuse
                    continue
                del item  # the generator must not keep a tensor that its reader has dropped
                yield name, self._watch_value(name, value)
                del value

        return watched

    def _watch_value(self, name: str, value: TensorOrFunction) -> TensorOrFunction:
        if isinstance(value, torch.Tensor) or not callable(value):
            self.watch(name, value)
            return value

        def call() -> Tensor:
            tensor = value()
            self.watch(name, tensor)
            return tensor

        return call

    def check(self) -> None:
        """Raises TensorsChangedError if a tensor has changed since it is watched."""
        with self._lock:
            changed = dict(self._optimized)
            for name, counter, before in self._counters:
                if counter() not in {before, None}:
                    changed[name] = None
        if changed:
            raise TensorsChangedError(_message(list(changed)))

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Marks the watched tensors that an optimizer is about to change."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if type(optimizer).__module__.startswith("torch.optim.") and len(args) == 1 and not kwargs:
            # A parameter without a gradient stays as it is, unless a closure computes gradients.
            parameters = [p for p in parameters if p.grad is not None]
        with self._lock:
            for parameter in parameters:
                if (storage := _storage(parameter)) is None:
                    continue
                watched = self._storages.get(storage.data_ptr())
                # Memory that was freed may be another tensor's by now.
                if watched and not watched[1].expired():  # type: ignore[no-untyped-call]
                    self._optimized[watched[0]] = None


def _message(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"{names[0]}{more} changed in place while being sent; nothing was committed, the servers "
        "keep the weights they have: await the handle's `released` before tensors change, as by "
        "an optimizer's step"
    )


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def _with_local_shard(tensor: Tensor) -> list[Tensor]:
    """The tensor and, for a DTensor, its local shard: each has a counter of its own."""
    local = _local(tensor)
    return [tensor] if local is tensor else [tensor, local]


def _local(tensor: Tensor) -> Tensor:
    if type(tensor) in _PLAIN or not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
        return local


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        storage = _local(tensor).untyped_storage()
        return storage if storage.data_ptr() else None
    except (RuntimeError, NotImplementedError):  # a tensor subclass without storage
        return None


def _counter(tensor: Tensor) -> _Counter:
    if type(tensor) not in _PLAIN:
        reference = weakref.ref(tensor)
        return lambda: None if (alive := reference()) is None else _version(alive)
    # A tensor that shares the counter but not the memory. A weak reference would not do: ``tensor``
    # may be a view that nobody keeps.
    probe = tensor.detach()
    probe.data = _empty(tensor.dtype, tensor.device)
    return lambda: _version(probe)


@functools.cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _version(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001 - the name by which torch documents it

"""What a trainer publishes: tensors by name, or a function that gives them one by one."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import torch
from rollwire_transport import Gathered, close_source
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rollwire_client._errors import SchemaMismatchError, TensorsChangedError

# A function in place of a tensor is called when the tensor is needed.
TensorOrFunction = Tensor | Callable[[], Tensor | Gathered]
TensorSource = Callable[[], Iterable[tuple[str, TensorOrFunction]]]


def check_tensors(tensors: Mapping[str, Tensor] | TensorSource) -> None:
    """Raises SchemaMismatchError unless these are tensors by name, or a callable."""
    if isinstance(tensors, torch.nn.Module):  # which is callable, for something else
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is a model, not its tensors: "
            "publish(version, model.state_dict())"
        )
    if callable(tensors):
        return
    if not isinstance(tensors, Mapping):
        raise SchemaMismatchError(
            f"nothing was sent: a {type(tensors).__name__} is neither a mapping of names to "
            "tensors nor a function that gives an iterator of (name, tensor)"
        )
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise SchemaMismatchError(
                f"nothing was sent: {name}: a {type(tensor).__name__} is not a torch tensor"
            )


def device_of(tensors: Mapping[str, Tensor] | TensorSource) -> torch.device | None:
    """Where tensors lie, None on the CPU; for a callable, the CUDA device that this thread uses is
    assumed.
    """
    if not callable(tensors):
        first = next(iter(tensors.values()), None)
        return None if first is None or first.is_cpu else first.device
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


def memory_of(value: object) -> object:
    """A key that is equal for tensors that view the same memory in the same way, if it did not
    change in between. It keeps no memory. None: nothing is known about it.
    """
    if not isinstance(value, Tensor) or (storage := _storage(value)) is None:
        return None
    local = _local(value)
    if local.is_inference():  # whose changes torch does not count
        return None
    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    layout = (local.storage_offset(), local.dtype, tuple(local.shape), local.stride())
    return (reference, _version(local), tuple(value.shape), layout)


class ChangeDetector:
    """Detects in-place changes of the tensors of one publish, from any thread; keeps none of their
    memory. A context manager: optimizers are observed within it only.

    Two signals are used: torch's version counters, which count in-place writes, and a hook on
    optimizers, because fused optimizers write past those counters. Neither sees writes through
    ``tensor.data`` or by a CUDA graph, changes of tensors made under ``torch.inference_mode()``, or
    changes of what a copy was made from.
    """

    def __init__(self) -> None:
        self._counters: list[tuple[str, _Counter, int | None]] = []
        self._storages: dict[int, tuple[str, StorageWeakRef]] = {}  # by address
        self._changed: dict[str, None] = {}  # an ordered set: recorded, or to be optimized
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def watch(self, name: str, value: object) -> None:
        """Detects changes of this tensor from now on; ignores what is no tensor."""
        if not isinstance(value, Tensor):
            return
        local = _local(value)
        # The local shard of a DTensor has a counter of its own.
        tensors = [value] if local is value else [value, local]
        with self._lock:
            for tensor in tensors:
                if not tensor.is_inference():  # those have no counter
                    counter = _counter(tensor)
                    self._counters.append((name, counter, counter()))
            if (storage := _storage(value)) is not None:
                self._storages[storage.data_ptr()] = name, StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def watch_source(self, source: TensorSource) -> TensorSource:
        """Wraps ``source``: its tensors are watched from when it gives them. What it does to them
        once it has given the last one, or when it is closed, is its own business, such as unmerging
        an adapter.
        """

        def watched() -> Iterator[tuple[str, TensorOrFunction]]:
            items: Iterator[tuple[str, TensorOrFunction]] | None = None
            try:
                items = iter(source())
                while (item := next(items, None)) is not None:
                    try:
                        name, value = item
                    except (TypeError, ValueError):
                        yield item  # for the reader to refuse
                    else:
                        del item  # the generator must not keep a tensor that its reader has dropped
                        yield name, self._watch_value(name, value)
                        del value
                self._accept()
            finally:
                with self._ignoring():
                    close_source(items)

        return watched

    @contextlib.contextmanager
    def _ignoring(self) -> Iterator[None]:
        """Changes within it are no changes."""
        self._record()
        try:
            yield
        finally:
            self._accept()

    def _record(self) -> None:
        """Keeps in mind what has changed so far."""
        with self._lock:
            for name, counter, before in self._counters:
                if counter() not in {before, None}:
                    self._changed[name] = None

    def _accept(self) -> None:
        """What has changed and was not recorded counts as unchanged."""
        with self._lock:
            self._counters = [(name, counter, counter()) for name, counter, _ in self._counters]

    def _watch_value(self, name: str, value: TensorOrFunction) -> TensorOrFunction:
        if isinstance(value, Tensor) or not callable(value):
            self.watch(name, value)
            return value

        def call() -> Tensor | Gathered:
            tensor = value()
            self.watch(name, tensor)
            return tensor

        return call

    def check(self) -> None:
        """Raises TensorsChangedError if a tensor has changed since it is watched."""
        self._record()
        if self._changed:
            first, *others = self._changed
            more = f" and {len(others)} more" if others else ""
            raise TensorsChangedError(
                f"{first}{more} changed in place while being sent; nothing was committed, the "
                "servers keep the weights they have: await the handle's `released` before tensors "
                "change, as by an optimizer's step"
            )

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
                    self._changed[watched[0]] = None


_Counter = Callable[[], int | None]  # None: the tensor is gone
_PLAIN = {Tensor, torch.nn.Parameter}


def _local(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor; any other tensor as it is."""
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
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
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

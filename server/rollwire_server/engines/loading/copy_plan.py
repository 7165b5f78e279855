"""Where a model puts each tensor of a checkpoint, traced once from its own ``load_weights``.

Models fuse and shard what they load, each in its own way. The trace runs ``load_weights`` on meta
tensors, and records each copy instead of making it. A commit then makes all copies of an update at
once, in milliseconds. A loader that does more than copy cannot be traced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

COPY = torch.ops.aten.copy_.default
# These pad a parameter. The first load has done that, and nothing changes the padding since.
PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class UntraceableLoadError(Exception):
    """The model's loader does more than copy."""


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """One copy from a checkpoint tensor into a parameter.

    Attributes:
        target: Part of a parameter.
        size, stride, offset: The part of the contiguous checkpoint tensor, in elements.
    """

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


CopyPlan = dict[str, list[PlannedCopy]]
"""The copies of each checkpoint tensor; an empty list if this process holds no part of it."""


def trace_load(model: nn.Module, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> CopyPlan:
    """Traces how ``model`` loads tensors of these names, dtypes and shapes.

    Raises:
        UntraceableLoadError: The loader does more than copy.
    """
    sources = {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        for name, dtype, shape in tensors
    }
    tracer = _CopyTracer(sources)
    with torch.no_grad(), tracer:
        model.load_weights(sources.items())  # type: ignore[operator]  # as SGLang's models have it
    return tracer.plan


def grouped_copy(plan: CopyPlan, staged: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The targets and the sources of all copies of an update."""
    targets, sources = [], []
    for name, tensor in staged.items():
        for copy in plan[name]:
            targets.append(copy.target)
            sources.append(copy.source(tensor))
    return targets, sources


class _CopyTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies out of ``sources``, and refuses whatever else would write."""

    def __init__(self, sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.plan: CopyPlan = {name: [] for name in sources}
        self._names = {_memory(tensor): name for name, tensor in sources.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in sources.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view:
            return func(*args, **(kwargs or {}))
        if func is COPY:
            target, source = args[:2]
            name = self._names.get(_memory(source))
            if name is None or target.is_meta or source.dtype != self._dtypes[name]:
                raise UntraceableLoadError("it copies something that is not in the checkpoint")
            read = source.expand(target.shape)
            copy = PlannedCopy(target, tuple(read.shape), read.stride(), read.storage_offset())
            self.plan[name].append(copy)
            return target
        if func in PADDING and not args[0].is_meta:
            return args[0]
        raise UntraceableLoadError(f"it calls {func}")


def _memory(tensor: Tensor) -> int:
    # The same for all views of one storage, meta tensors included.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  torch names it no other way

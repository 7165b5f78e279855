"""Putting weights in place in a model that fuses and shards what it loads: a copy plan, traced once
from its own ``load_weights``, and fingerprints that tell whether its memory has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import describe
from rollwire_transport._digest import compile_sums, digest_of_sum
from rollwire_transport._manifest import as_bytes, nbytes
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor, nn

COPY = torch.ops.aten.copy_.default
# These pad a parameter. The first load has done that, and nothing changes the padding since.
PADDING = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


class UntraceableLoadError(Exception):
    """The model's loader does more than copy."""


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """One copy of a part of a contiguous checkpoint tensor."""

    target: Tensor  # part of a parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_run: bool  # it copies a run of the tensor's elements to a run of the parameter's

    def source(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


CopyPlan = dict[str, list[PlannedCopy]]
"""The copies of each checkpoint tensor; an empty list if this process holds no part of it."""


def trace_load(model: nn.Module, tensors: Sequence[tuple[str, str, Sequence[int]]]) -> CopyPlan:
    """Traces how ``model`` loads tensors of these names, dtypes and shapes."""
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


def tensor_in_place(copies: Sequence[PlannedCopy], spec: TensorSpec) -> Tensor | None:
    """The bytes of a checkpoint's tensor in the model, if they lie there as in the checkpoint: in
    one piece and in order.
    """
    dtype = getattr(torch, spec.dtype)
    end = 0
    ordered = sorted(copies, key=lambda copy: copy.offset)
    for copy in ordered:
        target, first = copy.target, ordered[0].target
        follows = target.data_ptr() - first.data_ptr() == end * dtype.itemsize
        if not (follows and copy.is_run and copy.offset == end and target.dtype == dtype):
            return None
        if _memory(target) != _memory(first):
            return None
        end += target.numel()
    if not ordered or end * dtype.itemsize != nbytes(spec):
        return None
    return as_bytes(ordered[0].target.as_strided((end,), (1,)))


def gather(copies: Sequence[PlannedCopy], spec: TensorSpec) -> Tensor:
    """A checkpoint's tensor as it is read back from where it was copied to."""
    tensor = copies[0].target.new_empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for copy in copies:
        copy.source(tensor).copy_(copy.target, non_blocking=True)
    return tensor


def can_gather(copies: Sequence[PlannedCopy], spec: TensorSpec) -> bool:
    """Whether its copies hold all of a checkpoint's tensor, in a dtype that has its values."""
    dtype = getattr(torch, spec.dtype)
    copied = torch.zeros(spec.shape, dtype=torch.bool)
    for copy in copies:
        repeats = any(s == 0 and n > 1 for s, n in zip(copy.stride, copy.size, strict=True))
        if repeats or torch.promote_types(dtype, copy.target.dtype) != copy.target.dtype:
            return False
        copy.source(copied).fill_(value=True)
    return bool(copies) and bool(copied.all())


class _CopyTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies out of ``sources`` instead of making them, and refuses all other writes."""

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
            is_run = read.is_contiguous() and target.is_contiguous()
            place = (tuple(read.shape), read.stride(), read.storage_offset())
            self.plan[name].append(PlannedCopy(target, *place, is_run))
            return target
        if func in PADDING and not args[0].is_meta:
            return args[0]
        raise UntraceableLoadError(f"it calls {func}")


def _memory(tensor: Tensor) -> int:
    # The same for all views of one storage, meta tensors included.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  torch names it no other way


PendingFingerprint = list[tuple[list["TensorSpec"], "Tensor"]]
"""The sums of tensors at one moment, computed in the background."""


def fingerprinter(model: nn.Module) -> Callable[[], PendingFingerprint]:
    """What starts a fingerprint of a model whose parameters and buffers stay in place."""
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        by_device.setdefault(tensor.device, {})[name] = _in_memory_order(tensor.detach())
    parts = [
        ([describe(*item) for item in tensors.items()], _sums(device, list(tensors.values())))
        for device, tensors in by_device.items()
    ]
    return lambda: [(specs, sums()) for specs, sums in parts]


def digests_of(pending: PendingFingerprint) -> dict[str, int]:
    """The digest of each tensor; waits for the devices."""
    digests = {}
    for specs, sums in pending:
        if sums.is_cuda:
            torch.cuda.synchronize(sums.device)
        for spec, total in zip(specs, sums.tolist(), strict=True):
            digests[spec.name] = digest_of_sum(spec, total)
    return digests


def _sums(device: torch.device, tensors: list[Tensor]) -> Callable[[], Tensor]:
    """What sums tensors as they are then; devices do on a side stream."""
    compute = compile_sums(tensors)
    if device.type != "cuda":
        return compute
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def on_side_stream() -> Tensor:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            return compute()

    on_side_stream()  # compiles the kernels
    torch.cuda.synchronize(device)
    return on_side_stream


def _in_memory_order(tensor: Tensor) -> Tensor:
    """With its dimensions in the order of its strides."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))

"""Casts of a trainer's tensors to the dtypes of a manifest, as they are packed."""

from __future__ import annotations

import torch
from torch import Tensor

from rollwire_transport._errors import ManifestError

# Values alone make a tensor of one of these. Those of eight bits and fewer also have scales.
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


def castable(dtype: str, to: str) -> bool:
    """Whether a tensor of ``dtype`` can be sent as one of the dtype ``to``."""
    return dtype == to or {dtype, to} <= _FLOATS


class Casts:
    """The casts of one update.

    Attributes:
        dtypes: By name, the dtypes from which tensors were cast.
    """

    def __init__(self) -> None:
        self.dtypes: dict[str, str] = {}
        self._overflows: list[tuple[str, Tensor, torch.dtype]] = []  # flags, on their devices

    def copy(self, name: str, source: Tensor, target: Tensor) -> None:
        """Copies elements of a tensor to a view of the same shape, cast to its dtype."""
        if source.dtype == target.dtype:
            target.copy_(source)
            return
        self.record(name, source.dtype)
        if source.device == target.device:
            target.copy_(source)
            cast = target
        else:  # on the sender's device, whichever this is
            cast = source.to(target.dtype)
            target.copy_(cast)
        if _may_overflow(source.dtype, target.dtype):
            # Read once all is packed, so that packing does not wait for the device.
            flag = (cast.isinf() & source.isfinite()).any()
            self._overflows.append((name, flag, target.dtype))

    def record(self, name: str, dtype: torch.dtype) -> None:
        """Notes that a tensor was of this dtype, and was cast, here or before."""
        self.dtypes[name] = str(dtype).removeprefix("torch.")

    def check(self) -> None:
        """Raises ManifestError if a cast made a finite value infinite."""
        if not self._overflows:
            return
        device = self._overflows[0][1].device
        flags = torch.stack([flag.to(device) for _, flag, _ in self._overflows]).tolist()
        overflows = {
            name: str(dtype).removeprefix("torch.")
            for (name, _, dtype), flag in zip(self._overflows, flags, strict=True)
            if flag
        }
        if overflows:
            (name, dtype), more = next(iter(overflows.items())), len(overflows) - 1
            others = f", and so have {more} more tensors" if more else ""
            raise ManifestError(
                [f"{name} has finite values that {dtype} cannot represent{others}: they would be "
                 "sent as infinity"]
            )  # fmt: skip


def shrinks_safely(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast makes a tensor smaller and no finite value infinite."""
    names = {str(dtype).removeprefix("torch.") for dtype in (source, target)}
    smaller = names <= _FLOATS and target.itemsize < source.itemsize
    return smaller and not _may_overflow(source, target)


def _may_overflow(source: torch.dtype, target: torch.dtype) -> bool:
    # bfloat16 has the range of float32: only values within half a step of float32's limit round
    # to infinity.
    return torch.finfo(source).max > 2 * torch.finfo(target).max

"""Fingerprints of a model's memory, to tell whether it has changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire_transport import describe
from rollwire_transport._digest import compile_sums, digest_of_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import TensorSpec
    from torch import Tensor, nn


class Fingerprinter:
    """Takes fingerprints of a model whose parameters and persistent buffers stay in place."""

    def __init__(self, model: nn.Module) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach()
        self._parts = [
            _CudaDeviceSums(tensors) if device.type == "cuda" else _DeviceSums(tensors)
            for device, tensors in by_device.items()
        ]

    def start(self) -> PendingFingerprint:
        """Starts a fingerprint of the memory as it is now; devices compute on a side stream."""
        return PendingFingerprint([(part.specs, part.sums()) for part in self._parts])


class PendingFingerprint:
    """The digest of each tensor at one moment, computed in the background."""

    def __init__(self, pending: list[tuple[list[TensorSpec], Tensor]]) -> None:
        self._pending = pending
        self._digests: dict[str, int] = {}

    def result(self) -> dict[str, int]:
        """The digests by name; waits for the devices."""
        for specs, sums in self._pending:
            if sums.is_cuda:
                torch.cuda.synchronize(sums.device)
            for spec, total in zip(specs, sums.tolist(), strict=True):
                self._digests[spec.name] = digest_of_sum(spec, total)
        self._pending = []
        return self._digests


class _DeviceSums:
    """The sums of all tensors on one device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        in_memory_order = {name: _in_memory_order(tensor) for name, tensor in tensors.items()}
        self.specs = [describe(name, tensor) for name, tensor in in_memory_order.items()]
        self._summed = compile_sums(list(in_memory_order.values()))

    def sums(self) -> Tensor:
        return self._summed()


class _CudaDeviceSums(_DeviceSums):
    """The same on a CUDA device, on a stream of its own."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.sums()  # compiles the kernels
        torch.cuda.synchronize(self._device)

    def sums(self) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return super().sums()


def _in_memory_order(tensor: Tensor) -> Tensor:
    """With its dimensions in the order of its strides."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))

"""Whether memory is still what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire_transport import describe
from rollwire_transport._digest import compile_sums, digest_of_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport import TensorSpec
    from torch import Tensor, nn


class Fingerprints:
    """Of a model whose parameters and persistent buffers stay where they are, however fused."""

    def __init__(self, model: nn.Module) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach()
        self._parts = [
            _OnDevice(tensors) if device.type == "cuda" else _Part(tensors)
            for device, tensors in by_device.items()
        ]

    def begin(self) -> Fingerprint:
        """Of what is there now; on a device, computed beside what comes next there."""
        return Fingerprint([(part.specs, part.sums()) for part in self._parts])


class Fingerprint:
    """The digest of each tensor at one moment."""

    def __init__(self, begun: list[tuple[list[TensorSpec], Tensor]]) -> None:
        self._begun = begun
        self._digests: dict[str, int] = {}

    def read(self) -> dict[str, int]:
        """By name; waits until they are known."""
        for specs, sums in self._begun:
            if sums.is_cuda:
                torch.cuda.synchronize(sums.device)
            for spec, total in zip(specs, sums.tolist(), strict=True):
                self._digests[spec.name] = digest_of_sum(spec, total)
        self._begun = []
        return self._digests


class _Part:
    """The tensors of one device."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        as_they_lie = {name: _as_it_lies(tensor) for name, tensor in tensors.items()}
        self.specs = [describe(name, tensor) for name, tensor in as_they_lie.items()]
        self._summed = compile_sums(list(as_they_lie.values()))

    def sums(self) -> Tensor:
        """The sum of each."""
        return self._summed()


class _OnDevice(_Part):
    """Computed on a stream of its own, and known once what was asked of the device is done."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._device = next(iter(tensors.values())).device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self.sums()  # compiles
        torch.cuda.synchronize(self._device)

    def sums(self) -> Tensor:
        """See ``_Part``."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return super().sums()


def _as_it_lies(tensor: Tensor) -> Tensor:
    """With its dimensions in the order of its memory, which it is compared in."""
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))

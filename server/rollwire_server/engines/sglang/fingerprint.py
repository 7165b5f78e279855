"""Whether memory is still what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire_transport import describe
from rollwire_transport.digest import digest_of_sum, tensor_sums

if TYPE_CHECKING:
    from torch import Tensor, nn


class Fingerprint:
    """The digest of each parameter and persistent buffer as it lies in memory, however fused.

    Begun when it is made; on a device, beside what comes next there, so that nothing waits for it.
    """

    def __init__(self, model: nn.Module) -> None:
        by_device: dict[torch.device, dict[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            by_device.setdefault(tensor.device, {})[name] = tensor.detach()
        self._begun = [
            ([describe(name, tensor) for name, tensor in tensors.items()], _sums(device, tensors))
            for device, tensors in by_device.items()
        ]
        self._digests: dict[str, int] | None = None

    def read(self) -> dict[str, int]:
        """By name; waits until they are known."""
        if self._digests is None:
            self._digests = {}
            for specs, (sums, done) in self._begun:
                if done is not None:
                    done.synchronize()
                totals = sums.tolist()
                for spec, total in zip(specs, totals, strict=True):
                    self._digests[spec.name] = digest_of_sum(spec, total)
            self._begun = []
        return self._digests


def _sums(
    device: torch.device, tensors: dict[str, Tensor]
) -> tuple[Tensor, torch.cuda.Event | None]:
    """The sum of each tensor, and when they are there."""
    if device.type != "cuda":
        return tensor_sums(list(tensors.values())), None
    beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        sums = tensor_sums(list(tensors.values()))
        return sums, beside.record_event()

"""Numbers on their way from a device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a small tensor in host memory, which is there once the device has come to it.

    Args:
        numbers: int64, one-dimensional, on any device.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if numbers.is_cuda:
            # Pinned, or else this would wait for the device.
            self._here = torch.empty(numbers.shape, dtype=torch.int64, pin_memory=True)
            self._here.copy_(numbers, non_blocking=True)
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(numbers.device))
        else:
            self._here = numbers

    def read(self) -> list[int]:
        """The numbers; waits for the device, and for what was asked of its stream before."""
        if self._done is not None:
            self._done.synchronize()
        return self._here.tolist()

"""Pinned (page-locked) host memory, from which a device copies at full speed.

CUDA takes seconds to pin 15 GB, and the process's other work on devices waits meanwhile. So memory
is pinned when it is first opened, before the server samples.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Pinner(Protocol):
    """Pins and unpins memory of this process; raises RuntimeError if that fails."""

    def pin(self, address: int, nbytes: int) -> None:
        """Pins ``nbytes`` from ``address`` on."""

    def unpin(self, address: int) -> None:
        """Unpins what was pinned from ``address`` on."""


class CudaPinner:
    """Pins by CUDA, for every device of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, nbytes: int) -> None:
        self._call("cudaHostRegister", address, nbytes, 0)

    def unpin(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> None:
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):  # a new thread is on the first one
            result = getattr(cuda, name)(*arguments)
            if int(result) != 0:
                # CUDA keeps the error until it is asked for, and torch asks after each kernel, so
                # the next kernel of this thread would seem to have failed. This one takes it.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)
                raise RuntimeError(f"{name}: {cuda.cudaGetErrorString(result)}")


class PinnedMemory:
    """Host memory that is pinned as a whole, or not at all.

    Attributes:
        error: Why it is not pinned, or None.
    """

    def __init__(self, memory: Tensor, pinner: Pinner) -> None:
        self.error: str | None = None
        self._address = memory.data_ptr()  # a reference to the memory would keep it alive
        self._pinner = pinner
        try:
            pinner.pin(self._address, memory.nbytes)
        except RuntimeError as error:
            self.error = str(error)

    def release(self) -> None:
        """Unpins it; call it before the memory is freed."""
        if self.error is None:
            self._pinner.unpin(self._address)


def pinner_for(device: torch.device) -> Pinner | None:
    """How to pin memory for copies to ``device``; None if pinning does not help there."""
    return CudaPinner(device) if device.type == "cuda" else None

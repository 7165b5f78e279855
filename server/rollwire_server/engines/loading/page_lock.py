"""Host memory from which a device copies at full speed, since its pages are locked.

To lock 15 GB takes CUDA some seconds, for which nothing else that a process asks of its devices
gets on. So memory is locked when it is first opened, before the server samples.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Pages(Protocol):
    """Locks and unlocks pages of this process; raises RuntimeError where that fails."""

    def lock(self, address: int, nbytes: int) -> None:
        """Pages from ``address`` on."""

    def unlock(self, address: int) -> None:
        """Those that were locked from ``address`` on."""


class CudaPages:
    """Pages as CUDA locks them, for every device of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def lock(self, address: int, nbytes: int) -> None:
        """See ``Pages``."""
        self._call("cudaHostRegister", address, nbytes, 0)

    def unlock(self, address: int) -> None:
        """See ``Pages``."""
        self._call("cudaHostUnregister", address)

    def _call(self, name: str, *arguments: int) -> None:
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):  # a new thread is on the first one
            result = getattr(cuda, name)(*arguments)
            if int(result) != 0:
                # CUDA keeps a failure until somebody asks for the last one, and torch asks after
                # each kernel: the next one of this thread would seem to have failed.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=self._device)
                raise RuntimeError(f"{name}: {cuda.cudaGetErrorString(result)}")


class PageLock:
    """Locks all pages of a host memory, or none.

    Attributes:
        error: Why they are not locked, or None.
    """

    def __init__(self, memory: Tensor, pages: Pages) -> None:
        self.error: str | None = None
        self._address = memory.data_ptr()  # not the memory: whoever releases it must be able to
        self._pages = pages
        try:
            pages.lock(self._address, memory.nbytes)
        except RuntimeError as error:
            self.error = str(error)

    def release(self) -> None:
        """Unlocks them; before the memory is let go of."""
        if self.error is None:
            self._pages.unlock(self._address)


def pages_of(device: torch.device) -> Pages | None:
    """How to lock pages for copies to ``device``; None where that is of no use."""
    return CudaPages(device) if device.type == "cuda" else None

"""Host memory from which a device copies at full speed: page-locked while decoding goes on.

Locking some 15 GB takes seconds, for which SGLang's scheduler must not stand still. So a thread
does it: CUDA's calls let go of the interpreter meanwhile. But the driver holds locks of its own for
as long as such a call takes, and whatever the scheduler launches may wait for them: so pages are
locked in pieces of milliseconds, and after each the driver is left alone for as long as it took.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 16 << 20
"""Bytes of one call; a multiple of the page size."""
STOP_SECONDS = 30.0
"""For the call that is under way."""


class Pages(Protocol):
    """Locks and unlocks pages of this process; raises RuntimeError where that fails."""

    def lock(self, address: int, nbytes: int) -> None:
        """Pages from ``address`` on."""

    def unlock(self, address: int) -> None:
        """Those that were locked from ``address`` on by one call."""


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
            raise RuntimeError(f"{name}: {cuda.cudaGetErrorString(result)}")


class PageLock:
    """Begins to lock a host memory's pages as soon as it is made.

    Attributes:
        locked: Bytes that are, from the first on. CUDA copies no tensor that lies on both sides.
        error: Why it could lock no more, or None.
    """

    def __init__(self, memory: Tensor, pages: Pages) -> None:
        self.locked = 0
        self.error: str | None = None
        self._memory = memory
        self._pages = pages
        self._stop = threading.Event()
        self._locking = threading.Thread(target=self._lock, name="rollwire-page-lock", daemon=True)
        self._locking.start()

    @property
    def missing(self) -> int:
        """Bytes that are not locked."""
        return self._memory.nbytes - self.locked

    def stop(self) -> None:
        """Locks no more: ``locked`` stays as it is.

        Tokens are paused by then, and copying the rest as it is takes no longer than locking it.
        Raises TimeoutError when CUDA does not come back.
        """
        self._stop.set()
        self._locking.join(STOP_SECONDS)
        if self._locking.is_alive():
            raise TimeoutError(f"CUDA has not locked {PIECE >> 20} MiB in {STOP_SECONDS:g} s")

    def cuts(self, tensor: Tensor) -> bool:
        """Whether a tensor of this memory is locked in part."""
        begin = tensor.data_ptr() - self._memory.data_ptr()
        return begin < self.locked < begin + tensor.nbytes

    def release(self) -> None:
        """Unlocks all of it, as it was locked, and lets go of the memory then; returns at once."""
        self._stop.set()
        threading.Thread(target=self._unlock, name="rollwire-page-unlock", daemon=True).start()

    def _lock(self) -> None:
        total = self._memory.nbytes
        while self.locked < total and not self._stop.is_set():
            piece = min(PIECE, total - self.locked)
            began = time.monotonic()
            try:
                self._pages.lock(self._memory.data_ptr() + self.locked, piece)
            except RuntimeError as error:
                self.error = str(error)
                return
            self.locked += piece
            self._stop.wait(time.monotonic() - began)

    def _unlock(self) -> None:
        self._locking.join()
        for begin in range(0, self.locked, PIECE):
            began = time.monotonic()
            self._pages.unlock(self._memory.data_ptr() + begin)
            time.sleep(time.monotonic() - began)


def pages_of(device: torch.device) -> Pages | None:
    """How to lock pages for copies to ``device``; None where that is of no use."""
    return CudaPages(device) if device.type == "cuda" else None

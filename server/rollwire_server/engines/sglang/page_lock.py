"""Host memory from which a device copies at full speed: page-locked while decoding goes on.

Locking some 15 GB takes seconds, for which SGLang's scheduler must not stand still. So a thread
does it: CUDA's calls let go of the interpreter meanwhile. But the driver holds locks of its own for
as long as such a call takes, and whatever the scheduler launches may wait for them: so pages are
locked in pieces of milliseconds, and after each the driver is left alone for as long as it took.
"""

from __future__ import annotations

import functools
import mmap
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

    @property
    def piece(self) -> int | None:
        """Bytes to lock by one call; None if it has to be all."""

    def lock(self, address: int, nbytes: int) -> None:
        """Pages from ``address`` on."""

    def unlock(self, address: int) -> None:
        """Those that were locked from ``address`` on by one call."""


class CudaPages:
    """Pages as CUDA locks them, for every device of the process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def piece(self) -> int | None:
        """See ``Pages``: whether a copy may go across two pieces, CUDA does not promise."""
        return PIECE if _copies_across_pieces(self._device) else None

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
        self._piece = memory.nbytes
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
            raise TimeoutError(f"CUDA has not locked {self._piece >> 20} MiB in {STOP_SECONDS:g} s")

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
        self._piece = self._pages.piece or total
        while self.locked < total and not self._stop.is_set():
            piece = min(self._piece, total - self.locked)
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
        for begin in range(0, self.locked, self._piece):
            began = time.monotonic()
            self._pages.unlock(self._memory.data_ptr() + begin)
            time.sleep(time.monotonic() - began)


@functools.cache
def _copies_across_pieces(device: torch.device) -> bool:
    pages, half = CudaPages(device), mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, 2 * half), dtype=torch.uint8)
    memory.copy_(torch.arange(2 * half) % 251)
    locked = []
    try:
        for begin in (memory.data_ptr(), memory.data_ptr() + half):
            pages.lock(begin, half)
            locked.append(begin)
        return torch.equal(memory.to(device).cpu(), memory)
    except RuntimeError:
        return False
    finally:
        for begin in locked:
            pages.unlock(begin)


@functools.cache
def pages_of(device: torch.device) -> Pages | None:
    """How to lock pages for copies to ``device``; None where that is of no use."""
    return CudaPages(device) if device.type == "cuda" else None

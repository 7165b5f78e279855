"""Memory for updates that SGLang's processes have open as well, taken once for one after the other.

To take it, to lock its pages and to open it are not for each update: decoding would wait for that.
On the host it is one anonymous file; on devices, one allocation on each, which the other processes
open by CUDA's handles (``cuda_memory``).
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rollwire_transport import padded_nbytes
from rollwire_transport._tensors import nbytes

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.loading import cuda_memory
from rollwire_server.engines.loading.page_lock import PageLock
from rollwire_server.engines.memory import allocating

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_server.engines.loading.page_lock import Pages


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies: in which part of the memory, from which byte on, how many."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie.

    Attributes:
        parts: How another process of the same user opens each piece of memory, as JSON holds it:
            ``path``, ``size`` and ``inode`` of a file, or in ``ranks`` what ``cuda_memory.share``
            says.
        places: Of the tensors.
    """

    parts: list[dict[str, Any]]
    places: list[Place]

    def told(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, told: dict[str, Any]) -> Layout:
        """What ``told`` said."""
        return cls(told["parts"], [Place(**place) for place in told["places"]])


class Staged(dict[str, "Tensor"]):
    """Tensors by name, and where another process finds them."""

    layout: Layout


class SharedMemory:
    """Has room for one update at a time.

    What still holds tensors of one, be it a transfer that never ended, keeps it from being lent
    again, and its memory from being freed.

    Attributes:
        lock_error: Why its pages are not locked, where they should be, or None.
    """

    def __init__(
        self, memories: Sequence[Tensor], parts: list[dict[str, Any]], part_of: dict[str, int]
    ) -> None:
        self.pieces = [_Piece(memory) for memory in memories]
        self._parts = parts
        self._part_of = part_of
        self._loans: list[weakref.ref[_Loan]] = []
        self.lock_error: str | None = None

    def lock(self, pages: Pages) -> None:
        """Locks its pages, for as long as anybody has it."""
        for piece in self.pieces:
            lock = PageLock(piece.memory, pages)
            self.lock_error = self.lock_error or lock.error
            piece.at_end(lock.release)

    @property
    def lent(self) -> bool:
        """Whether anybody still holds a tensor of what was lent."""
        return any(loan() is not None for loan in self._loans)

    def lend(self, specs: Sequence[TensorSpec]) -> Staged:
        """Uninitialized tensors of some or all of the specs that it was made for, while none are
        lent.
        """
        layout = Layout(self._parts, _arrange(specs, self._part_of))
        loans = [_Loan(piece) for piece in self.pieces]
        self._loans = [weakref.ref(loan) for loan in loans]
        staged = Staged(views(layout, [loan.tensor() for loan in loans]))
        staged.layout = layout
        return staged


def on_host(specs: Sequence[TensorSpec]) -> SharedMemory:
    """Memory for tensors in a file without a name; raises NoMemoryError when there is none."""
    part_of, (size,) = _divide(specs, parts=1)
    descriptor = os.memfd_create("rollwire-staging")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    what = f"an update of {size >> 20} MiB cannot be staged in host memory"
    try:
        with allocating(what, "leave the server more memory"):
            os.posix_fallocate(descriptor, 0, size)
            part = {"path": path, "size": size, "inode": os.fstat(descriptor).st_ino}
            memory = SharedMemory([_open(part, 0)], [part], part_of)
    except EngineError:
        os.close(descriptor)
        raise
    memory.pieces[0].at_end(os.close, descriptor)
    return memory


def on_devices(
    devices: Sequence[torch.device], specs: Sequence[TensorSpec], *, ranks: int
) -> SharedMemory:
    """Memory for tensors, spread evenly over ``devices``, for ``ranks`` processes.

    Raises NoMemoryError when there is none.
    """
    part_of, sizes = _divide(specs, parts=len(devices))
    with allocating(
        f"an update of {sum(sizes) >> 20} MiB cannot be staged on {len(devices)} devices",
        "give SGLang less (--engine-arg mem-fraction-static=…) or start with --staging host",
    ):
        memories = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size, device in zip(sizes, devices, strict=True)
        ]
    parts = [{"ranks": [cuda_memory.share(memory) for _ in range(ranks)]} for memory in memories]
    return SharedMemory(memories, parts, part_of)


def opened(parts: Sequence[dict[str, Any]], rank: int = 0) -> list[Tensor]:
    """The memory of each part, as uint8, the same in every process; ``rank`` is this one's.

    Raises OSError or RuntimeError when it is gone.
    """
    return [_open(part, rank) for part in parts]


def views(layout: Layout, memories: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a layout, in the memory of its parts."""
    return {
        place.name: memories[place.part][place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.dtype))
        .view(place.shape)
        for place in layout.places
    }


class _Piece:
    """A memory, for as long as it or a loan of it is held."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def at_end(self, do: Callable[..., object], *arguments: object) -> None:
        """Has something done before the memory is freed; nothing at the end of the process."""
        weakref.finalize(self, do, *arguments).atexit = False


class _Loan:
    """Lives as long as any tensor over the memory that it lends, which keeps it alive."""

    def __init__(self, piece: _Piece) -> None:
        self._piece = piece
        memory = piece.memory
        told = {"shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False)}
        name = "__cuda_array_interface__" if memory.is_cuda else "__array_interface__"
        setattr(self, name, {**told, "version": 3})

    def tensor(self) -> Tensor:
        """The memory, as uint8."""
        device = self._piece.memory.device
        if device.type == "cuda":
            return torch.as_tensor(self, device=device)
        return torch.from_numpy(np.asarray(self))


def _open(part: dict[str, Any], rank: int) -> Tensor:
    if "path" not in part:
        return cuda_memory.opened(part["ranks"][rank])
    path, size = part["path"], part["size"]
    found = os.stat(path)  # noqa: PTH116
    if (found.st_size, found.st_ino) != (size, part["inode"]):  # torch would make it larger
        raise OSError(f"{path} is not the memory that was staged")
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _divide(specs: Sequence[TensorSpec], *, parts: int) -> tuple[dict[str, int], list[int]]:
    """The part of each tensor, so that they are of about the same size; and those sizes."""
    share = sum(padded_nbytes(nbytes(spec)) for spec in specs) / parts
    part_of = {}
    sizes = [0] * parts
    before = 0  # of all parts
    for spec in specs:
        size = nbytes(spec)
        part = min(int((before + size / 2) / share), parts - 1) if share else 0
        part_of[spec.name] = part
        sizes[part] += padded_nbytes(size)
        before += padded_nbytes(size)
    return part_of, [max(size, padded_nbytes(1)) for size in sizes]


def _arrange(specs: Sequence[TensorSpec], part_of: dict[str, int]) -> list[Place]:
    """Tensors one after the other in their parts, as in the buckets of an update."""
    places = []
    ends: dict[int, int] = {}
    for spec in specs:
        part, size = part_of[spec.name], nbytes(spec)
        places.append(Place(spec.name, spec.dtype, spec.shape, part, ends.get(part, 0), size))
        ends[part] = ends.get(part, 0) + padded_nbytes(size)
    return places

"""Staging memory: where an update waits for its commit, shared with the engine's processes.

It is allocated, pinned and opened once, and used for one update after the other: doing so for each
update would hold up decoding. On the host it is one anonymous file. On devices it is one allocation
each, which the other processes open by CUDA IPC handles.
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
from rollwire_server.engines.loading import cuda_ipc
from rollwire_server.engines.loading.pinned_memory import PinnedMemory
from rollwire_server.engines.memory import allocating

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

    from rollwire_server.engines.loading.pinned_memory import Pinner


@dataclass(frozen=True, slots=True)
class TensorPlacement:
    """Where one tensor lies: the part of the memory, the first byte, the number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Where the tensors of an update lie.

    Attributes:
        parts: How another process of the same user opens each part of the memory, as JSON: the
            ``path``, ``size`` and ``inode`` of a file, or a CUDA IPC handle for each of ``ranks``.
        places: Where each tensor lies in them.
    """

    parts: list[dict[str, Any]]
    places: list[TensorPlacement]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> StagingLayout:
        return cls(value["parts"], [TensorPlacement(**place) for place in value["places"]])


class StagedTensors(dict[str, "Tensor"]):
    """Tensors by name, with the layout by which another process finds them."""

    layout: StagingLayout


class StagingMemory:
    """Room for one update at a time.

    Whoever still holds tensors of an update, such as a transfer that never ended, keeps the memory
    from being lent again and from being freed.

    Attributes:
        pin_error: Why the memory is not pinned although it should be, or None.
    """

    def __init__(
        self, memories: Sequence[Tensor], parts: list[dict[str, Any]], part_of: dict[str, int]
    ) -> None:
        self.regions = [_Region(memory) for memory in memories]
        self._parts = parts
        self._part_of = part_of
        self._borrowed: list[weakref.ref[_Borrowed]] = []
        self.pin_error: str | None = None

    def pin(self, pinner: Pinner) -> None:
        """Pins the memory until it is freed."""
        for region in self.regions:
            pinned = PinnedMemory(region.memory, pinner)
            self.pin_error = self.pin_error or pinned.error
            region.on_release(pinned.release)

    @property
    def in_use(self) -> bool:
        """Whether anybody still holds a tensor of an update."""
        return any(borrow() is not None for borrow in self._borrowed)

    def lend(self, specs: Sequence[TensorSpec]) -> StagedTensors:
        """Uninitialized tensors of some or all of the specs that the memory was allocated for.

        The memory must not be in use.
        """
        layout = StagingLayout(self._parts, _arrange(specs, self._part_of))
        borrowed = [_Borrowed(region) for region in self.regions]
        self._borrowed = [weakref.ref(borrow) for borrow in borrowed]
        staged = StagedTensors(tensor_views(layout, [borrow.tensor() for borrow in borrowed]))
        staged.layout = layout
        return staged


def allocate_on_host(specs: Sequence[TensorSpec]) -> StagingMemory:
    """Host memory in an anonymous file; raises NoMemoryError if there is not enough."""
    part_of, (size,) = _divide(specs, parts=1)
    descriptor = os.memfd_create("rollwire-staging")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    what = f"an update of {size >> 20} MiB cannot be staged in host memory"
    try:
        with allocating(what, "leave the server more memory"):
            os.posix_fallocate(descriptor, 0, size)
            part = {"path": path, "size": size, "inode": os.fstat(descriptor).st_ino}
            memory = StagingMemory([_open(part, 0)], [part], part_of)
    except EngineError:
        os.close(descriptor)
        raise
    memory.regions[0].on_release(os.close, descriptor)
    return memory


def allocate_on_devices(
    devices: Sequence[torch.device], specs: Sequence[TensorSpec], *, ranks: int
) -> StagingMemory:
    """Device memory, spread evenly over ``devices``, for ``ranks`` processes to open.

    Raises NoMemoryError if there is not enough.
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
    parts = [
        {"ranks": [cuda_ipc.export_handle(memory) for _ in range(ranks)]} for memory in memories
    ]
    return StagingMemory(memories, parts, part_of)


def open_parts(parts: Sequence[dict[str, Any]], rank: int = 0) -> list[Tensor]:
    """Opens the memory of each part, as uint8, in the process of ``rank``.

    Raises OSError or RuntimeError if the memory is gone.
    """
    return [_open(part, rank) for part in parts]


def tensor_views(layout: StagingLayout, memories: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        place.name: memories[place.part][place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.dtype))
        .view(place.shape)
        for place in layout.places
    }


class _Region:
    """One memory; freed when neither this nor a borrowed view of it is held."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory

    def on_release(self, do: Callable[..., object], *arguments: object) -> None:
        """Calls ``do`` before the memory is freed, but not at the end of the process."""
        weakref.finalize(self, do, *arguments).atexit = False


class _Borrowed:
    """Lives as long as any tensor over its region, and keeps the region alive."""

    def __init__(self, region: _Region) -> None:
        self._region = region
        memory = region.memory
        value = {"shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False)}
        name = "__cuda_array_interface__" if memory.is_cuda else "__array_interface__"
        setattr(self, name, {**value, "version": 3})

    def tensor(self) -> Tensor:
        """A view of the region, as uint8."""
        device = self._region.memory.device
        if device.type == "cuda":
            return torch.as_tensor(self, device=device)
        return torch.from_numpy(np.asarray(self))


def _open(part: dict[str, Any], rank: int) -> Tensor:
    if "path" not in part:
        return cuda_ipc.open_handle(part["ranks"][rank])
    path, size = part["path"], part["size"]
    found = os.stat(path)  # noqa: PTH116
    if (found.st_size, found.st_ino) != (size, part["inode"]):  # torch would enlarge the file
        raise OSError(f"{path} is not the memory that was staged")
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _divide(specs: Sequence[TensorSpec], *, parts: int) -> tuple[dict[str, int], list[int]]:
    """Assigns tensors to parts of about the same size; returns the part of each, and the sizes."""
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


def _arrange(specs: Sequence[TensorSpec], part_of: dict[str, int]) -> list[TensorPlacement]:
    """Places tensors one after the other in their parts, as in the buckets of an update."""
    places = []
    ends: dict[int, int] = {}
    for spec in specs:
        part, size = part_of[spec.name], nbytes(spec)
        places.append(
            TensorPlacement(spec.name, spec.dtype, spec.shape, part, ends.get(part, 0), size)
        )
        ends[part] = ends.get(part, 0) + padded_nbytes(size)
    return places

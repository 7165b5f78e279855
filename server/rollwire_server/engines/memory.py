"""Memory of tensors: allocating, copying, pinning, and sharing it with an engine's processes."""

from __future__ import annotations

import base64
import contextlib
import errno
import os
import traceback
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from rollwire_transport import padded_nbytes
from rollwire_transport._manifest import nbytes

from rollwire_server.engines.base import EngineError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

GROUPED_COPY_BYTES = 1 << 20
"""Smaller tensors are copied together; for larger ones a GPU's plain copy is faster."""

_NO_MEMORY_MESSAGES = ("out of memory", "Cannot allocate memory")  # torch's, of devices and hosts


@contextlib.contextmanager
def allocating(what: str, advice: str) -> Iterator[None]:
    """Turns a failed allocation into an error that says "WHAT (why): ADVICE".

    NoMemoryError when there is no memory, EngineError when it failed in another way.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        # The frames would keep alive what had been allocated before.
        traceback.clear_frames(error.__traceback__)
        no_memory = (
            isinstance(error, MemoryError | torch.OutOfMemoryError)
            or getattr(error, "errno", None) in (errno.ENOMEM, errno.ENOSPC)
            or any(message in str(error) for message in _NO_MEMORY_MESSAGES)
        )
        kind = NoMemoryError if no_memory else EngineError
        raise kind(f"{what} ({first_line(error)}): {advice}") from error


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def copy_tensors(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source over its target, of the same shape and dtype; waits for no device."""
    small_targets: list[Tensor] = []
    small_sources: list[Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        if target.nbytes >= GROUPED_COPY_BYTES:
            target.copy_(source, non_blocking=True)
        else:
            small_targets.append(target)
            small_sources.append(source)
    if small_targets:
        torch._foreach_copy_(small_targets, small_sources, non_blocking=True)


class PinnedMemory:
    """Host memory, page-locked so that ``device`` copies from it at full speed, as a whole.

    CUDA takes seconds to pin 15 GB, and the process's other work on devices waits meanwhile. So
    memory is pinned when it is first opened, before the server samples. Nothing is done unless this
    is host memory, and ``device`` a CUDA device.
    """

    def __init__(self, memory: Tensor, device: torch.device) -> None:
        self.error: str | None = None
        self._address: int | None = None  # a reference to the memory would keep it alive
        self._device = device
        if device.type == "cuda" and not memory.is_cuda:
            try:
                self._call("cudaHostRegister", memory.data_ptr(), memory.nbytes, 0)
                self._address = memory.data_ptr()
            except RuntimeError as error:
                self.error = str(error)

    def release(self) -> None:
        """Unpins it; call it before the memory is freed."""
        if self._address is not None:
            self._call("cudaHostUnregister", self._address)

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


class TensorPlacement(NamedTuple):
    """Where one tensor lies: the part of the memory, the first byte, the number of bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: int
    offset: int
    nbytes: int


class StagingLayout(NamedTuple):
    """Where the tensors of an update lie; JSON has it as lists.

    ``parts`` say how another process of the same user opens each part of the memory: the ``path``,
    ``size`` and ``inode`` of a file, or a CUDA IPC handle for each of ``ranks``.
    """

    parts: list[dict[str, Any]]
    places: list[TensorPlacement]


class StagedTensors(dict[str, "Tensor"]):
    """Tensors by name, with the layout by which another process finds them."""

    layout: StagingLayout


class StagingMemory:
    """Room for one update at a time, allocated, pinned and opened once: doing so for each update
    would hold up decoding.

    Whoever still holds tensors of an update, such as a transfer that never ended, keeps the memory
    from being lent again and from being freed.
    """

    def __init__(
        self,
        memories: Sequence[Tensor],
        parts: list[dict[str, Any]],
        part_of: dict[TensorSpec, int],
    ) -> None:
        self.regions = [_Region(memory) for memory in memories]
        self.pin_error: str | None = None  # why it is not pinned although it should be
        self._parts = parts
        self._part_of = part_of
        self._borrowed: list[weakref.ref[_Borrowed]] = []

    def pin(self, device: torch.device) -> None:
        """Pins the memory for copies to ``device``, until it is freed."""
        for region in self.regions:
            pinned = PinnedMemory(region.memory, device)
            self.pin_error = self.pin_error or pinned.error
            weakref.finalize(region, pinned.release).atexit = False

    @property
    def in_use(self) -> bool:
        return any(borrow() is not None for borrow in self._borrowed)

    def lend(self, specs: Sequence[TensorSpec]) -> StagedTensors:
        """Uninitialized tensors; it must not be in use.

        What it was allocated for has its place. Anything else is placed where there is room; raises
        NoMemoryError if there is none.
        """
        sizes = [region.memory.nbytes for region in self.regions]
        layout = StagingLayout(self._parts, _arrange(specs, self._part_of, sizes))
        borrowed = [_Borrowed(region) for region in self.regions]
        self._borrowed = [weakref.ref(borrow) for borrow in borrowed]
        staged = StagedTensors(tensor_views(layout, [borrow.tensor() for borrow in borrowed]))
        staged.layout = layout
        return staged


def allocate_on_host(specs: Sequence[TensorSpec]) -> StagingMemory:
    """Host memory in an anonymous file."""
    part_of, (size,) = _divide(specs, parts=1)
    descriptor = os.memfd_create("rollwire-staging")
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    what = f"an update of {size >> 20} MiB cannot be staged in host memory"
    try:
        with allocating(what, "give the server more memory"):
            os.posix_fallocate(descriptor, 0, size)
            part = {"path": path, "size": size, "inode": os.fstat(descriptor).st_ino}
            memory = StagingMemory([_open(part, 0)], [part], part_of)
    except EngineError:
        os.close(descriptor)
        raise
    weakref.finalize(memory.regions[0], os.close, descriptor).atexit = False
    return memory


def allocate_on_devices(
    devices: Sequence[torch.device], specs: Sequence[TensorSpec], *, ranks: int
) -> StagingMemory:
    """Device memory, spread evenly over ``devices``, for ``ranks`` processes to open."""
    part_of, sizes = _divide(specs, parts=len(devices))
    with allocating(
        f"an update of {sum(sizes) >> 20} MiB cannot be staged on {len(devices)} devices",
        "give SGLang less memory (--engine-arg mem-fraction-static=…), or use --staging host",
    ):
        memories = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size, device in zip(sizes, devices, strict=True)
        ]
    # torch frees device memory only when all processes that have opened a handle have closed it, so
    # each process needs a handle of its own.
    parts = [{"ranks": [export_handle(memory) for _ in range(ranks)]} for memory in memories]
    return StagingMemory(memories, parts, part_of)


def open_parts(parts: Sequence[dict[str, Any]], rank: int = 0) -> list[Tensor]:
    """The memory of each part, as uint8; raises OSError or RuntimeError if it is gone."""
    return [_open(part, rank) for part in parts]


def tensor_views(layout: StagingLayout, memories: Sequence[Tensor]) -> dict[str, Tensor]:
    return {
        place.name: memories[place.part][place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.dtype))
        .view(place.shape)
        for place in layout.places
    }


def export_handle(memory: Tensor) -> list[Any]:
    """A CUDA IPC handle as JSON; ``memory`` must begin at the start of its storage."""
    handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return [
        {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for value in handle
    ]


class _Region:
    """One memory; freed when neither this nor a borrowed view of it is held."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory


class _Borrowed:
    """Lives as long as any tensor over its region, and keeps the region alive."""

    def __init__(self, region: _Region) -> None:
        self._region = region
        memory = region.memory
        value = {"shape": (memory.numel(),), "typestr": "|u1", "data": (memory.data_ptr(), False)}
        name = "__cuda_array_interface__" if memory.is_cuda else "__array_interface__"
        setattr(self, name, {**value, "version": 3})

    def tensor(self) -> Tensor:
        device = self._region.memory.device
        if device.type == "cuda":
            return torch.as_tensor(self, device=device)
        return torch.from_numpy(np.asarray(self))


def _open(part: dict[str, Any], rank: int) -> Tensor:
    if "path" in part:
        path, size = part["path"], part["size"]
        found = os.stat(path)  # noqa: PTH116
        if (found.st_size, found.st_ino) != (size, part["inode"]):  # torch would enlarge the file
            raise OSError(f"{path} is not the memory that was staged")
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    handle = [
        base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for value in part["ranks"][rank]
    ]
    torch.cuda.init()  # type: ignore[no-untyped-call]  # this process may have used no device yet
    storage = torch.UntypedStorage._new_shared_cuda(*handle)  # noqa: SLF001  as torch.multiprocessing does
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _divide(specs: Sequence[TensorSpec], *, parts: int) -> tuple[dict[TensorSpec, int], list[int]]:
    """Assigns tensors to parts of about the same size; returns the part of each, and the sizes."""
    share = sum(padded_nbytes(nbytes(spec)) for spec in specs) / parts
    part_of = {}
    sizes = [0] * parts
    before = 0  # of all parts
    for spec in specs:
        size = nbytes(spec)
        part = min(int((before + size / 2) / share), parts - 1) if share else 0
        part_of[spec] = part
        sizes[part] += padded_nbytes(size)
        before += padded_nbytes(size)
    return part_of, [max(size, padded_nbytes(1)) for size in sizes]


def _arrange(
    specs: Sequence[TensorSpec], part_of: Mapping[TensorSpec, int], sizes: Sequence[int]
) -> list[TensorPlacement]:
    """Places tensors one after the other in their parts, as in the buckets of an update."""
    places = []
    ends = [0] * len(sizes)
    for spec in specs:
        size = nbytes(spec)
        room = (i for i, end in enumerate(ends) if end + padded_nbytes(size) <= sizes[i])
        if (part := part_of.get(spec, next(room, None))) is None:
            raise NoMemoryError("these tensors do not fit into the memory of updates")
        places.append(TensorPlacement(spec.name, spec.dtype, spec.shape, part, ends[part], size))
        ends[part] += padded_nbytes(size)
    return places

"""Staged tensors in memory that SGLang's processes can map, without a name that could be left.

On the host they lie in one anonymous file; on devices, in one allocation on each, which the other
processes open by CUDA's handles (``cuda_memory``).
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import padded
from rollwire_transport.tensors import nbytes

from rollwire_server.engines.base import EngineError

from . import cuda_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor


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
            ``path`` and ``size`` of a file, or by ``rank`` what ``cuda_memory.share`` says.
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
    """Tensors by name, and where another process finds them; freed with the last reference."""

    layout: Layout


def allocate(specs: Sequence[TensorSpec]) -> Staged:
    """Uninitialized host memory for tensors; raises EngineError when there is none."""
    places, (size,) = _arrange(specs, parts=1)
    descriptor = os.memfd_create("rollwire-staging")
    try:
        os.posix_fallocate(descriptor, 0, size)
        layout = Layout([{"path": f"/proc/{os.getpid()}/fd/{descriptor}", "size": size}], places)
        staged = Staged(views(layout, opened(layout)))
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        raise EngineError(
            f"an update of {size >> 20} MiB cannot be staged in host memory ({error}): leave the "
            "server more memory"
        ) from error
    staged.layout = layout
    weakref.finalize(staged, os.close, descriptor)
    return staged


def allocate_on(
    devices: Sequence[torch.device], specs: Sequence[TensorSpec], *, ranks: int
) -> Staged:
    """Uninitialized memory for tensors, spread evenly over ``devices``, for ``ranks`` processes.

    Raises EngineError when there is none.
    """
    places, sizes = _arrange(specs, parts=len(devices))
    try:
        memories = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size, device in zip(sizes, devices, strict=True)
        ]
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"an update of {sum(sizes) >> 20} MiB cannot be staged on {len(devices)} devices: give "
            "SGLang less (--engine-arg mem-fraction-static=…) or start with --staging host"
        ) from error
    parts = [{"ranks": [cuda_memory.share(memory) for _ in range(ranks)]} for memory in memories]
    layout = Layout(parts, places)
    staged = Staged(views(layout, memories))
    staged.layout = layout
    return staged


def opened(layout: Layout, rank: int = 0) -> list[Tensor]:
    """The memory of each part, as uint8, the same in every process; ``rank`` is this one's.

    Raises OSError or RuntimeError when it is gone.
    """
    return [_open(part, rank) for part in layout.parts]


def views(layout: Layout, memories: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a layout, in the memory of its parts."""
    return {
        place.name: memories[place.part][place.offset : place.offset + place.nbytes]
        .view(getattr(torch, place.dtype))
        .view(place.shape)
        for place in layout.places
    }


def _open(part: dict[str, Any], rank: int) -> Tensor:
    if "path" not in part:
        return cuda_memory.opened(part["ranks"][rank])
    path, size = part["path"], part["size"]
    if os.stat(path).st_size != size:  # noqa: PTH116  torch would make a new one
        raise OSError(f"{path} is not the memory that was staged")
    return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


def _arrange(specs: Sequence[TensorSpec], *, parts: int) -> tuple[list[Place], list[int]]:
    """Tensors one after the other, as in the buckets of an update, in parts of about the same size;
    and those sizes.
    """
    share = sum(padded(nbytes(spec)) for spec in specs) / parts
    places = []
    sizes = [0] * parts
    before = 0  # of all parts
    for spec in specs:
        size = nbytes(spec)
        part = min(int((before + size / 2) / share), parts - 1) if share else 0
        places.append(Place(spec.name, spec.dtype, spec.shape, part, sizes[part], size))
        sizes[part] += padded(size)
        before += padded(size)
    return places, [max(size, padded(1)) for size in sizes]

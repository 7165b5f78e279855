"""Staged tensors in memory that SGLang's processes can map, without a name that could be left."""

from __future__ import annotations

import dataclasses
import os
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_transport import TensorSpec
    from torch import Tensor

ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie.

    Attributes:
        path: The memory, as a file that processes of the same user can open.
        size: Its bytes.
        tensors: (name, dtype, shape, offset, bytes) of each.
    """

    path: str
    size: int
    tensors: list[tuple[str, str, list[int], int, int]]

    def told(self) -> dict[str, object]:
        """As JSON can hold it."""
        return dataclasses.asdict(self)


class Staged(dict[str, "Tensor"]):
    """Tensors by name, and where another process finds them; freed with the last reference."""

    layout: Layout


def allocate(specs: Sequence[TensorSpec]) -> Staged:
    """Uninitialized memory for tensors; raises EngineError when there is none."""
    tensors = []
    size = 0
    for spec in specs:
        nbytes = _itemsize(spec.dtype) * _elements(spec.shape)
        tensors.append((spec.name, spec.dtype, list(spec.shape), size, nbytes))
        size += -(-nbytes // ALIGNMENT) * ALIGNMENT
    size = max(size, ALIGNMENT)
    descriptor = os.memfd_create("rollwire-staging")
    try:
        os.posix_fallocate(descriptor, 0, size)
        layout = Layout(f"/proc/{os.getpid()}/fd/{descriptor}", size, tensors)
        staged = Staged(views(layout))
    except (OSError, RuntimeError) as error:
        os.close(descriptor)
        raise EngineError(
            f"an update of {size >> 20} MiB cannot be staged in host memory ({error}): leave the "
            "server more memory"
        ) from error
    staged.layout = layout
    weakref.finalize(staged, os.close, descriptor)
    return staged


def views(layout: Layout) -> dict[str, Tensor]:
    """The tensors of a layout, in the same memory in every process.

    Raises OSError when the memory is gone.
    """
    if os.stat(layout.path).st_size != layout.size:  # noqa: PTH116  torch would make a new one
        raise OSError(f"{layout.path} is not the memory that was staged")
    memory = torch.from_file(layout.path, shared=True, size=layout.size, dtype=torch.uint8)
    return {
        name: memory[offset : offset + nbytes].view(getattr(torch, dtype)).view(shape)
        for name, dtype, shape, offset, nbytes in layout.tensors
    }


def _itemsize(dtype: str) -> int:
    return torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def _elements(shape: Sequence[int]) -> int:
    elements = 1
    for length in shape:
        elements *= length
    return elements

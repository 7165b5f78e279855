"""Allocating and copying the memory of tensors."""

from __future__ import annotations

import contextlib
import errno
import traceback
from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import EngineError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

GROUPED_COPY_BYTES = 1 << 20
"""Smaller tensors are copied together; for larger ones a GPU's plain copy is faster."""

_NO_MEMORY_MESSAGES = ("out of memory", "Cannot allocate memory")  # torch's, of devices and hosts


@contextlib.contextmanager
def allocating(what: str, advice: str) -> Iterator[None]:
    """Turns a failed allocation into an error that says "WHAT (why): ADVICE".

    Raises NoMemoryError when there is no memory, EngineError when it failed in another way. The
    error does not keep alive what had been allocated before.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        why = str(error).strip().splitlines() or [type(error).__name__]
        kind = NoMemoryError if _is_no_memory(error) else EngineError
        raise kind(f"{what} ({why[0]}): {advice}") from error


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


def _is_no_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.ENOSPC)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(message in str(error) for message in _NO_MEMORY_MESSAGES)

"""Taking memory, and how that fails, wherever the memory is."""

from __future__ import annotations

import contextlib
import errno
import traceback
from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import EngineError, NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = ("out of memory", "Cannot allocate memory")  # as torch says it, of devices and of the host


@contextlib.contextmanager
def allocating(what: str, advice: str) -> Iterator[None]:
    """Says "WHAT (why): ADVICE" when memory cannot be taken within.

    Raises NoMemoryError when there is none, EngineError when it fails in another way. What was
    taken before is not kept by the error.
    """
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        traceback.clear_frames(error.__traceback__)
        why = str(error).strip().splitlines() or [type(error).__name__]
        kind = NoMemoryError if _is_no_memory(error) else EngineError
        raise kind(f"{what} ({why[0]}): {advice}") from error


def _is_no_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.ENOSPC)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(words in str(error) for words in FULL)

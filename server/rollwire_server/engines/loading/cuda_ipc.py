"""Device memory that other processes open: CUDA IPC handles, as JSON.

torch counts the processes that have a handle open, and frees the memory only when all have closed
it. So each process needs a handle of its own.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# The values of torch's ``_share_cuda_`` and ``_new_shared_cuda``, in their order.
FIELDS = (
    "device",
    "handle",
    "size",
    "offset",
    "counter_handle",
    "counter_offset",
    "event_handle",
    "event_sync_required",
)


def export_handle(memory: Tensor) -> dict[str, Any]:
    """A handle for one other process; ``memory`` must begin at the start of its storage."""
    handle = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    values = (
        {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for value in handle
    )
    return dict(zip(FIELDS, values, strict=True))


def open_handle(handle: dict[str, Any]) -> Tensor:
    """The memory of another process, as uint8; raises RuntimeError if that has freed it."""
    values = (
        base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for value in (handle[field] for field in FIELDS)
    )
    torch.cuda.init()  # type: ignore[no-untyped-call]  # this process may have used no device yet
    storage = torch.UntypedStorage._new_shared_cuda(*values)  # noqa: SLF001  as torch.multiprocessing does
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

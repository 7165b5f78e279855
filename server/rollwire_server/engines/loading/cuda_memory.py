"""Device memory of this process that others open: CUDA's handles, as JSON holds them.

torch counts who has it open: memory that is given back here stays taken until the others have let
go of it too. So each of them needs a handle of its own.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

# What torch says of shared memory and asks for to open it, in its order.
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


def share(memory: Tensor) -> dict[str, Any]:
    """How one other process opens ``memory``, which begins its storage."""
    told = memory.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    values = (
        {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
        for value in told
    )
    return dict(zip(FIELDS, values, strict=True))


def opened(told: dict[str, Any]) -> Tensor:
    """The memory of another process, as uint8; raises RuntimeError when it is gone."""
    values = (
        base64.b64decode(value["bytes"]) if isinstance(value, dict) else value
        for value in (told[field] for field in FIELDS)
    )
    torch.cuda.init()  # type: ignore[no-untyped-call]  # for a process that has used no device yet
    storage = torch.UntypedStorage._new_shared_cuda(*values)  # noqa: SLF001  as torch.multiprocessing does
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

"""What a process does once, and a first update should not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollwire_transport._digest import triton_kernels
from rollwire_transport._links import ucx
from rollwire_transport._links.listener import ANYWHERE

if TYPE_CHECKING:
    import torch

    from rollwire_transport._links.listener import ListenOptions


def warm_up(device: torch.device, listen: ListenOptions = ANYWHERE) -> None:
    """Compiles what updates to tensors on a device use, and has UCX look for its ways from there.
    On a GPU that takes seconds, on a CPU nothing.

    Args:
        device: Where updates come, or from where they go.
        listen: What a receiver's end must keep to.
    """
    triton_kernels(device.type)
    if device.type == "cuda" and ucx.available(listen).ok:
        ucx.prepare(device, listen)

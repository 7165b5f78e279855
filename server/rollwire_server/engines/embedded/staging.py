"""Memory for an update beside the serving weights: on the device, or pinned in host memory."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

SLAB_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""

ALIGNMENT = 256


class StagingPlace(enum.Enum):
    """Where an update waits for its commit."""

    AUTO = "auto"
    """On the device where it has room, else in host memory."""
    DEVICE = "device"
    HOST = "host"


def choose(place: StagingPlace, device: torch.device, needed: int, free: int) -> StagingPlace:
    """What ``place`` means for ``needed`` bytes beside a device that has ``free`` ones.

    AUTO stays where the device has room: should others have taken it when an update comes, that
    one goes to host memory.
    """
    if device.type == "cpu":
        return StagingPlace.HOST
    return StagingPlace.HOST if place is StagingPlace.AUTO and free <= needed else place


def memory_like(targets: Mapping[str, Tensor], place: StagingPlace) -> dict[str, Tensor]:
    """A contiguous tensor like each of ``targets``, uninitialized.

    Raises EngineError when there is no room for them.
    """
    on_gpu = any(target.is_cuda for target in targets.values())
    if not on_gpu:
        return {name: target.new_empty(target.shape) for name, target in targets.items()}
    if place is not StagingPlace.HOST:
        try:
            return {name: target.new_empty(target.shape) for name, target in targets.items()}
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if place is StagingPlace.DEVICE:
                raise EngineError(_no_room(targets, "on the device", error)) from error
    try:
        return in_slabs(targets, pinned=True)
    except RuntimeError as error:
        raise EngineError(_no_room(targets, "in pinned host memory", error)) from error


def in_slabs(targets: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """A contiguous host tensor like each of ``targets``, many of them in one allocation."""
    staged: dict[str, Tensor] = {}
    slab: dict[str, int] = {}
    size = 0

    def take() -> None:
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        for name, offset in slab.items():
            target = targets[name]
            piece = memory[offset : offset + target.nbytes]
            staged[name] = piece.view(target.dtype).view(target.shape)

    for name, target in targets.items():
        if slab and size + target.nbytes > SLAB_BYTES:
            take()
            slab, size = {}, 0
        slab[name] = size
        size += -(-target.nbytes // ALIGNMENT) * ALIGNMENT
    take()
    return {name: staged[name] for name in targets}


def _no_room(targets: Mapping[str, Tensor], where: str, error: Exception) -> str:
    needed = sum(target.nbytes for target in targets.values())
    return (
        f"an update of {needed >> 20} MiB cannot be staged {where} ({str(error).splitlines()[0]}): "
        "start the server with another --staging, or leave it more memory"
    )

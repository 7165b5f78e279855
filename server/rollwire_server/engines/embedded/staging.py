"""Memory for an update beside the serving weights: on the device, or pinned in host memory."""

from __future__ import annotations

import enum
import math
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch

from rollwire_server.engines.allocating import allocating
from rollwire_server.engines.base import NoMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

PINNED_BYTES = 1 << 30
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""


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
    """A contiguous tensor like each of ``targets``, uninitialized, one after the other as in the
    buckets of an update.

    Raises NoMemoryError when there is no room for them.
    """
    device = next((target.device for target in targets.values() if target.is_cuda), None)
    if device is None:
        with _staging(targets, "in host memory"):
            return in_slabs(targets, lambda size: torch.empty(size, dtype=torch.uint8))
    if place is not StagingPlace.HOST:
        try:
            with _staging(targets, "on the device"):
                return in_slabs(
                    targets, lambda size: torch.empty(size, dtype=torch.uint8, device=device)
                )
        except NoMemoryError:
            torch.cuda.empty_cache()
            if place is StagingPlace.DEVICE:
                raise
    with _staging(targets, "in pinned host memory"):
        return in_slabs(
            targets,
            lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True),
            most=PINNED_BYTES,
        )


def in_slabs(
    targets: Mapping[str, Tensor], take: Callable[[int], Tensor], most: float = math.inf
) -> dict[str, Tensor]:
    """A contiguous tensor like each of ``targets``, in as few allocations as ``most`` bytes each
    allow; one larger than that has its own.
    """
    slabs: list[list[transport.TensorSpec]] = [[]]
    size = 0
    for name, target in targets.items():
        if slabs[-1] and size + target.nbytes > most:
            slabs.append([])
            size = 0
        slabs[-1].append(transport.describe(name, target))
        size += transport.padded_nbytes(target.nbytes)
    staged: dict[str, Tensor] = {}
    for slab in slabs:
        staged |= transport.packed_views(slab, take(transport.packed_nbytes(slab)))
    return staged


def _staging(targets: Mapping[str, Tensor], where: str) -> AbstractContextManager[None]:
    needed = sum(target.nbytes for target in targets.values())
    return allocating(
        f"an update of {needed >> 20} MiB cannot be staged {where}",
        "start the server with another --staging, or leave it more memory",
    )

"""The backends, one file each, and how a group is formed over one of them."""

from __future__ import annotations

import threading

import torch

from rollwire_transport._digest import triton_kernels
from rollwire_transport._errors import TransportError
from rollwire_transport._links import gloo, nccl, ucx
from rollwire_transport._links.base import (
    Availability,
    Backend,
    GroupMember,
    Link,
    ListenOptions,
    Transfer,
)
from rollwire_transport._links.rendezvous import Rendezvous, join

__all__ = [
    "Availability",
    "Link",
    "ListenOptions",
    "Rendezvous",
    "Transfer",
    "available_backends",
    "join_group",
    "open_rendezvous",
    "warm_up",
]

_CPU = torch.device("cpu")
_ANYWHERE = ListenOptions()
_BACKENDS: dict[str, Backend] = {b.name: b for b in (gloo.BACKEND, nccl.BACKEND, ucx.BACKEND)}


def available_backends(
    listen: ListenOptions = _ANYWHERE, *, device: torch.device | None = None
) -> dict[str, Availability]:
    """For each backend whether this machine can use it, and why not; the preferred one first.

    Args:
        listen: Where a receiver may listen.
        device: Where the tensors lie, which the order depends on. Default: the CPU.
    """
    on_gpu = device is not None and device.type == "cuda"
    ordered = sorted(
        _BACKENDS.values(), key=lambda b: b.gpu_preference if on_gpu else b.cpu_preference
    )
    reasons = {backend.name: backend.unavailable_reason(listen) for backend in ordered}
    return {name: Availability(not reason, reason) for name, reason in reasons.items()}


def open_rendezvous(
    backend: str,
    *,
    epoch: str,
    world_size: int,
    host: str = "127.0.0.1",
    port: int = 0,
    device: torch.device | None = None,
) -> Rendezvous:
    """Opens the rendezvous of a new group, of which the caller is rank 0.

    Args:
        backend: One of those that are available.
        epoch: Names the group: random, and secret to its members.
        world_size: Members, the caller included.
        host: An address of this machine by which the others reach it; data takes it too.
        port: 0 takes a free one.
        device: Where the tensors lie; buckets are packed there if the backend can send from it.
            Default: the CPU.

    Raises:
        ValueError: ``host`` is no single address, or ``world_size`` is below 2.
        TransportError: The backend cannot be used here.
        OSError: The address cannot be listened on.
    """
    if world_size < 2:
        raise ValueError(f"a group of {world_size} has no receiver")
    chosen = _require(backend, _ANYWHERE)
    member = GroupMember(epoch, 0, world_size, chosen.bucket_device(device or _CPU))
    return Rendezvous(chosen, member, host, port)


def join_group(
    backend: str,
    *,
    epoch: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
    device: torch.device | None = None,
    cancelled: threading.Event | None = None,
    listen: ListenOptions = _ANYWHERE,
) -> Link:
    """Joins a group as a receiver; blocks until all its members have.

    Args:
        backend: The trainer's choice.
        epoch: The group's name.
        rank: 1 to ``world_size`` - 1.
        world_size: Members, rank 0 included.
        rendezvous: Rank 0's ``Rendezvous.address``.
        timeout: Seconds until the group must be formed.
        device: Where the tensors lie; as for ``open_rendezvous``.
        cancelled: Set from another thread, it ends the wait for the others.
        listen: Where this end may listen for its peers.

    Raises:
        TransportTimeout: Not all have joined within ``timeout``.
        SharedDevice: Two members are on one GPU, and the backend needs one for each.
        TransportError: The backend cannot be used here, there is no such group or no place in it
            for this rank, or ``cancelled`` was set.
    """
    if not 0 < rank < world_size:
        raise TransportError(f"rank {rank} is not a receiver in a group of {world_size}")
    chosen = _require(backend, listen)
    member = GroupMember(epoch, rank, world_size, chosen.bucket_device(device or _CPU), listen)
    return join(chosen, member, rendezvous, timeout, cancelled or threading.Event())


def warm_up(device: torch.device, listen: ListenOptions = _ANYWHERE) -> None:
    """Does what would slow down the first update, such as compiling kernels.

    On a GPU that takes seconds, on a CPU nothing.

    Args:
        device: Where the tensors lie.
        listen: Where a receiver may listen.
    """
    triton_kernels(device.type)
    if device.type == "cuda":
        for backend in _BACKENDS.values():
            if not backend.unavailable_reason(listen):
                backend.warm_up(device, listen)


def _require(name: str, listen: ListenOptions) -> Backend:
    backend = _BACKENDS.get(name)
    if backend is None:
        names = ", ".join(sorted(_BACKENDS))
        raise TransportError(f"there is no backend {name!r}, only {names}")
    if reason := backend.unavailable_reason(listen):
        raise TransportError(f"backend {name} cannot be used: {reason}")
    return backend

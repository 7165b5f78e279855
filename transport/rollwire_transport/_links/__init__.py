"""The backends, one file each, and how a link is opened over one of them."""

from __future__ import annotations

import ipaddress
import socket

import torch

from rollwire_transport._delta import delta_kernels
from rollwire_transport._errors import TransportError
from rollwire_transport._links import cuda_ipc, gloo, nccl, ucx
from rollwire_transport._links.base import (
    Availability,
    Backend,
    GroupMember,
    Link,
    ListenOptions,
    Transfer,
)

__all__ = [
    "PROTOCOL",
    "Availability",
    "Link",
    "ListenOptions",
    "Transfer",
    "available_backends",
    "open_link",
    "warm_up",
]

# Of what members exchange: offers, answers, headers, tags. Members of one group have the same.
PROTOCOL = 4

_CPU = torch.device("cpu")
_ANYWHERE = ListenOptions()
_BACKENDS: dict[str, Backend] = {
    b.name: b for b in (gloo.BACKEND, nccl.BACKEND, ucx.BACKEND, cuda_ipc.BACKEND)
}


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


def open_link(
    backend: str,
    *,
    epoch: str,
    rank: int,
    world_size: int,
    host: str = "127.0.0.1",
    device: torch.device | None = None,
    listen: ListenOptions = _ANYWHERE,
) -> Link:
    """Opens one end of a new group, to be connected with the others.

    Args:
        backend: One of those that are available at all members.
        epoch: Names the group: random, and secret to its members.
        rank: 0 sends, the others receive.
        world_size: Members, rank 0 included.
        host: An address of rank 0's machine by which the others reach it.
        device: Where the tensors lie; buckets lie there too if the backend can use it. Default: the
            CPU.
        listen: Where a receiver may listen for its peers.

    Raises:
        ValueError: ``host`` is no single address, at rank 0.
        TransportError: The backend cannot be used here, or there is no such place in a group.
        OSError: ``host`` is no address of this machine, at rank 0.
    """
    chosen = _require(backend, listen)
    if not 0 <= rank < world_size or world_size < 2:
        raise TransportError(f"there is no rank {rank} with a peer in a group of {world_size}")
    if rank == 0:
        _check_own(host)
    place = chosen.bucket_device(device or _CPU)
    return chosen.open(GroupMember(epoch, rank, world_size, host, place, listen))


def warm_up(device: torch.device, listen: ListenOptions = _ANYWHERE) -> None:
    """Does what would slow down the first update, such as compiling kernels.

    On a GPU that takes seconds, on a CPU nothing.

    Args:
        device: Where the tensors lie.
        listen: Where a receiver may listen.
    """
    delta_kernels(device.type)  # and those of digests
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


def _check_own(host: str) -> None:
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(f"host {host!r} is not an address at which others can reach this machine")
    with socket.socket(family) as probe:
        probe.bind(address)

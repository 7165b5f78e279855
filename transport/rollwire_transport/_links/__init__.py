"""The backends, one file each, and how a group of one of them is formed."""

from __future__ import annotations

import threading

import torch

from rollwire_transport._errors import TransportError
from rollwire_transport._links import gloo, nccl, ucx
from rollwire_transport._links.base import Availability, Backend, Link, Rendezvous, Transfer
from rollwire_transport._links.listener import ANYWHERE, ListenOptions

__all__ = [
    "Availability",
    "Link",
    "ListenOptions",
    "Rendezvous",
    "Transfer",
    "available_backends",
    "join_group",
    "open_rendezvous",
]

_CPU = torch.device("cpu")
_BACKENDS: dict[str, Backend] = {"gloo": gloo, "nccl": nccl, "ucx": ucx}


def available_backends(listen: ListenOptions = ANYWHERE) -> dict[str, Availability]:
    """For each backend whether this machine can use it, and why not.

    Args:
        listen: What a receiver's end must keep to.
    """
    return {name: backend.available(listen) for name, backend in _BACKENDS.items()}


def open_rendezvous(
    backend: str,
    *,
    epoch: str,
    world_size: int,
    host: str = "127.0.0.1",
    port: int = 0,
    device: torch.device | None = None,
) -> Rendezvous:
    """Opens the meeting of a new group, of which the caller is rank 0.

    Args:
        backend: One of those that are available.
        epoch: Names the group: random, and secret to its members.
        world_size: Members, the caller included.
        host: An address of this machine by which the others reach it; data takes it too.
        port: 0 takes a free one, and keeps it.
        device: Where the tensors lie; buckets are packed there, if the backend can send from it.
            Default: the CPU.

    Raises:
        ValueError: ``host`` names no one address, or ``world_size`` is below 2.
        TransportError: The backend cannot be used here.
        OSError: The address cannot be listened on.
    """
    if world_size < 2:
        raise ValueError(f"a group of {world_size} has nobody to send to")
    return _usable(backend).open_rendezvous(
        epoch=epoch, world_size=world_size, host=host, port=port, device=device or _CPU
    )


def join_group(
    backend: str,
    *,
    epoch: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
    device: torch.device | None = None,
    closed: threading.Event | None = None,
    listen: ListenOptions = ANYWHERE,
) -> Link:
    """Joins a group; blocks until all its members have.

    Args:
        backend: As the trainer says.
        epoch: The group's name.
        rank: 1 to ``world_size`` - 1.
        world_size: Members, rank 0 included.
        rendezvous: Rank 0's "host:port".
        timeout: Seconds until the group must stand.
        device: Where the tensors lie; as for ``open_rendezvous``.
        closed: Set from another thread, it ends the wait for the others.
        listen: Where this end may listen for its peers.

    Raises:
        TransportTimeout: It did not within ``timeout``.
        TransportError: The backend cannot be used here, or there is no such group, no place in it
            for this rank, or ``closed``.
    """
    if not 0 < rank < world_size:
        raise TransportError(f"rank {rank} is no receiver's in a group of {world_size}")
    return _usable(backend, listen).join_group(
        epoch=epoch,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        timeout=timeout,
        device=device or _CPU,
        closed=closed or threading.Event(),
        listen=listen,
    )


def _usable(backend: str, listen: ListenOptions = ANYWHERE) -> Backend:
    availability = available_backends(listen).get(backend)
    if availability is None:
        names = ", ".join(sorted(_BACKENDS))
        raise TransportError(f"there is no backend {backend!r}, but there are {names}")
    if not availability.ok:
        raise TransportError(f"backend {backend} cannot be used: {availability.reason}")
    return _BACKENDS[backend]

"""What a link is.

A group has one sender, rank 0, and its receivers; each member holds one end of the link. Life of
an end: it is made with the group, moves buckets in their order, ``finish``es, and is closed. A
group is disposable: the first failure spoils it for all its members, and the rest form a new one.
"""

from __future__ import annotations

import abc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from rollwire_transport._links.listener import ListenOptions


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here, and why not."""

    ok: bool
    reason: str


class Transfer(abc.ABC):
    """A bucket under way. It holds on to the tensors that it moves."""

    @abc.abstractmethod
    def wait(self, timeout: float) -> None:
        """Blocks until this end's part is done: the memory may be used again, or has been filled.

        Raises:
            TransportTimeout: ``timeout`` seconds were not enough. The link is spoilt.
            TransportError: A peer failed, or the link was aborted.
        """


class Link(abc.ABC):
    """One end of a group. Used by one thread, except for ``abort``.

    Attributes:
        device: Where payloads must lie, and the headers of those that are sent.
        upstream: The peer that this end receives from.
    """

    device: torch.device
    upstream: str

    @property
    def header_device(self) -> torch.device:
        """Where the headers of those that are received must lie."""
        return self.device

    @property
    def forwarded_bytes(self) -> int:
        """What this end has passed on to others, of the buckets' bytes."""
        return 0

    def lane(self) -> AbstractContextManager[None]:
        """Where buckets are packed and unpacked: on a device, on a stream of the link's own.

        What was asked of the default stream and of the caller's before is waited for there; what
        was asked within is done when it ends.
        """
        return nullcontext()

    @abc.abstractmethod
    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        """Begins to send a bucket to every receiver; several may be under way.

        Args:
            header: int64, shape (4,).
            payload: uint8, one-dimensional, contiguous. Both stay untouched until the transfer is
                done.

        Raises:
            TransportError: The link is spoilt.
        """

    @abc.abstractmethod
    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        """Begins to receive the next bucket, whose size is that of ``payload``; as ``send``, but a
        device must have nothing to do with either any more.
        """

    @abc.abstractmethod
    def finish(self, timeout: float) -> None:
        """Ends a transfer: a receiver says that it has everything, the sender waits for all.

        Raises:
            TransportTimeout: A receiver did not say so within ``timeout`` seconds.
            TransportError: A peer failed, or the link was aborted.
        """

    @abc.abstractmethod
    def abort(self) -> None:
        """Spoils the link at once: here what waits on it fails, elsewhere too where the backend
        can. From any thread, any number of times.
        """

    @abc.abstractmethod
    def close(self) -> bool:
        """Gives everything back; aborts first what is under way. Any number of times.

        Returns whether all memory is let go of. If not, something may still be written into what
        came here was given for.
        """


class Rendezvous(abc.ABC):
    """Where the members of a group meet, held by its rank 0.

    Attributes:
        address: "host:port", what the others need to ``join``.
    """

    address: str

    @abc.abstractmethod
    def form_group(self, timeout: float) -> Link:
        """Blocks until all have joined; returns the end of rank 0. Once in a meeting's life.

        Raises:
            TransportTimeout: Somebody did not join within ``timeout`` seconds; ``peer`` is one.
            TransportError: The group could not be formed, or the meeting was closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the meeting, from any thread; a link that it formed goes on."""


class Backend(Protocol):
    """What a backend's module offers; see ``links`` for the arguments."""

    def available(self, listen: ListenOptions) -> Availability:
        """Whether this machine can use it, and keep to where a receiver's end may listen."""

    def open_rendezvous(
        self, *, epoch: str, world_size: int, host: str, port: int, device: torch.device
    ) -> Rendezvous:
        """The trainer's end of a new group."""

    def join_group(
        self,
        *,
        epoch: str,
        rank: int,
        world_size: int,
        rendezvous: str,
        timeout: float,
        device: torch.device,
        closed: threading.Event,
        listen: ListenOptions,
    ) -> Link:
        """A server's end of a group."""

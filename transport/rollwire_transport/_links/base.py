"""What a backend is: how the buckets of a group move.

A backend is one file of this package. It defines a ``Backend`` and a ``Link``, and ends with
``BACKEND = …``; ``_links/__init__`` lists it, and ``tests/transport/test_links.py`` tries it.

A group has one sender, rank 0, and its receivers. Whoever drives the members carries a few bytes
between them, and tells them when one has died: links need not notice.
"""

from __future__ import annotations

import abc
import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from rollwire_transport._errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here, and why not."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a receiver may listen for its peers, so that a firewall can name it.

    - gloo: on ``host``, by default the address that faces rank 0; on ephemeral ports.
    - ucx: on the interfaces in UCX_NET_DEVICES, by default all; on ``ports``. Over RDMA on none.
    - nccl: on the interface in NCCL_SOCKET_IFNAME; on ephemeral ports.

    Ephemeral ports belong to the network namespace (net.ipv4.ip_local_port_range), and a process
    without privileges cannot change them. So a backend that uses them is available only if they lie
    within ``ports``.

    Attributes:
        host: An IP address of this machine; None: the backend chooses.
        ports: The first and the last; None: any.
    """

    host: str | None = None
    ports: tuple[int, int] | None = None

    def ephemeral_ports_problem(self, backend: str) -> str:
        """Why a backend that uses ephemeral ports cannot keep to this; "" if it can."""
        if self.ports is None:
            return ""
        first, last = self.ports
        try:
            lowest, highest = map(int, _EPHEMERAL_PORTS.read_text().split())
        except (OSError, ValueError):
            return (
                f"{backend} uses ports that the system chooses, and their range is not known here"
            )
        if first <= lowest and highest <= last:
            return ""
        return (
            f"{backend} uses ports that the system chooses, {lowest} to {highest} here, which are "
            f"not within {first} to {last}: set net.ipv4.ip_local_port_range to those"
        )

    def fixed_host_problem(self, backend: str, variable: str) -> str:
        """Why a backend that finds its interfaces itself cannot keep to this; "" if it can."""
        if self.host is None:
            return ""
        return (
            f"{backend} cannot be limited to {self.host}: leave the address open, and name the "
            f"interface in {variable}"
        )


@dataclass(frozen=True, slots=True)
class GroupMember:
    """This end's place in a group.

    Attributes:
        epoch: Names the group: random, and secret to its members.
        rank: 0 sends.
        world_size: Members, rank 0 included.
        host: Address at which receivers reach rank 0.
        device: Where buckets lie, from ``Backend.bucket_device``.
        listen: Where this end may listen; rank 0's is not restricted.
    """

    epoch: str
    rank: int
    world_size: int
    host: str
    device: torch.device
    listen: ListenOptions = ListenOptions()


class Backend(abc.ABC):
    """A way to move buckets.

    Attributes:
        name: As in JoinTransport.
        cpu_preference: Among the backends that all members have, the one with the lowest value is
            used for tensors in host memory.
        gpu_preference: The same for tensors on a GPU.
    """

    name: ClassVar[str]
    cpu_preference: ClassVar[int]
    gpu_preference: ClassVar[int]

    @abc.abstractmethod
    def unavailable_reason(self, listen: ListenOptions) -> str:
        """Why this machine cannot use it, or it cannot keep to ``listen``; "" if it can."""

    def warm_up(self, device: torch.device, listen: ListenOptions) -> None:  # noqa: B027 - optional
        """Does what takes seconds and is done once in a process, before the first update."""

    def bucket_device(self, device: torch.device) -> torch.device:
        """Where buckets lie if tensors lie on ``device``."""
        return device

    @abc.abstractmethod
    def open(self, member: GroupMember) -> Link:
        """This end of a link that is still to be connected.

        Raises:
            TransportError: It cannot be opened here.
        """


class Transfer(abc.ABC):
    """A bucket that is being sent or received. It keeps the tensors that it moves alive."""

    @abc.abstractmethod
    def wait(self, timeout: float) -> None:
        """Blocks until this end's part is done: the memory has been filled, or may be reused.

        Raises:
            TransportTimeout: ``timeout`` seconds passed. The link cannot be used any more.
            TransportError: A peer failed, or the link was aborted.
        """


class Link(abc.ABC):
    """One end of a group. Used by one thread at a time, except for ``abort``.

    Life: opened → ``answer`` of each receiver → ``offers`` of rank 0 → ``connect`` at all members
    at once → the buckets of an update, ``finish``; any number of times → ``close``. The first
    failure ends it, and the other members then abort theirs.

    Attributes:
        device: Where payloads must lie, and the headers of buckets that are sent.
        upstream: The rank that this end receives from.
        answer: What rank 0 needs of a receiver.
        transfers: How many updates have finished.
    """

    device: torch.device
    upstream = 0
    answer = b""
    transfers = 0

    @property
    def header_device(self) -> torch.device:
        """Where the headers of buckets that are received must lie."""
        return self.device

    @property
    def forwarded_bytes(self) -> int:
        """Payload bytes that this end has passed on to other members."""
        return 0

    @property
    def waits_for(self) -> int | None:
        """The rank for which a bucket waits now, where the backend knows it."""
        return None

    @abc.abstractmethod
    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        """What each receiver needs to connect, by its rank. At rank 0, once.

        Args:
            answers: Of all receivers, by their ranks.

        Raises:
            UnsuitableDevices: The backend does not serve members on these devices, such as two on
                one GPU.
            TransportError: An answer is of no use, or there is no network to listen on.
        """

    @abc.abstractmethod
    def connect(self, timeout: float, offer: bytes = b"") -> None:
        """Blocks until this end is connected; called at all members at the same time, once.

        Args:
            timeout: In seconds.
            offer: Rank 0's, at a receiver.

        Raises:
            TransportTimeout: Another member did not do its part in time.
            UnsuitableDevices: At rank 0: as ``offers``, where that shows only now.
            TransportError: The group could not be formed, or the link was aborted.
        """

    def buffer(self, nbytes: int) -> Tensor:
        """Memory (uint8) for payloads that are sent, until ``finish``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def stream_context(self) -> AbstractContextManager[None]:
        """Where buckets are packed and unpacked: on a GPU, on a stream of the link's own.

        It begins after what was queued on the default stream and the caller's, and ends once what
        was queued within is done.
        """
        return nullcontext()

    @abc.abstractmethod
    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        """Begins to send a bucket to every receiver; several may be in flight.

        Args:
            header: int64, shape (4,).
            payload: uint8, one-dimensional, contiguous. Both must not change until the transfer is
                done.

        Raises:
            TransportError: The link cannot be used any more.
        """

    @abc.abstractmethod
    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        """Begins to receive the next bucket, whose size is that of ``payload``.

        As ``send``, but no device work on either tensor may be pending.
        """

    def finish(self) -> None:
        """Ends an update, of which every transfer is done at this end. The link is idle then."""
        self.transfers += 1

    @abc.abstractmethod
    def abort(self) -> None:
        """Ends the link's use at once: waits here fail, and at other members where possible.

        From any thread, any number of times.
        """

    @abc.abstractmethod
    def close(self) -> bool:
        """Frees all resources; first aborts what is in flight. Any number of times.

        Returns:
            Whether all memory is released. If not, the backend may still write into the tensors
            that it was given.
        """


def link_aborted() -> TransportError:
    return TransportError("the link was aborted or closed at this end")


# Gloo and UCX end the process that gets an address which they cannot read.
def sealed(epoch: str, data: bytes) -> bytes:
    """An answer or an offer, with a proof that it is whole and of a member."""
    return _seal(epoch, data) + data


def unsealed(epoch: str, received: bytes, peer: int) -> bytes:
    """What ``peer`` has sealed.

    Raises:
        TransportError: It was changed on its way, or is of another group.
    """
    data = received[hashlib.sha256().digest_size :]
    if received != sealed(epoch, data):
        raise TransportError(f"rank {peer} sent no address of a member of this group", peer)
    return data


def _seal(epoch: str, data: bytes) -> bytes:
    return hashlib.sha256(f"rollwire:{epoch}:".encode() + data).digest()

"""What a backend is: how the buckets of a group move.

A backend is one file of this package. It defines a ``Backend`` and a ``Link``, and ends with
``BACKEND = …``; ``_links/__init__`` lists it, and ``tests/transport/test_links.py`` tries it. How
the members of a group find each other (``rendezvous``) and how a member's death is noticed
(``failure_detector``) is the same for all.

A group has one sender, rank 0, and its receivers; each member holds one end of the link. An end is
made with the group, moves buckets in their order, finishes, and is closed. A group is used for one
transfer: the first failure ends it for all its members, and the rest form a new one.
"""

from __future__ import annotations

import abc
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rollwire_transport._errors import TransportError

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from rollwire_transport._links.control_channel import ControlChannel

_EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

DEVICE_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used here, and why not."""

    ok: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Where a receiver may listen for its peers, so that a firewall can name it.

    A receiver connects to rank 0, and then its backend listens itself:

    - gloo: on ``host``, by default the address that faces rank 0; on ephemeral ports.
    - ucx: on the interfaces in UCX_NET_DEVICES, by default all; on ``ports``. Over RDMA on none.
    - nccl: on the interface in NCCL_SOCKET_IFNAME; on ephemeral ports.

    Ephemeral ports belong to the network namespace (net.ipv4.ip_local_port_range), and a process
    without privileges cannot change them. So ``ports`` are kept to if these lie within them, and
    else the backend is unavailable.

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
        device: Where buckets lie, from ``Backend.bucket_device``.
        listen: Where this end may listen; rank 0's is not restricted.
    """

    epoch: str
    rank: int
    world_size: int
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

    def device_id(self, member: GroupMember) -> bytes:
        """16 bytes that no other member may have: of a GPU, if each member needs its own.

        By default members may share a device.
        """
        return member.rank.to_bytes(DEVICE_ID_BYTES, "little")

    def bootstrap_token(self, member: GroupMember) -> bytes:
        """What rank 0 gives to all members for ``connect``, once all have joined.

        Raises:
            TransportError: There is no network to listen on.
        """
        del member
        return b""

    @abc.abstractmethod
    def connect(
        self,
        member: GroupMember,
        channel: ControlChannel,
        token: bytes,
        deadline: float,
        cancelled: threading.Event,
    ) -> Link:
        """Makes this end of the link; called at all members once all have joined.

        Args:
            member: This end.
            channel: Connects rank 0 with each receiver. The link closes it; if this raises, the
                caller does.
            token: Rank 0's ``bootstrap_token``.
            deadline: By ``time.monotonic``, for waits for other members.
            cancelled: Once it is set, waits for other members end.

        Raises:
            TransportTimeout: Another member did not do its part before ``deadline``.
            TransportError: The link could not be made, or ``cancelled`` was set.
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
    """One end of a group. Used by one thread, except for ``abort``.

    Attributes:
        device: Where payloads must lie, and the headers of buckets that are sent.
        upstream: The peer that this end receives from, as "rank 0".
    """

    device: torch.device
    upstream: str

    @property
    def header_device(self) -> torch.device:
        """Where the headers of buckets that are received must lie."""
        return self.device

    @property
    def forwarded_bytes(self) -> int:
        """Payload bytes that this end has passed on to other members."""
        return 0

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

    @abc.abstractmethod
    def finish(self, timeout: float) -> None:
        """Ends the transfer: a receiver says that it has everything, the sender waits for all.

        Raises:
            TransportTimeout: A receiver did not say so within ``timeout`` seconds.
            TransportError: A peer failed, or the link was aborted.
        """

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

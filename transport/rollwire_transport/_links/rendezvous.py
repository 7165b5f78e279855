"""How the members of a group find each other: over TCP, at rank 0.

    receiver → rank 0    HELLO: the epoch's hash, its rank, the group's size, its device id
    rank 0 → receiver    REPLY: accepted, or why not; then rank 0 hangs up
    rank 0 → receiver    START and the backend's bootstrap token, once all have joined

The connections stay open as the group's ``ControlChannel``.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import ipaddress
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_transport._errors import SharedDevice, TransportError, TransportTimeout
from rollwire_transport._links.base import DEVICE_ID_BYTES
from rollwire_transport._links.control_channel import ControlChannel
from rollwire_transport._links.framing import MAX_BODY_BYTES, Frame, FramedSocket, MessageType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_transport._links.base import Backend, GroupMember, Link

_HELLO = struct.Struct(f"<8s32sII{DEVICE_ID_BYTES}s")
_REPLY = struct.Struct("<BI")
_MAGIC = b"rollwm\x00\x02"

_CONNECT_SECONDS = 5.0  # for a living rank 0 to accept a connection
_POLL_SECONDS = 0.005


class _Reply(enum.IntEnum):
    """Rank 0's answer to a HELLO, sent with a number."""

    ACCEPTED = 1
    UNKNOWN_EPOCH = 2
    OTHER_SIZE = 3  # number: the group's size
    RANK_TAKEN = 4
    SHARED_DEVICE = 5  # number: the rank that has another's device


@dataclass(frozen=True, slots=True)
class _Joined:
    connection: FramedSocket
    device_id: bytes


class Rendezvous:
    """Rank 0's end of a group until it is formed.

    Attributes:
        address: "host:port", what the others need to join.
    """

    def __init__(self, backend: Backend, member: GroupMember, host: str, port: int) -> None:
        self._backend = backend
        self._member = member
        self._epoch_hash = _hash(member.epoch)
        self._ranks = range(1, member.world_size)
        self._listener, self.address = listen(host, port)
        self._listener.settimeout(0)
        self._closed = threading.Event()

    def form_group(self, timeout: float) -> Link:
        """Blocks until all have joined; returns rank 0's end of the link. Once in its life.

        Who does not belong to the group is refused, and disturbs nobody.

        Raises:
            TransportTimeout: A member did not join within ``timeout`` seconds; ``peer`` is one.
            SharedDevice: Two members are on one GPU, and the backend needs one for each.
            TransportError: The group could not be formed, or this was closed.
        """
        deadline = time.monotonic() + timeout
        channel = self._gather(timeout)
        try:
            token = self._backend.bootstrap_token(self._member)
            channel.send(MessageType.START, token)
            return self._backend.connect(self._member, channel, token, deadline, self._closed)
        except BaseException:
            channel.close()
            raise

    def close(self) -> None:
        """Ends ``form_group``, from any thread; a link that it returned stays open."""
        self._closed.set()
        self._listener.close()

    def _gather(self, timeout: float) -> ControlChannel:
        joined: dict[int, _Joined] = {}
        callers: list[FramedSocket] = []  # whose HELLO has not come yet
        try:
            self._await_all(joined, callers, timeout)
            _refuse_shared_devices(self._backend.device_id(self._member), joined)
        except BaseException:
            for member in joined.values():
                member.connection.close()
            raise
        finally:
            for caller in callers:
                caller.close()
        return ControlChannel(0, {rank: member.connection for rank, member in joined.items()})

    def _await_all(
        self, joined: dict[int, _Joined], callers: list[FramedSocket], timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in self._ranks if rank not in joined]:
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {rank}" for rank in missing)
                raise TransportTimeout(
                    f"{who} did not join within {timeout:g} s", f"rank {missing[0]}"
                )
            if self._closed.wait(_POLL_SECONDS):
                raise TransportError("the rendezvous was closed")
            self._accept(callers)
            _drop_those_who_left(joined)
            for caller in callers.copy():
                self._read_hello(caller, callers, joined)

    def _accept(self, callers: list[FramedSocket]) -> None:
        with contextlib.suppress(OSError):  # nobody is waiting, or the listener is closed
            while True:
                connection, _ = self._listener.accept()
                callers.append(FramedSocket(connection, "the caller", _HELLO.size))

    def _read_hello(
        self, caller: FramedSocket, callers: list[FramedSocket], joined: dict[int, _Joined]
    ) -> None:
        try:
            frames = caller.receive_available()
        except TransportError:
            frames = [Frame(0, b"")]
        if not frames and not caller.closed_by_peer:
            return
        callers.remove(caller)
        if not frames:
            caller.close()
            return
        self._answer(caller, frames[0], joined)

    def _answer(self, caller: FramedSocket, frame: Frame, joined: dict[int, _Joined]) -> None:
        if frame.type != MessageType.HELLO or len(frame.body) != _HELLO.size:
            _refuse(caller, _Reply.UNKNOWN_EPOCH)
            return
        magic, epoch_hash, rank, world_size, device_id = _HELLO.unpack(frame.body)
        if magic != _MAGIC or epoch_hash != self._epoch_hash:
            _refuse(caller, _Reply.UNKNOWN_EPOCH)
        elif world_size != self._member.world_size:
            _refuse(caller, _Reply.OTHER_SIZE, self._member.world_size)
        elif rank in joined or rank not in self._ranks:
            _refuse(caller, _Reply.RANK_TAKEN)
        elif caller.send(MessageType.REPLY, _REPLY.pack(_Reply.ACCEPTED, 0)):
            caller.peer = f"rank {rank}"
            caller.max_body_bytes = MAX_BODY_BYTES
            joined[rank] = _Joined(caller, device_id)
        else:
            caller.close()


def join(
    backend: Backend,
    member: GroupMember,
    address: str,
    timeout: float,
    cancelled: threading.Event,
) -> Link:
    """A receiver's way into a group; see ``links.join_group``."""
    deadline = time.monotonic() + timeout
    hello = _HELLO.pack(
        *(_MAGIC, _hash(member.epoch), member.rank, member.world_size, backend.device_id(member))
    )
    connection = _connect(address, timeout)
    channel = ControlChannel(member.rank, {0: connection})
    try:
        connection.send(MessageType.HELLO, hello)
        _require_accepted(connection.receive(deadline, cancelled), member)
        token = _start_token(connection.receive(deadline, cancelled), member)
        return backend.connect(member, channel, token, deadline, cancelled)
    except BaseException:
        channel.close()
        raise


def listen(host: str, port: int) -> tuple[socket.socket, str]:
    """Listens on an address of this machine; returns the listener and "host:port".

    Raises:
        ValueError: ``host`` is no single address.
        OSError: The address cannot be listened on.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if ipaddress.ip_address(address[0]).is_unspecified:
        raise ValueError(f"host {host!r} is not an address at which others can reach this machine")
    # Bound here and handed over: a port that is found free and bound later may be taken.
    listener = socket.create_server(address[:2], family=family, backlog=512)
    port = listener.getsockname()[1]
    return listener, f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """The host and the port of "host:port".

    Raises:
        TransportError: It is something else.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # the socket module does so too, but then raises no OSError
        number = int(port) if port.isascii() and port.isdecimal() and len(port) <= 5 else 0
    except UnicodeError:
        number = 0
    if not host or not 0 < number < 1 << 16:
        raise TransportError(f"rendezvous {address!r} is not host:port", "rank 0")
    return host, number


def _connect(address: str, timeout: float) -> FramedSocket:
    try:
        connection = socket.create_connection(
            parse_address(address), min(timeout, _CONNECT_SECONDS)
        )
    except OSError as error:
        kind = TransportTimeout if isinstance(error, TimeoutError) else TransportError
        raise kind(f"nobody meets at {address}: {error}", "rank 0") from error
    return FramedSocket(connection, "rank 0")


def _hash(epoch: str) -> bytes:
    return hashlib.sha256(epoch.encode()).digest()


def _drop_those_who_left(joined: dict[int, _Joined]) -> None:
    """Frees the places of members that hung up; before the start they have nothing to say."""
    for rank, member in list(joined.items()):
        try:
            left = member.connection.receive_available() or member.connection.closed_by_peer
        except TransportError:
            left = True
        if left:
            member.connection.close()
            del joined[rank]


def _refuse_shared_devices(device_id: bytes, joined: Mapping[int, _Joined]) -> None:
    owners = {device_id: 0}
    for rank, member in sorted(joined.items()):
        owner = owners.setdefault(member.device_id, rank)
        if owner != rank:
            for other in joined.values():
                _send_reply(other.connection, _Reply.SHARED_DEVICE, rank)
            raise SharedDevice(_shared_device(rank), f"rank {rank}")


def _shared_device(rank: int) -> str:
    return f"rank {rank} is on the GPU of another member, and each needs its own: use ucx, or gloo"


def _send_reply(connection: FramedSocket, reply: _Reply, number: int = 0) -> None:
    connection.send(MessageType.REPLY, _REPLY.pack(reply, number))


def _refuse(caller: FramedSocket, reply: _Reply, number: int = 0) -> None:
    _send_reply(caller, reply, number)
    caller.close()


def _require_accepted(frame: Frame, member: GroupMember) -> None:
    if frame.type != MessageType.REPLY or len(frame.body) != _REPLY.size:
        raise _no_rendezvous()
    reply, number = _REPLY.unpack(frame.body)
    rank = member.rank
    if reply == _Reply.UNKNOWN_EPOCH:
        raise TransportError("there is no group of this epoch", "rank 0")
    if reply == _Reply.OTHER_SIZE:
        raise TransportError(
            f"the group has {number} members, but this member expects {member.world_size}", "rank 0"
        )
    if reply == _Reply.RANK_TAKEN:
        raise TransportError(f"rank {rank} has joined this group already", f"rank {rank}")
    if reply == _Reply.SHARED_DEVICE:
        raise SharedDevice(_shared_device(number), "rank 0")
    if reply != _Reply.ACCEPTED:
        raise _no_rendezvous()


def _start_token(frame: Frame, member: GroupMember) -> bytes:
    """The bootstrap token; rank 0 may still refuse a member that it has accepted."""
    if frame.type != MessageType.START:
        _require_accepted(frame, member)
        raise _no_rendezvous()
    return frame.body


def _no_rendezvous() -> TransportError:
    return TransportError("the peer there does not speak rollwire's protocol", "rank 0")

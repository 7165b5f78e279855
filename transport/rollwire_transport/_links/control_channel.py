"""The control connections of a group: TCP between rank 0 and each receiver, while it exists.

What moves the buckets may not notice that a peer died; these connections do, at once. What arrives
is kept for each peer; ``failure_detector`` says what follows from it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links.framing import Frame, MessageType

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from rollwire_transport._links.framing import FramedSocket

logger = logging.getLogger(__name__)

_RANK = struct.Struct("<I")
_PUT_SECONDS = 1.0  # to send a few kilobytes on a connection on which nothing is pending

STATES = (MessageType.RECEIVING, MessageType.FORWARDING, MessageType.WORKING)


@dataclass(slots=True)
class Peer:
    """Another member and what it has reported.

    Attributes:
        steps: How many.
        state: One of STATES.
        heard_at: When it last sent anything, by ``time.monotonic``.
        values: What it has ``put``.
        finished: It has everything.
        timed_out: It has given up waiting.
        lost: The rank of a neighbour to which it lost its connection.
        blamed: The rank because of which rank 0 gave the group up.
        left: It has hung up.
    """

    connection: FramedSocket
    steps: int = 0
    state: MessageType = MessageType.WORKING
    heard_at: float = field(default_factory=time.monotonic)
    values: deque[bytes] = field(default_factory=deque)
    finished: bool = False
    timed_out: bool = False
    lost: int | None = None
    blamed: int | None = None
    left: bool = False


class ControlChannel:
    """One end's connections: rank 0's with all receivers, a receiver's with rank 0.

    Used by one thread, except for ``wake`` and ``hang_up``; while the group forms ``put`` and
    ``get`` may be used by one thread for each peer.

    Attributes:
        rank: This end's.
        peers: By their rank, in order.
    """

    def __init__(self, rank: int, connections: Mapping[int, FramedSocket]) -> None:
        self.rank = rank
        self.peers = {other: Peer(connection) for other, connection in sorted(connections.items())}
        self._selector = selectors.DefaultSelector()
        for peer in self.peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.settimeout(0)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)

    @property
    def all_finished(self) -> bool:
        return all(peer.finished for peer in self.peers.values())

    @property
    def all_left(self) -> bool:
        return all(peer.left for peer in self.peers.values())

    def put(self, rank: int, value: bytes) -> None:
        """Gives a peer what its backend ``get``s to connect."""
        self.peers[rank].connection.send(MessageType.VALUE, value, timeout=_PUT_SECONDS)

    def get(self, rank: int, deadline: float, cancelled: threading.Event) -> bytes:
        """The next value that a peer has ``put``; raises as ``FramedSocket.receive``."""
        peer = self.peers[rank]
        try:
            while not peer.values:
                _note(peer, peer.connection.receive(deadline, cancelled))
        except TransportTimeout as error:
            who = peer.connection.peer
            raise TransportTimeout(f"{who} did not connect in time", who) from error
        return peer.values.popleft()

    def send(self, type_: MessageType, body: bytes = b"") -> None:
        """Sends a message to all peers. One that is gone is found by reading."""
        for peer in self.peers.values():
            peer.connection.send(type_, body)

    def send_rank(self, type_: MessageType, rank: int) -> None:
        """Sends a message about a rank to all peers."""
        self.send(type_, _RANK.pack(rank))

    def read(self, timeout: float = 0.0) -> None:
        """Waits until a peer sends something, or for ``wake``; then notes all that is here.

        A peer that sends anything but messages of this format counts as having left.
        """
        for key, _ in self._selector.select(timeout):
            if (peer := key.data) is None:
                self._wake_reader.recv(4096)
                continue
            try:
                for frame in peer.connection.receive_available():
                    _note(peer, frame)
            except TransportError as error:
                logger.warning("%s", error)
                peer.left = True
            if peer.left or peer.connection.closed_by_peer:
                peer.left = True
                self._selector.unregister(peer.connection)

    def wake(self) -> None:
        """Ends a ``read``. From any thread."""
        with contextlib.suppress(OSError):  # woken already, or closed
            self._wake_writer.send(b"\0")

    def hang_up(self) -> None:
        """Leaves the group: peers notice at once. From any thread."""
        for peer in self.peers.values():
            peer.connection.hang_up()

    def close(self) -> None:
        """Hangs up and frees the connections. Any number of times."""
        self._selector.close()
        self._wake_writer.close()
        self._wake_reader.close()
        for peer in self.peers.values():
            peer.connection.close()


def _note(peer: Peer, frame: Frame) -> None:
    peer.heard_at = time.monotonic()
    if frame.type in STATES:
        peer.state = MessageType(frame.type)
    elif frame.type == MessageType.STEP:
        peer.steps += 1
    elif frame.type == MessageType.VALUE:
        peer.values.append(frame.body)
    elif frame.type == MessageType.FINISHED:
        peer.finished = True
    elif frame.type == MessageType.TIMED_OUT:
        peer.timed_out = True
    elif frame.type == MessageType.PEER_LOST:
        peer.lost = _rank(peer, frame)
    elif frame.type == MessageType.ABORTED:
        peer.blamed = _rank(peer, frame)


def _rank(peer: Peer, frame: Frame) -> int:
    if len(frame.body) != _RANK.size:
        raise TransportError(f"{peer.connection.peer} sent a message of another format")
    (rank,) = _RANK.unpack(frame.body)
    return int(rank)

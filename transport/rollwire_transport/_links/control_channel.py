"""The control connections of a group: TCP between rank 0 and each receiver, while the group stands.

What moves the buckets may not notice that a peer died; these connections do, at once. And from
what comes over them rank 0 knows who falls behind, so that it can name who is frozen.

    receiver → rank 0    who it is: the epoch's hash, its rank, the group's size, its card
    rank 0 → receiver    a verdict; after a refusal rank 0 hangs up
    rank 0 → receiver    START and the group's ticket, once all are there
    receiver → rank 0    STEP for each thing it did, LATE when it gives up waiting, FINISHED
    either               hangs up: the group is over
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_transport._errors import SharedDevice, TransportError, TransportTimeout
from rollwire_transport._links import addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TICKET_BYTES = 128
CARD_BYTES = 16

_HELLO = struct.Struct(f"<8s32sII{CARD_BYTES}s")
_MAGIC = b"rollwm\x00\x01"
_VERDICT = struct.Struct("<BI")

_POLL_SECONDS = 0.005
_LISTEN_SECONDS = 0.05
_BLAME_SECONDS = 0.3  # by which a peer's end may be known here later than elsewhere


class _Verdict(enum.IntEnum):
    """What rank 0 says to one who comes, with a number."""

    WELCOME = 1
    NO_SUCH_EPOCH = 2
    OTHER_SIZE = 3  # the group's
    RANK_TAKEN = 4
    SAME_CARD = 5  # the rank that has another's
    START = 6  # a ticket follows


class Signal(enum.IntEnum):
    """What a receiver tells while the group stands."""

    STEP = 1
    LATE = 2
    FINISHED = 3


def card_of_rank(rank: int) -> bytes:
    """A card that no other member has, for backends whose members may share a device."""
    return rank.to_bytes(CARD_BYTES, "little")


@dataclass(frozen=True, slots=True)
class _Member:
    connection: socket.socket
    card: bytes


class Gathering:
    """Rank 0's end until the group starts.

    Args:
        epoch: Names the group.
        world_size: Members, rank 0 included.
        host: As for ``links.open_rendezvous``.
        port: As for ``links.open_rendezvous``.

    Attributes:
        address: "host:port", for the others.
    """

    def __init__(self, epoch: str, world_size: int, host: str, port: int) -> None:
        self._secret = _hash(epoch)
        self._ranks = range(1, world_size)
        self._listener, self.address = addresses.listen(host, port)
        self._listener.settimeout(0)
        self._closed = threading.Event()

    def close(self) -> None:
        """Ends ``gather``, from any thread; what it gave goes on."""
        self._closed.set()
        self._listener.close()

    def gather(self, card: bytes, timeout: float) -> Lines:
        """Blocks until all have come. Whoever does not belong is sent away, and hurts nobody.

        Args:
            card: Of rank 0; two members may not have the same.
            timeout: Seconds.

        Raises:
            TransportTimeout: Somebody did not come; ``peer`` is one of them.
            TransportError: Two have one card, or this was closed.
        """
        members: dict[int, _Member] = {}
        callers: dict[socket.socket, bytes] = {}  # who has not said all yet, and what it said
        try:
            self._await_all(members, callers, timeout)
            _refuse_shared_cards(card, members)
        except BaseException:
            for member in members.values():
                member.connection.close()
            raise
        finally:
            for caller in callers:
                caller.close()
        return Lines({rank: member.connection for rank, member in members.items()})

    def _await_all(
        self, members: dict[int, _Member], callers: dict[socket.socket, bytes], timeout: float
    ) -> None:
        deadline = time.monotonic() + timeout
        while missing := [rank for rank in self._ranks if rank not in members]:
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {rank}" for rank in missing)
                raise TransportTimeout(
                    f"{who} did not join within {timeout:g} s", f"rank {missing[0]}"
                )
            if self._closed.wait(_POLL_SECONDS):
                raise TransportError("the meeting was closed")
            self._accept(callers)
            _forget_those_who_left(members)
            for caller in list(callers):
                self._listen(caller, callers, members)

    def _accept(self, callers: dict[socket.socket, bytes]) -> None:
        with contextlib.suppress(OSError):  # nobody there, or closed
            while True:
                caller, _ = self._listener.accept()
                caller.settimeout(0)
                callers[caller] = b""

    def _listen(
        self,
        caller: socket.socket,
        callers: dict[socket.socket, bytes],
        members: dict[int, _Member],
    ) -> None:
        try:
            said = caller.recv(_HELLO.size - len(callers[caller]))
        except BlockingIOError:
            return
        except OSError:
            said = b""
        callers[caller] += said
        if said and len(callers[caller]) < _HELLO.size:
            return
        hello = callers.pop(caller)
        if not said:
            caller.close()
            return
        magic, secret, rank, world_size, card = _HELLO.unpack(hello)
        if magic != _MAGIC or secret != self._secret:
            _refuse(caller, _Verdict.NO_SUCH_EPOCH)
        elif world_size != len(self._ranks) + 1:
            _refuse(caller, _Verdict.OTHER_SIZE, len(self._ranks) + 1)
        elif rank in members or rank not in self._ranks:
            _refuse(caller, _Verdict.RANK_TAKEN)
        elif _tell(caller, _VERDICT.pack(_Verdict.WELCOME, 0)):
            members[rank] = _Member(caller, card)


def call(
    epoch: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    card: bytes,
    timeout: float,
    closed: threading.Event,
) -> tuple[Lines, bytes]:
    """A receiver's way into a group: blocks until all have come; returns its line and the ticket.

    Setting ``closed`` ends it.

    Raises:
        TransportTimeout: Not all came within ``timeout`` seconds.
        TransportError: There is no such group, no place in it for this rank or card, or ``closed``.
    """
    deadline = time.monotonic() + timeout
    connection = addresses.connect(rendezvous, timeout)
    try:
        _tell(connection, _HELLO.pack(_MAGIC, _hash(epoch), rank, world_size, card))
        for wanted in (_Verdict.WELCOME, _Verdict.START):
            verdict, number = _VERDICT.unpack(read(connection, _VERDICT.size, deadline, closed))
            _expect(wanted, verdict, number, rank, world_size)
        ticket = read(connection, TICKET_BYTES, deadline, closed)
    except BaseException:
        connection.close()
        raise
    return Lines({0: connection}), ticket


@dataclass(slots=True)
class _Peer:
    """The other end of a line, and what it has told."""

    connection: socket.socket
    steps: int = 0
    late: bool = False
    finished: bool = False
    left: bool = False


class Lines:
    """One end's control connections, once all have come. ``hang_up`` is for any thread."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self._peers = {rank: _Peer(connection) for rank, connection in sorted(connections.items())}
        self._selector = selectors.DefaultSelector()
        for rank, peer in self._peers.items():
            peer.connection.settimeout(0)
            self._selector.register(peer.connection, selectors.EVENT_READ, rank)

    @property
    def finished(self) -> bool:
        """Whether every peer has told so."""
        return all(peer.finished for peer in self._peers.values())

    @property
    def over(self) -> bool:
        """Whether every peer has hung up."""
        return all(peer.left for peer in self._peers.values())

    @property
    def fewest_steps(self) -> int:
        """How far all peers are."""
        return min(peer.steps for peer in self._peers.values())

    @property
    def laggard(self) -> str | None:
        """The peer that is further behind than all others, if there is one."""
        far = {rank: (peer.finished, peer.steps) for rank, peer in self._peers.items()}
        behind = [rank for rank, how_far in far.items() if how_far == min(far.values())]
        return f"rank {behind[0]}" if len(behind) == 1 else None

    def start(self, ticket: bytes) -> None:
        """Tells all that the group starts."""
        self.tell(_VERDICT.pack(_Verdict.START, 0) + ticket)

    def signal(self, signal: Signal) -> None:
        """Tells rank 0 something."""
        self.tell(bytes([signal]))

    def tell(self, message: bytes) -> None:
        """Sends a few bytes to all. A peer that is gone is found by ``check``."""
        for peer in self._peers.values():
            _tell(peer.connection, message)

    def check(self) -> None:
        """Takes in what peers told.

        Raises:
            TransportTimeout: One has given up waiting; ``peer`` is who it waits for, if one is
                behind the others.
            TransportError: One has left, and had not finished.
        """
        self.read()
        for rank, peer in self._peers.items():
            if peer.late:
                raise TransportTimeout(
                    f"rank {rank} gave up waiting{_for(self.laggard)}", self.laggard
                )
            if peer.left and not peer.finished:
                raise TransportError(f"rank {rank} left the group", f"rank {rank}")

    def blame(self, given_up: Callable[[], bool]) -> None:
        """As ``check``, but waits a moment for it, or until ``given_up``: what moves the buckets
        may lose a peer that died before its line tells so.
        """
        until = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < until and not given_up():
            self.check()
            time.sleep(_POLL_SECONDS)

    def read(self) -> None:
        """Takes in what peers told, whatever it is."""
        for key, _ in self._selector.select(0):
            peer = self._peers[key.data]
            told = _drain(peer.connection)
            peer.steps += told.count(Signal.STEP)
            peer.late |= Signal.LATE in told
            peer.finished |= Signal.FINISHED in told
            if not told:
                peer.left = True
                self._selector.unregister(peer.connection)

    def hang_up(self) -> None:
        """Ends the group at the other ends, and here for who checks."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def detach(self) -> dict[int, socket.socket]:
        """Gives the connections to whoever speaks another way over them, in place of ``close``."""
        self._selector.close()
        return {rank: peer.connection for rank, peer in self._peers.items()}

    def close(self) -> None:
        """Hangs up and gives the connections back. Any number of times."""
        self.hang_up()
        self._selector.close()
        for peer in self._peers.values():
            peer.connection.close()


def read(connection: socket.socket, size: int, deadline: float, closed: threading.Event) -> bytes:
    """Blocks until so many bytes have come from rank 0, or from a receiver.

    Raises:
        TransportTimeout: The deadline (monotonic seconds) is over.
        TransportError: The other end has hung up, or it was ``closed``.
    """
    data = b""
    connection.settimeout(_LISTEN_SECONDS)
    while len(data) < size:
        try:
            piece = connection.recv(size - len(data))
        except TimeoutError:
            _check_patience(deadline, closed)
            continue
        except OSError:
            piece = b""
        if not piece:
            raise TransportError("the meeting was closed before all had joined", "rank 0")
        data += piece
    return data


def _check_patience(deadline: float, closed: threading.Event) -> None:
    if closed.is_set():
        raise TransportError("joining was given up")
    if time.monotonic() > deadline:
        raise TransportTimeout("not all members of the group have joined in time")


def _for(laggard: str | None) -> str:
    return f" for {laggard}" if laggard else ""


def _hash(epoch: str) -> bytes:
    return hashlib.sha256(epoch.encode()).digest()


def _forget_those_who_left(members: dict[int, _Member]) -> None:
    for rank, member in list(members.items()):
        if _has_left(member.connection):
            member.connection.close()
            del members[rank]


def _has_left(connection: socket.socket) -> bool:
    """Whether a member has hung up: before the start it has nothing to say."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _refuse_shared_cards(card: bytes, members: Mapping[int, _Member]) -> None:
    owners = {card: 0}
    for rank, member in sorted(members.items()):
        owner = owners.setdefault(member.card, rank)
        if owner != rank:
            for other in members.values():
                _tell(other.connection, _VERDICT.pack(_Verdict.SAME_CARD, rank))
            raise SharedDevice(_shared(rank), f"rank {rank}")


def _shared(rank: int) -> str:
    return f"rank {rank} is on the GPU of another member, and each needs its own: use ucx, or gloo"


def _refuse(caller: socket.socket, verdict: _Verdict, number: int = 0) -> None:
    _tell(caller, _VERDICT.pack(verdict, number))
    caller.close()


def _expect(wanted: _Verdict, verdict: int, number: int, rank: int, world_size: int) -> None:
    if verdict == wanted:
        return
    texts: dict[int, str] = {
        _Verdict.NO_SUCH_EPOCH: "no group of this epoch meets there",
        _Verdict.OTHER_SIZE: f"the group has {number} members, this one was told of {world_size}",
        _Verdict.RANK_TAKEN: f"rank {rank} has joined this group already",
    }
    if verdict == _Verdict.SAME_CARD:
        raise SharedDevice(_shared(number), "rank 0")
    peer = f"rank {rank}" if verdict == _Verdict.RANK_TAKEN else "rank 0"
    raise TransportError(texts.get(verdict, "what answers there is no meeting"), peer)


def _tell(connection: socket.socket, message: bytes) -> bool:
    """Whether it could be sent: messages are few and small, so that only a dead peer's cannot."""
    try:
        connection.sendall(message)
    except OSError:
        return False
    return True


def _drain(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except OSError:
        return b""

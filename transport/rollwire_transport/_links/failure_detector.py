"""What the members of a chain tell each other while it stands.

The buckets go from each rank to the next; these few bytes go between rank 0 and each receiver, over
the connections on which they met (see ``control``). So rank 0 hears of a death at once, and of
whoever falls silent, wherever in the chain that is.

    both ways            how it is, ten times a second: TAKING, PASSING or WORKING
    receiver → rank 0    FINISHED; LATE, when it gives up waiting; LOST and the rank of a neighbour
    rank 0 → receiver    OVER and the rank to blame, 0 for none
    either               hangs up: it is no member any more
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollwire_transport._errors import TransportError, TransportTimeout

if TYPE_CHECKING:
    from collections.abc import Mapping

_MESSAGE = struct.Struct("<BI")
_TICK_SECONDS = 0.1
_SILENT_SECONDS = 0.5  # of one who ticks


class Word(enum.IntEnum):
    """What one member tells another."""

    TAKING = 1  # it waits for what comes to it
    PASSING = 2  # it waits for the next in the chain to take something
    WORKING = 3  # it waits for nobody
    FINISHED = 4
    LATE = 5
    LOST = 6
    OVER = 7


_STATES = (Word.TAKING, Word.PASSING, Word.WORKING)


@dataclass(slots=True)
class _Peer:
    connection: socket.socket
    state: Word = Word.WORKING
    heard_at: float = field(default_factory=time.monotonic)
    finished: bool = False
    late: bool = False
    lost: int | None = None
    over: int | None = None
    left: bool = False
    rest: bytes = b""


class Watch:
    """One end's connections: with all receivers at rank 0, with rank 0 at a receiver.

    Used by one thread, except for ``wake``.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self._rank = rank
        self._peers = {other: _Peer(connection) for other, connection in connections.items()}
        self._state = Word.WORKING
        self._told_at = 0.0
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.settimeout(0)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._wakes, self._waker = socket.socketpair()
        self._wakes.settimeout(0)
        self._waker.settimeout(0)
        self._selector.register(self._wakes, selectors.EVENT_READ)

    @property
    def finished(self) -> bool:
        """Whether every peer has told so."""
        return all(peer.finished for peer in self._peers.values())

    def tick(self, state: Word) -> None:
        """Tells how this end is, if it is time."""
        self._state = state
        if (now := time.monotonic()) - self._told_at >= _TICK_SECONDS:
            self._told_at = now
            self.tell(state)

    def tell(self, word: Word, about: int = 0) -> None:
        """Tells all peers. One that is gone, or takes nothing in, is found by ``check``."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.send(_MESSAGE.pack(word, about))

    def wait(self, timeout: float) -> None:
        """Until somebody tells something, or ``wake``; takes in what it was."""
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._wakes.recv(4096)
            else:
                self._take(key.data)

    def wake(self) -> None:
        """Ends a wait. From any thread."""
        with contextlib.suppress(OSError):  # full of wakes already, or closed
            self._waker.send(b"\0")

    def check(self) -> None:
        """Looks at what was told.

        Raises:
            TransportTimeout: A receiver has given up waiting; ``peer`` is who is to blame.
            TransportError: A member was lost, or rank 0 gave the group up.
        """
        for rank, peer in self._peers.items():
            if peer.late:
                raise self.timeout(f"rank {rank} gave up waiting")
            if peer.lost is not None:
                raise TransportError(
                    f"rank {rank} lost its connection with rank {peer.lost}", f"rank {peer.lost}"
                )
            if peer.over:
                raise TransportError(
                    f"rank {rank} gave the group up because of rank {peer.over}",
                    f"rank {peer.over}",
                )
            if peer.left and not peer.finished:
                raise TransportError(f"rank {rank} left the group", f"rank {rank}")

    def timeout(self, what: str) -> TransportTimeout:
        """An error that names who is to blame: whoever is silent; else, at rank 0, the first in the
        chain that waits for nobody behind it; elsewhere the neighbour that this end waits for.
        """
        silence, rank = max(
            (time.monotonic() - peer.heard_at, -rank) for rank, peer in self._peers.items()
        )
        if silence > _SILENT_SECONDS:
            return TransportTimeout(f"{what}: rank {-rank} is silent", f"rank {-rank}")
        if self._rank:
            neighbour = self._rank + (1 if self._state is Word.PASSING else -1)
            return TransportTimeout(what, f"rank {neighbour}")
        if self._state is not Word.PASSING:
            return TransportTimeout(f"{what}: rank 0 sent nothing", "rank 0")
        blocking = next(
            (r for r, p in self._peers.items() if p.state is not Word.PASSING and not p.finished),
            None,
        )
        if blocking is None:
            return TransportTimeout(what)
        return TransportTimeout(f"{what}: rank {blocking} is behind", f"rank {blocking}")

    def hang_up(self) -> None:
        """Tells all that this end is no member any more; what they were told before reaches them.

        From any thread.
        """
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Gives the connections back."""
        self._selector.close()
        self._waker.close()
        self._wakes.close()
        for peer in self._peers.values():
            peer.connection.close()

    def _take(self, peer: _Peer) -> None:
        try:
            said = peer.connection.recv(4096)
        except OSError:
            said = b""
        if not said:
            peer.left = True
            self._selector.unregister(peer.connection)
            return
        peer.heard_at = time.monotonic()
        said = peer.rest + said
        whole = len(said) // _MESSAGE.size * _MESSAGE.size
        peer.rest = said[whole:]
        for word, about in _MESSAGE.iter_unpack(said[:whole]):
            if word in _STATES:
                peer.state = Word(word)
            elif word == Word.FINISHED:
                peer.finished = True
            elif word == Word.LATE:
                peer.late = True
            elif word == Word.LOST:
                peer.lost = about
            elif word == Word.OVER:
                peer.over = about

"""Who of a group is dead, frozen or behind, from what its members report while it exists.

In a star rank 0 sends to each receiver, and compares how far they are:

    receiver → rank 0    STEP for each bucket posted or received

In a chain buckets go from each rank to the next, and rank 0 hears only the first one's progress. So
all report, ten times a second, what they wait for:

    both ways            RECEIVING, FORWARDING or WORKING
    receiver → rank 0    PEER_LOST and the rank of a neighbour
    rank 0 → receiver    ABORTED and the rank to blame

In both:

    receiver → rank 0    FINISHED; TIMED_OUT when it gives up waiting
    either               hangs up: it is no member any more
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links.framing import MessageType

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_transport._links.control_channel import ControlChannel

_HEARTBEAT_SECONDS = 0.1
_SILENT_SECONDS = 0.5  # without a heartbeat
_POLL_SECONDS = 0.005
# The backend may lose a peer that died this long before its control connection tells so.
_BLAME_SECONDS = 0.3


class StarFailureDetector:
    """For links on which rank 0 sends to each receiver; used by one thread."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel

    @property
    def fewest_steps(self) -> int:
        return min(peer.steps for peer in self._channel.peers.values())

    @property
    def laggard(self) -> str | None:
        """The peer that is behind all others, if there is one."""
        progress = {r: (p.finished, p.steps) for r, p in self._channel.peers.items()}
        behind = [rank for rank, steps in progress.items() if steps == min(progress.values())]
        return f"rank {behind[0]}" if len(behind) == 1 else None

    def check(self) -> None:
        """Reads what peers reported.

        Raises:
            TransportTimeout: One has given up waiting; ``peer`` is who it waits for, if one is
                behind the others.
            TransportError: One has left and had not finished.
        """
        self._channel.read()
        for rank, peer in self._channel.peers.items():
            if peer.timed_out:
                laggard = self.laggard
                what = f"rank {rank} gave up waiting"
                raise TransportTimeout(f"{what} for {laggard}" if laggard else what, laggard)
            _check_left(rank, left=peer.left, finished=peer.finished)

    def await_blame(self, aborted: Callable[[], bool]) -> None:
        """As ``check``, but waits a moment for news, or until ``aborted``."""
        until = time.monotonic() + _BLAME_SECONDS
        while time.monotonic() < until and not aborted():
            self.check()
            time.sleep(_POLL_SECONDS)


class ChainFailureDetector:
    """For links on which each rank sends to the next; used by one thread."""

    def __init__(self, channel: ControlChannel) -> None:
        self._channel = channel
        self._state = MessageType.WORKING
        self._reported_at = 0.0

    def report(self, state: MessageType) -> None:
        """Sends a heartbeat if it is time; ``state`` is one of ``control_channel.STATES``."""
        self._state = state
        if (now := time.monotonic()) - self._reported_at >= _HEARTBEAT_SECONDS:
            self._reported_at = now
            self._channel.send(state)

    def check(self) -> None:
        """Judges what peers reported, as far as it was read.

        Raises:
            TransportTimeout: A receiver has given up waiting; ``peer`` is who is to blame.
            TransportError: A member was lost, or rank 0 gave the group up.
        """
        for rank, peer in self._channel.peers.items():
            if peer.timed_out:
                raise self.timeout(f"rank {rank} gave up waiting")
            if peer.lost is not None:
                raise TransportError(
                    f"rank {rank} lost its connection with rank {peer.lost}", f"rank {peer.lost}"
                )
            if peer.blamed:
                raise TransportError(
                    f"rank {rank} gave the group up because of rank {peer.blamed}",
                    f"rank {peer.blamed}",
                )
            _check_left(rank, left=peer.left, finished=peer.finished)

    def timeout(self, what: str) -> TransportTimeout:
        """An error that blames the peer that is silent.

        If none is, rank 0 blames the first in the chain that does not wait for its successor; a
        receiver blames the neighbour that it waits for.
        """
        peers = self._channel.peers
        silence, rank = max((time.monotonic() - p.heard_at, -rank) for rank, p in peers.items())
        if silence > _SILENT_SECONDS:
            return TransportTimeout(f"{what}: rank {-rank} is silent", f"rank {-rank}")
        if self._channel.rank:
            step = 1 if self._state is MessageType.FORWARDING else -1
            return TransportTimeout(what, f"rank {self._channel.rank + step}")
        if self._state is not MessageType.FORWARDING:
            return TransportTimeout(f"{what}: rank 0 sent nothing", "rank 0")
        for rank, peer in peers.items():
            if peer.state is not MessageType.FORWARDING and not peer.finished:
                return TransportTimeout(f"{what}: rank {rank} is behind", f"rank {rank}")
        return TransportTimeout(what)


def _check_left(rank: int, *, left: bool, finished: bool) -> None:
    if left and not finished:
        raise TransportError(f"rank {rank} left the group", f"rank {rank}")

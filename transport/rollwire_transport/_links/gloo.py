"""Gloo: over TCP, from and to host memory, on any machine.

Rank 0 shares a pair, which is a gloo group of two, with every receiver, and sends each bucket to
all of them side by side. A broadcast in one group would spare it some of the copies; but when it
fails it cannot say who failed, it leaves the others waiting, and all must reach all.

A connection that breaks in the middle of a message does not end gloo's wait for that message. So
gloo is waited for in threads; who died or gave up is learnt from the connections on which the
members met (see ``control``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links.base import Availability, Link, Rendezvous, Transfer
from rollwire_transport._links.control_channel import (
    TICKET_BYTES,
    Gathering,
    Lines,
    Signal,
    call,
    card_of_rank,
)
from rollwire_transport._links.gloo_store import Line
from rollwire_transport._links.worker_thread import Hand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from rollwire_transport._links.listener import ListenOptions

    _Post = Callable[["_Pair", Tensor, int], "_Message"]

logger = logging.getLogger(__name__)

# Tags tell the streams between two ranks apart. A payload's tag is _PAYLOAD plus its size: gloo
# ends the process that gets a message longer than it expected, so ends that disagree on a size
# must not find each other's message.
_HEADER, _FINISH, _NEVER, _PAYLOAD = range(4)

_LOOK_SECONDS = 0.02  # between looks at the members, while a message is waited for
_VERDICT_SECONDS = 0.3  # for the members to say why a message did not come
_LET_GO_SECONDS = 1.0  # for gloo, when a link is closed


def available(listen: ListenOptions) -> Availability:
    """Whether this torch has gloo, and it can listen there."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return Availability(ok=False, reason="this build of torch has no gloo")
    problem = listen.needs_system_ports("gloo")
    return Availability(ok=not problem, reason=problem)


def open_rendezvous(
    *, epoch: str, world_size: int, host: str, port: int, device: torch.device
) -> Rendezvous:
    """See ``links.open_rendezvous``."""
    del device  # it moves host memory
    return _GlooRendezvous(epoch, world_size, host, port)


def join_group(
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
    """See ``links.join``."""
    del device  # it moves host memory
    deadline = time.monotonic() + timeout
    lines, _ = call(epoch, rank, world_size, rendezvous, card_of_rank(rank), timeout, closed)
    connections = lines.detach()
    try:
        line = Line(connections[0], deadline, closed)
        pair = _pair(line, rank, 0, deadline, listen.host)
    except (RuntimeError, TransportError) as error:
        connections[0].close()
        if isinstance(error, TransportError):
            raise
        raise _failure("the group could not be formed", error, deadline, "rank 0") from error
    return _GlooLink(Lines(connections), [pair], sends=False)


class _GlooRendezvous(Rendezvous):
    def __init__(self, epoch: str, world_size: int, host: str, port: int) -> None:
        self._gathering = Gathering(epoch, world_size, host, port)
        self.address = self._gathering.address
        self._closed = threading.Event()

    def form_group(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        lines = self._gathering.gather(card_of_rank(0), timeout)
        lines.start(bytes(TICKET_BYTES))
        connections = lines.detach()
        with ThreadPoolExecutor(len(connections)) as pool:
            forming = {
                rank: pool.submit(
                    _pair, Line(connection, deadline, self._closed), 0, rank, deadline
                )
                for rank, connection in connections.items()
            }
        pairs, failures = [], []
        for rank, future in forming.items():
            try:
                pairs.append(future.result())
            except (RuntimeError, TransportError) as error:
                what, peer = f"rank {rank} joined but cannot be reached", f"rank {rank}"
                failures.append(_failure(what, error, deadline, peer))
        link = _GlooLink(Lines(connections), pairs, sends=True)
        if failures:
            link.close()  # so that all learn of it
            raise failures[0]
        return link

    def close(self) -> None:
        self._closed.set()
        self._gathering.close()


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class _Group(Protocol):  # what is used of ProcessGroupGloo, whose stubs lack it
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class _Pair:
    """One end of a gloo group of rank 0 and a receiver.

    Its thread posts messages, since gloo's send writes to the socket itself for as long as the peer
    keeps up, and waits for them.
    """

    def __init__(self, group: _Group, rank: int, peer: int) -> None:
        self.peer = f"rank {peer}"
        self._group: _Group | None = group
        self._other = 1 if rank == 0 else 0
        self.hand = Hand(group, "rollwire-gloo")

    def send(self, tensor: Tensor, tag: int) -> _Message:
        other = self._other
        return _Message(self, self.hand.ask(lambda group: group.send([tensor], other, tag)), tensor)

    def receive(self, tensor: Tensor, tag: int) -> _Message:
        other = self._other
        return _Message(self, self.hand.ask(lambda group: group.recv([tensor], other, tag)), tensor)

    def abort(self) -> None:
        # ProcessGroupGloo.abort leaves the connections. What does end them: a wait that times out
        # closes all connections of its group, and so those of the peer.
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):
                mark = torch.zeros(1, dtype=torch.uint8)
                group.recv([mark], self._other, _NEVER).wait(timedelta(milliseconds=1))

    def let_go(self) -> None:
        self._group = None
        self.hand.let_go()


@dataclass(frozen=True, slots=True)
class _Message:
    pair: _Pair
    posted: Future[_Work]
    tensor: Tensor

    def land(self, deadline: float) -> Future[object]:
        """Done, or failed, when gloo says so: after the deadline, where nobody else does before."""
        posted, late = self.posted, deadline + _VERDICT_SECONDS
        return self.pair.hand.ask(lambda _: posted.result().wait(_left(late)))


@dataclass(frozen=True, slots=True)
class _GlooTransfer(Transfer):
    link: _GlooLink
    messages: list[_Message]

    def wait(self, timeout: float) -> None:
        self.link.land(self.messages, time.monotonic() + timeout)


class _GlooLink(Link):
    def __init__(self, lines: Lines, pairs: list[_Pair], *, sends: bool) -> None:
        self.device = torch.device("cpu")
        self.upstream = "rank 0"
        self._aborted = False
        self._sends = sends
        self._lines = lines
        self._pairs = pairs
        self._finished = False
        self._lock = threading.Lock()

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.send, header, payload)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.receive, header, payload)

    def land(self, messages: list[_Message], deadline: float) -> None:
        """Waits for messages; see ``Transfer.wait``."""
        landing = {message.land(deadline): message.pair.peer for message in messages}
        pending = set(landing)
        try:
            while pending:
                self._check()
                if time.monotonic() >= deadline:
                    raise self._late(sorted({landing[future] for future in pending}))
                done, pending = wait(pending, _LOOK_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    if error := future.exception():
                        raise self._lost(landing[future], error) from error
        finally:
            for future in pending:
                future.cancel()
        if not self._sends:
            self._lines.signal(Signal.STEP)

    def finish(self, timeout: float) -> None:
        post = _Pair.receive if self._sends else _Pair.send
        self._transfer(post, ((torch.zeros(1, dtype=torch.uint8), _FINISH),)).wait(timeout)
        self._lines.signal(Signal.FINISHED)
        self._finished = True

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._lines.hang_up()
        for pair in self._pairs:
            pair.abort()

    def close(self) -> bool:
        if not self._finished:
            self.abort()
        self._aborted = True
        for pair in self._pairs:
            pair.let_go()
        until = time.monotonic() + _LET_GO_SECONDS
        stuck = [pair.peer for pair in self._pairs if not pair.hand.join(until - time.monotonic())]
        if stuck:
            logger.info("gloo still holds messages with %s: they are left to it", ", ".join(stuck))
        self._lines.close()
        return not stuck

    def _check(self) -> None:
        if self._aborted:
            raise _aborted()
        self._lines.check()

    def _late(self, peers: list[str]) -> TransportTimeout:
        """One of these let the deadline pass: the one that is behind all others, if there is."""
        peer = self._lines.laggard if self._sends else None
        if not self._sends:
            self._lines.signal(Signal.LATE)
        peer = peer if peer in peers else peers[0]
        return TransportTimeout(f"the transfer with {peer} failed: its deadline ran out", peer)

    def _lost(self, peer: str, error: BaseException) -> TransportError:
        """What broke a connection, which the members may know better than gloo."""
        try:
            self._lines.blame(lambda: self._aborted)
        except TransportError as verdict:
            return verdict
        if self._aborted:
            return _aborted()
        return _failure(f"the transfer with {peer} failed", error, math.inf, peer)

    def _post(self, post: _Post, header: Tensor, payload: Tensor) -> Transfer:
        return self._transfer(post, ((header, _HEADER), (payload, _PAYLOAD + payload.numel())))

    def _transfer(self, post: _Post, messages: Iterable[tuple[Tensor, int]]) -> Transfer:
        if self._aborted:
            raise _aborted()
        return _GlooTransfer(
            self, [post(pair, tensor, tag) for tensor, tag in messages for pair in self._pairs]
        )


def _pair(line: Line, rank: int, peer: int, deadline: float, host: str | None = None) -> _Pair:
    """Forms the pair of ``rank`` and ``peer``, of which one is 0; waits for the other.

    Its device is bound to ``host``, by default to the address that the peer reaches.
    """
    backend = dist.ProcessGroupGloo
    # Gloo's own choice, and torch's, resolves the machine's name. Only private names lead there.
    address = host or line.connection.getsockname()[0]
    options = backend._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [backend.create_device(hostname=address, lazy_init=False)]  # noqa: SLF001
    options._timeout = _left(deadline)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    group = cast("_Group", backend(line, min(rank, 1), 2, options))
    line.leave(rank, peer)
    return _Pair(group, rank, peer)


def _left(deadline: float) -> timedelta:
    # Gloo counts whole milliseconds and takes zero for no limit.
    return timedelta(milliseconds=max(math.ceil((deadline - time.monotonic()) * 1000), 1))


def _failure(what: str, error: BaseException, deadline: float, peer: str | None) -> TransportError:
    if time.monotonic() >= deadline:
        return TransportTimeout(f"{what}: its deadline ran out", peer)
    # Gloo's messages begin with a place in its source, and end with advice for collectives.
    reason = re.sub(r"^\[\S+:\d+\] |\. This is typically.*$|\n.*$", "", str(error), flags=re.S)
    return TransportError(f"{what}: {reason}", peer)


def _aborted() -> TransportError:
    return TransportError("the link was aborted or closed at this end")

"""Gloo: over TCP, from and to host memory, on any machine.

Rank 0 shares a pair, which is a gloo group of two, with every receiver, and sends each bucket to
all of them side by side. A broadcast in one group would spare it some of the copies; but when it
fails it cannot say who failed, it leaves the others waiting, and all must reach all.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from rollwire_transport.errors import TransportError, TransportTimeout
from rollwire_transport.links.base import Availability, Link, Meeting, Transfer
from rollwire_transport.links.control import (
    TICKET_BYTES,
    Gathering,
    Lines,
    call,
    card_of_rank,
    read,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from torch import Tensor

    _Post = Callable[["_Pair", Tensor, int], Future["_Work"]]

# Tags tell the streams between two ranks apart. A payload's tag is _PAYLOAD plus its size: gloo
# ends the process that gets a message longer than it expected, so ends that disagree on a size
# must not find each other's message.
_HEADER, _FINISH, _NEVER, _PAYLOAD = range(4)

_WORD = struct.Struct("<HI")  # the sizes of a key and of its value


def available() -> Availability:
    """Whether this torch has gloo."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return Availability(ok=False, reason="this build of torch has no gloo")
    return Availability(ok=True, reason="")


def open_meeting(
    *, epoch: str, world_size: int, host: str, port: int, device: torch.device
) -> Meeting:
    """See ``links.open_meeting``."""
    del device  # it moves host memory
    return _GlooMeeting(epoch, world_size, host, port)


def join(
    *,
    epoch: str,
    rank: int,
    world_size: int,
    rendezvous: str,
    timeout: float,
    device: torch.device,
    closed: threading.Event,
) -> Link:
    """See ``links.join``."""
    del device  # it moves host memory
    deadline = time.monotonic() + timeout
    lines, _ = call(epoch, rank, world_size, rendezvous, card_of_rank(rank), timeout, closed)
    with _detached(lines) as connections:
        try:
            pair = _pair(_Line(connections[0], deadline, closed), rank, 0, deadline)
        except RuntimeError as error:
            raise _failure("the group could not be formed", error, deadline, "rank 0") from error
    return _GlooLink([pair], sends=False)


class _GlooMeeting(Meeting):
    def __init__(self, epoch: str, world_size: int, host: str, port: int) -> None:
        self._gathering = Gathering(epoch, world_size, host, port)
        self.rendezvous = self._gathering.rendezvous
        self._closed = threading.Event()

    def form(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        lines = self._gathering.gather(card_of_rank(0), timeout)
        lines.start(bytes(TICKET_BYTES))
        with _detached(lines) as connections, ThreadPoolExecutor(len(connections)) as pool:
            forming = {
                rank: pool.submit(
                    _pair, _Line(connection, deadline, self._closed), 0, rank, deadline
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
        link = _GlooLink(pairs, sends=True)
        if failures:
            link.close()  # so that those who were reached learn of it
            raise failures[0]
        return link

    def close(self) -> None:
        self._closed.set()
        self._gathering.close()


class _Line(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs do not export it
    """Where the two ends of a pair leave word for each other: the connection on which they met.

    Gloo asks a store for it. Torch's own, over TCP, waits for ever for a process that is frozen or
    cut off.
    """

    def __init__(self, connection: socket.socket, deadline: float, closed: threading.Event) -> None:
        super().__init__()
        self.connection = connection
        self._deadline = deadline
        self._closed = closed
        self._words: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        """Tells the other end."""
        self._words[key] = value
        name = key.encode()
        with contextlib.suppress(OSError):  # of one that is gone, which is found by reading
            self.connection.settimeout(1)  # a few bytes, on a connection that is empty
            self.connection.sendall(_WORD.pack(len(name), len(value)) + name + value)

    def get(self, key: str) -> bytes:
        """What one of the ends has told."""
        while key not in self._words:
            name_size, size = _WORD.unpack(self._read(_WORD.size))
            name = self._read(name_size).decode()
            self._words[name] = self._read(size)
        return self._words[key]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        """Blocks until all has been told."""
        for key in keys:
            self.get(key)

    def _read(self, size: int) -> bytes:
        return read(self.connection, size, self._deadline, self._closed)


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class _Group(Protocol):  # what is used of ProcessGroupGloo, whose stubs lack it
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class _Pair:
    """One end of a gloo group of rank 0 and a receiver."""

    def __init__(self, group: _Group, rank: int, peer: int) -> None:
        self.peer = f"rank {peer}"
        self._group: _Group | None = group
        self._other = 1 if rank == 0 else 0
        # Gloo's send writes to the socket itself for as long as the peer keeps up; this thread
        # lets the caller go on, and the pairs not wait for each other.
        self._poster = ThreadPoolExecutor(1, "rollwire-gloo")

    def send(self, tensor: Tensor, tag: int) -> Future[_Work]:
        group = self._usable()
        return self._poster.submit(group.send, [tensor], self._other, tag)

    def receive(self, tensor: Tensor, tag: int) -> Future[_Work]:
        group = self._usable()
        return self._poster.submit(group.recv, [tensor], self._other, tag)

    def abort(self) -> None:
        # ProcessGroupGloo.abort leaves waits of other threads hanging. What does end them: a wait
        # that times out closes all connections of its group, and so those of the peer.
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):
                mark = torch.zeros(1, dtype=torch.uint8)
                group.recv([mark], self._other, _NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        self._group = None
        self._poster.shutdown()

    def _usable(self) -> _Group:
        if (group := self._group) is None:
            raise _aborted()
        return group


@dataclass(frozen=True, slots=True)
class _Message:
    peer: str
    posted: Future[_Work]
    tensor: Tensor


class _GlooTransfer(Transfer):
    def __init__(self, link: _GlooLink, messages: list[_Message]) -> None:
        self._link = link
        self._messages = messages

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for message in self._messages:
            try:
                message.posted.result(max(deadline - time.monotonic(), 0)).wait(_left(deadline))
            except (RuntimeError, TimeoutError) as error:
                if self._link.aborted:
                    raise _aborted() from error
                what = f"the transfer with {message.peer} failed"
                raise _failure(what, error, deadline, message.peer) from error


class _GlooLink(Link):
    def __init__(self, pairs: list[_Pair], *, sends: bool) -> None:
        self.device = torch.device("cpu")
        self.upstream = "rank 0"
        self.aborted = False
        self._sends = sends
        self._pairs = pairs
        self._finished = False
        self._lock = threading.Lock()

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.send, header, payload)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.receive, header, payload)

    def finish(self, timeout: float) -> None:
        post = _Pair.receive if self._sends else _Pair.send
        self._transfer(post, ((torch.zeros(1, dtype=torch.uint8), _FINISH),)).wait(timeout)
        self._finished = True

    def abort(self) -> None:
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
        for pair in self._pairs:
            pair.abort()

    def close(self) -> None:
        if not self._finished:
            self.abort()
        self.aborted = True
        for pair in self._pairs:
            pair.close()

    def _post(self, post: _Post, header: Tensor, payload: Tensor) -> Transfer:
        return self._transfer(post, ((header, _HEADER), (payload, _PAYLOAD + payload.numel())))

    def _transfer(self, post: _Post, messages: tuple[tuple[Tensor, int], ...]) -> Transfer:
        if self.aborted:
            raise _aborted()
        return _GlooTransfer(
            self,
            [
                _Message(pair.peer, post(pair, tensor, tag), tensor)
                for tensor, tag in messages
                for pair in self._pairs
            ],
        )


@contextlib.contextmanager
def _detached(lines: Lines) -> Iterator[dict[int, socket.socket]]:
    """The connections of a group that has met, until its pairs stand."""
    connections = lines.detach()
    try:
        yield connections
    finally:
        for connection in connections.values():
            connection.close()


def _pair(line: _Line, rank: int, peer: int, deadline: float) -> _Pair:
    """Forms the pair of ``rank`` and ``peer``, of which one is 0; waits for the other."""
    backend = dist.ProcessGroupGloo
    # A device bound to the address that the peer reaches: gloo's own choice, and torch's, resolves
    # the machine's name. Only private names lead there.
    address = line.connection.getsockname()[0]
    options = backend._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [backend.create_device(hostname=address, lazy_init=False)]  # noqa: SLF001
    options._timeout = _left(deadline)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    group = cast("_Group", backend(line, min(rank, 1), 2, options))
    return _Pair(group, rank, peer)


def _left(deadline: float) -> timedelta:
    # Gloo counts whole milliseconds and takes zero for no limit.
    return timedelta(milliseconds=max(math.ceil((deadline - time.monotonic()) * 1000), 1))


def _failure(what: str, error: Exception, deadline: float, peer: str | None) -> TransportError:
    if time.monotonic() >= deadline:
        return TransportTimeout(f"{what}: its deadline ran out", peer)
    # Gloo's messages begin with a place in its source, and end with advice for collectives.
    reason = re.sub(r"^\[\S+:\d+\] |\. This is typically.*$|\n.*$", "", str(error), flags=re.S)
    return TransportError(f"{what}: {reason}", peer)


def _aborted() -> TransportError:
    return TransportError("the link was aborted or closed at this end")

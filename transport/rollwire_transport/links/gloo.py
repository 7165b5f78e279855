"""Gloo: over TCP, from and to host memory, on any machine.

Each bucket goes from rank 0 to every receiver point to point. A broadcast would spare the sender
some of the copies, but when it fails it cannot say who failed, and leaves the others waiting.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from rollwire_transport.errors import TransportError, TransportTimeout
from rollwire_transport.links.base import Availability, Link, Meeting, Transfer

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import Store

# Tags tell the streams between two ranks apart. A payload's tag is _PAYLOAD plus its size: gloo
# ends the process that gets a message longer than it expected, so ends that disagree on a size
# must not find each other's message.
_HEADER, _FINISH, _NEVER, _PAYLOAD = range(4)

_POLL_SECONDS = 0.005


def available() -> Availability:
    """Whether this torch has gloo."""
    if not (dist.is_available() and dist.is_gloo_available()):
        return Availability(ok=False, reason="this build of torch has no gloo")
    return Availability(ok=True, reason="")


def open_meeting(*, epoch: str, world_size: int, host: str, port: int) -> Meeting:
    """See ``links.open_meeting``."""
    return _GlooMeeting(epoch, world_size, host, port)


def join(*, epoch: str, rank: int, world_size: int, rendezvous: str, timeout: float) -> Link:
    """See ``links.join``."""
    deadline = time.monotonic() + timeout
    try:
        meeting = socket.create_connection(_split(rendezvous), timeout=timeout)
    except OSError as error:
        kind = TransportTimeout if isinstance(error, TimeoutError) else TransportError
        raise kind(f"nobody meets at {rendezvous}: {error}", "rank 0") from error
    with meeting:
        try:
            group = _join(meeting, epoch, rank, world_size, deadline)
        except RuntimeError as error:
            raise _failure("the group could not be formed", error, deadline, "rank 0") from error
    return _GlooLink(group, rank, world_size)


def _join(
    meeting: socket.socket, epoch: str, rank: int, world_size: int, deadline: float
) -> _Group:
    """Joins over a connection to the meeting, whose end is the meeting's."""
    address, (host, port) = meeting.getsockname()[0], meeting.getpeername()[:2]
    store = _store(epoch, host, port, _left(deadline))
    if not store.check(["world_size"]):
        raise TransportError("no group of this epoch meets there", "rank 0")
    if world_size != (expected := int(store.get("world_size"))):
        raise TransportError(
            f"the group has {expected} members, this one was told of {world_size}", "rank 0"
        )
    if store.add(f"joined/{rank}", 1) != 1:
        raise TransportError(f"rank {rank} has joined this group already", f"rank {rank}")
    # Gloo could wait for the others itself, but reports a meeting that closes in fifty lines.
    while not store.check(["complete"]):
        if time.monotonic() > deadline:
            raise TransportTimeout("not all members of the group have joined in time")
        if select.select([meeting], [], [], _POLL_SECONDS)[0]:
            raise TransportError("the meeting was closed before all had joined", "rank 0")
    return _group(store, rank, world_size, address, deadline)


class _GlooMeeting(Meeting):
    def __init__(self, epoch: str, world_size: int, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if ipaddress.ip_address(address[0]).is_unspecified:
            raise ValueError(f"host {host!r} is no address by which the others reach this machine")
        # Bound here and handed over: a port that is found free and bound later may be taken.
        listener = socket.create_server(address[:2], family=family, backlog=512)
        self._address, port = listener.getsockname()[:2]
        self.rendezvous = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._world_size = world_size
        self._closed = threading.Event()
        store = _store(epoch, self._address, port, timedelta(seconds=10), listener)
        store.set("world_size", str(world_size))
        self._store: Store | None = store

    def form(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        while missing := self._missing():
            if time.monotonic() > deadline:
                who = ", ".join(missing)
                raise TransportTimeout(f"{who} did not join within {timeout:g} s", missing[0])
            self._closed.wait(_POLL_SECONDS)
        try:
            store = self._open_store()
            store.set("complete", "")
            group = _group(store, 0, self._world_size, self._address, deadline)
        except RuntimeError as error:
            raise _failure("the group could not be formed", error, deadline, None) from error
        return _GlooLink(group, 0, self._world_size)

    def close(self) -> None:
        self._closed.set()
        self._store = None

    def _missing(self) -> list[str]:
        store = self._open_store()
        return [f"rank {r}" for r in range(1, self._world_size) if not store.check([f"joined/{r}"])]

    def _open_store(self) -> Store:
        # Not held by form while it waits: an error of form would keep the store's server alive.
        if (store := self._store) is None:
            raise TransportError("the meeting was closed")
        return store


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


_Post = Callable[[list["Tensor"], int, int], _Work]


class _Group(Protocol):  # what is used of ProcessGroupGloo, whose stubs lack it
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


@dataclass(frozen=True, slots=True)
class _Message:
    rank: int  # at the other end
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
                raise self._link.failure(error, message.rank, deadline) from error


class _GlooLink(Link):
    def __init__(self, group: _Group, rank: int, world_size: int) -> None:
        self.device = torch.device("cpu")
        self.upstream = "rank 0"
        self._group: _Group | None = group  # None once aborted or closed
        self._lock = threading.Lock()
        self._finished = False
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        # Gloo's send writes to the socket itself for as long as the peer keeps up. A thread for
        # each peer lets the caller pack on meanwhile, and the peers not wait for each other.
        peers = self._others if rank == 0 else [0]
        self._posters = {peer: ThreadPoolExecutor(1, "rollwire-gloo") for peer in peers}

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(self._usable().send, header, payload)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(self._usable().recv, header, payload)

    def finish(self, timeout: float) -> None:
        group = self._usable()
        post = group.recv if self._rank == 0 else group.send
        self._transfer(post, ((torch.zeros(1, dtype=torch.uint8), _FINISH),)).wait(timeout)
        self._finished = True

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # ProcessGroupGloo.abort leaves waits of other threads hanging. What does end them: a wait
        # that times out closes all connections of its group, here and so at the other members.
        # Over a connection that is closed already nothing can wait, hence each peer is tried.
        for rank in self._others:
            with contextlib.suppress(RuntimeError):
                mark = torch.zeros(1, dtype=torch.uint8)
                group.recv([mark], rank, _NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        if not self._finished:
            self.abort()
        self._group = None
        for poster in self._posters.values():
            poster.shutdown()

    def failure(self, error: Exception, rank: int, deadline: float) -> TransportError:
        """What an error in a message to or from ``rank`` means."""
        if self._group is None:
            return _aborted()
        return _failure(f"the transfer with rank {rank} failed", error, deadline, f"rank {rank}")

    def _usable(self) -> _Group:
        if (group := self._group) is None:
            raise _aborted()
        return group

    def _post(self, post: _Post, header: Tensor, payload: Tensor) -> Transfer:
        return self._transfer(post, ((header, _HEADER), (payload, _PAYLOAD + payload.numel())))

    def _transfer(self, post: _Post, messages: tuple[tuple[Tensor, int], ...]) -> Transfer:
        return _GlooTransfer(
            self,
            [
                _Message(peer, poster.submit(post, [tensor], peer, tag), tensor)
                for tensor, tag in messages
                for peer, poster in self._posters.items()
            ],
        )


def _store(
    epoch: str, host: str, port: int, timeout: timedelta, listener: socket.socket | None = None
) -> Store:
    """The store at an address under a prefix of the epoch; its server too, with a listener."""
    tcp_store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs do not export it
        host,
        port,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )
    store: Store = dist.PrefixStore(epoch, tcp_store)  # type: ignore[attr-defined]  # as above
    return store


def _group(store: Store, rank: int, world_size: int, address: str, deadline: float) -> _Group:
    backend = dist.ProcessGroupGloo
    # A device bound to the address that the peers reach: gloo's own choice, and torch's, resolves
    # the machine's name. Only private names lead there.
    options = backend._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [backend.create_device(hostname=address, lazy_init=False)]  # noqa: SLF001
    options._timeout = _left(deadline)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    return cast("_Group", backend(store, rank, world_size, options))


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


def _split(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"rendezvous {rendezvous!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)

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


class _Group(Protocol):  # what is used of ProcessGroupGloo, whose stubs lack it
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class _GlooTransfer(Transfer):
    """Messages under way, each with the rank at its other end."""

    def __init__(self, link: _GlooLink) -> None:
        self._link = link
        self._works: list[tuple[int, _Work, Tensor]] = []

    def add(self, rank: int, work: _Work, tensor: Tensor) -> None:
        self._works.append((rank, work, tensor))

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for rank, work, _ in self._works:
            try:
                work.wait(_left(deadline))
            except RuntimeError as error:
                raise self._link.failure(error, rank, deadline) from error


class _GlooLink(Link):
    def __init__(self, group: _Group, rank: int, world_size: int) -> None:
        self.device = torch.device("cpu")
        self.upstream = "rank 0"
        self._rank = rank
        self._peers = range(1, world_size) if rank == 0 else range(1)
        self._world_size = world_size
        self._lock = threading.Lock()
        self._group: _Group | None = group  # None once aborted or closed
        self._finished = False

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        transfer = _GlooTransfer(self)
        for tensor, tag in ((header, _HEADER), (payload, _PAYLOAD + payload.numel())):
            for peer in self._peers:
                self._post_send(transfer, tensor, peer, tag)
        return transfer

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        transfer = _GlooTransfer(self)
        self._post_receive(transfer, header, 0, _HEADER)
        self._post_receive(transfer, payload, 0, _PAYLOAD + payload.numel())
        return transfer

    def finish(self, timeout: float) -> None:
        transfer = _GlooTransfer(self)
        post = self._post_receive if self._rank == 0 else self._post_send
        for peer in self._peers:
            post(transfer, torch.zeros(1, dtype=torch.uint8), peer, _FINISH)
        transfer.wait(timeout)
        self._finished = True

    def abort(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is None:
            return
        # ProcessGroupGloo.abort leaves waits of other threads hanging. What does end them: a wait
        # that times out closes all connections of its group, here and so at the other members.
        # Over a connection that is closed already nothing can wait, hence each peer is tried.
        for rank in range(self._world_size):
            if rank != self._rank:
                with contextlib.suppress(RuntimeError):
                    mark = torch.zeros(1, dtype=torch.uint8)
                    group.recv([mark], rank, _NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        if not self._finished:
            self.abort()
        self._group = None

    def failure(self, error: Exception, rank: int, deadline: float) -> TransportError:
        """What an error of gloo in a message to or from ``rank`` means."""
        if self._group is None:
            return _aborted()
        return _failure(f"the transfer with rank {rank} failed", error, deadline, f"rank {rank}")

    def _post_send(self, transfer: _GlooTransfer, tensor: Tensor, rank: int, tag: int) -> None:
        if (group := self._group) is None:
            raise _aborted()
        try:
            transfer.add(rank, group.send([tensor], rank, tag), tensor)
        except RuntimeError as error:
            raise self.failure(error, rank, math.inf) from error

    def _post_receive(self, transfer: _GlooTransfer, tensor: Tensor, rank: int, tag: int) -> None:
        if (group := self._group) is None:
            raise _aborted()
        try:
            transfer.add(rank, group.recv([tensor], rank, tag), tensor)
        except RuntimeError as error:
            raise self.failure(error, rank, math.inf) from error


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

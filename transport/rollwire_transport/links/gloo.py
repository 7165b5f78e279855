"""Gloo: over TCP, from and to host memory, on any machine.

Each bucket goes from rank 0 to every receiver point to point. A broadcast would spare the sender
some of the copies, but when it fails it cannot say who failed, and it leaves the others waiting.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from rollwire_transport.errors import TransportError, TransportTimeout
from rollwire_transport.links.base import Availability, Link, Meeting, Transfer

# Tags tell the streams between two ranks apart.
_HEADER, _PAYLOAD, _FINISH, _NEVER = range(4)

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
    host, port = _split(rendezvous)
    # The connection that finds the store also tells by which of our addresses it is reached.
    try:
        with socket.create_connection((host, port), timeout=timeout) as probe:
            address = probe.getsockname()[0]
            store_address = probe.getpeername()[0]
    except OSError as error:
        kind = TransportTimeout if isinstance(error, TimeoutError) else TransportError
        raise kind(f"nobody meets at {rendezvous}: {error}", "rank 0") from error
    try:
        tcp_store = dist.TCPStore(
            store_address, port, is_master=False, timeout=_left(deadline), wait_for_workers=False
        )
        store = dist.PrefixStore(epoch, tcp_store)
        if not store.check(["world_size"]):
            raise TransportError(f"no group of this epoch meets at {rendezvous}", "rank 0")
        expected = int(store.get("world_size"))
        if world_size != expected:
            raise TransportError(
                f"the group has {expected} members, this one was told of {world_size}", "rank 0"
            )
        if store.add(f"joined/{rank}", 1) != 1:
            raise TransportError(f"rank {rank} has joined this group already", f"rank {rank}")
        group = _group(store, rank, world_size, address, deadline)
    except RuntimeError as error:
        raise _failure("the group could not be formed", error, deadline, "rank 0") from error
    return _GlooLink(group, rank, world_size)


class _GlooMeeting(Meeting):
    def __init__(self, epoch: str, world_size: int, host: str, port: int) -> None:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=512)
        self._address, port = listener.getsockname()[:2]
        self.rendezvous = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._world_size = world_size
        self._closed = threading.Event()
        tcp_store = dist.TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=timedelta(seconds=10),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._store: dist.Store | None = dist.PrefixStore(epoch, tcp_store)
        self._store.set("world_size", str(world_size))

    def form(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        store = self._store
        if store is None:
            raise TransportError("the meeting was closed")
        while missing := [r for r in range(1, self._world_size) if not _joined(store, r)]:
            if time.monotonic() > deadline:
                who = ", ".join(f"rank {r}" for r in missing)
                raise TransportTimeout(f"{who} did not join in {timeout:g} s", f"rank {missing[0]}")
            if self._closed.wait(_POLL_SECONDS):
                raise TransportError("the meeting was closed")
        try:
            group = _group(store, 0, self._world_size, self._address, deadline)
        except RuntimeError as error:
            raise _failure("the group could not be formed", error, deadline, None) from error
        return _GlooLink(group, 0, self._world_size)

    def close(self) -> None:
        self._closed.set()
        self._store = None


class _GlooTransfer(Transfer):
    def __init__(
        self, link: _GlooLink, works: list[tuple[int, dist.Work]], tensors: tuple[Tensor, ...]
    ) -> None:
        self._link = link
        self._works = works
        self._tensors = tensors

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for rank, work in self._works:
            try:
                work.wait(_left(deadline))
            except RuntimeError as error:
                raise self._link.failure(error, deadline, rank) from error


class _GlooLink(Link):
    def __init__(self, group: dist.ProcessGroupGloo, rank: int, world_size: int) -> None:
        self.device = torch.device("cpu")
        self.upstream = "rank 0"
        self._group: dist.ProcessGroupGloo | None = group
        self._peers = range(1, world_size) if rank == 0 else range(1)
        self._others = [r for r in range(world_size) if r != rank]
        self._lock = threading.Lock()
        self._aborted = False

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post("send", ((header, _HEADER), (payload, _PAYLOAD)))

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post("recv", ((header, _HEADER), (payload, _PAYLOAD)))

    def finish(self, timeout: float) -> None:
        sender = self._peers.start == 1
        marks = [torch.zeros(1, dtype=torch.uint8) for _ in self._peers]
        deadline = time.monotonic() + timeout
        transfers = [
            self._post("recv" if sender else "send", ((mark, _FINISH),), peer)
            for mark, peer in zip(marks, self._peers, strict=True)
        ]
        for transfer in transfers:
            transfer.wait(deadline - time.monotonic())

    def _post(
        self, operation: str, tensors: tuple[tuple[Tensor, int], ...], only: int | None = None
    ) -> Transfer:
        group, works = self._group, []
        if group is None or self._aborted:
            raise TransportError("the link was aborted")
        for peer in self._peers if only is None else (only,):
            for tensor, tag in tensors:
                try:
                    works.append((peer, getattr(group, operation)([tensor], peer, tag)))
                except RuntimeError as error:
                    raise self.failure(error, None, peer) from error
        return _GlooTransfer(self, works, tuple(tensor for tensor, _ in tensors))

    def failure(self, error: Exception, deadline: float | None, rank: int) -> TransportError:
        if self._aborted:
            return TransportError("the link was aborted")
        return _failure(f"the transfer with rank {rank} failed", error, deadline, f"rank {rank}")

    def abort(self) -> None:
        with self._lock:
            group, self._aborted = self._group, True
            if group is None:
                return
            # ProcessGroupGloo.abort leaves waits of other threads hanging. What does end them: a
            # wait that times out closes all connections of its group, here and so elsewhere. Over
            # a connection that is closed already nothing can wait, hence each peer is tried.
            for peer in self._others:
                with contextlib.suppress(RuntimeError):
                    mark = torch.zeros(1, dtype=torch.uint8)
                    group.recv([mark], peer, _NEVER).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        with self._lock:
            self._aborted = True
            self._group = None


def _group(
    store: dist.Store, rank: int, world_size: int, address: str, deadline: float
) -> dist.ProcessGroupGloo:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - torch has no public name for it
    # Bound to the address that the peers reach: gloo's default resolves the machine's own name.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]  # noqa: SLF001
    options._timeout = _left(deadline)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def _joined(store: dist.Store, rank: int) -> bool:
    return bool(store.check([f"joined/{rank}"]))


def _left(deadline: float) -> timedelta:
    # Zero would mean no limit.
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))


def _failure(
    what: str, error: Exception, deadline: float | None, peer: str | None
) -> TransportError:
    if deadline is not None and time.monotonic() >= deadline:
        return TransportTimeout(f"{what}: its deadline ran out", peer)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return TransportError(f"{what}: {reason}", peer)


def _split(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"rendezvous {rendezvous!r} is not host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)

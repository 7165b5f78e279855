"""Gloo: over TCP, from and to host memory, on any machine.

Rank 0 has a pair, which is a gloo group of two, with every receiver, and sends each bucket to all
of them side by side. A broadcast in one group would save some copies; but when it fails, it cannot
say who failed and leaves the others waiting, and all members must reach each other.

A connection that breaks in the middle of a message does not end gloo's wait for that message: who
drives the group aborts the other end too.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import socket
import struct
import threading
import time
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from rollwire_transport._concurrency import DetachedWorker
from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted, sealed, unsealed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions

logger = logging.getLogger(__name__)

# Tags tell the messages between two ranks apart. A payload's tag is _PAYLOAD plus its size: gloo
# ends the process that gets a longer message than it expects, so ends that disagree on a size must
# not find each other's message.
_HEADER, _PROOF, _NEVER, _PAYLOAD = range(4)

_CONNECT_SECONDS = 30.0  # for gloo to connect once both addresses are known
_ADDRESS_SECONDS = 10.0  # for gloo to listen
_SLACK_SECONDS = 1.0  # of gloo's own deadlines, after those of their waiters
_CLOSE_SECONDS = 1.0  # for gloo to end what is in flight when a link is closed

_CPU = torch.device("cpu")


class GlooBackend(Backend):
    name = "gloo"
    cpu_preference, gpu_preference = 0, 2

    def unavailable_reason(self, listen: ListenOptions) -> str:
        if not (dist.is_available() and dist.is_gloo_available()):
            return "this build of torch has no gloo"
        return listen.ephemeral_ports_problem("gloo")

    def bucket_device(self, device: torch.device) -> torch.device:
        del device
        return _CPU

    def open(self, member: GroupMember) -> Link:
        return _GlooLink(member)


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class _ProcessGroup(Protocol):  # what is used of ProcessGroupGloo, which torch's stubs lack
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class _AddressStore(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs lack it
    """Where the two ends of a pair find each other's addresses: gloo sets its own, then waits.

    Attributes:
        own: What this end has set, for the other one.
        theirs: What the other end has set.
    """

    _SIZES = struct.Struct("<HI")

    def __init__(self) -> None:
        super().__init__()
        self.own: Future[bytes] = Future()
        self.theirs: Future[bytes] = Future()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        if key not in self._values:
            if not self.own.done():
                self.own.set_result(self._packed())
            self._values |= self._unpacked(self.theirs.result())
            if key not in self._values:
                raise LookupError("it has sent no address of gloo's")
        return self._values[key]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def give(self, theirs: bytes) -> None:
        with contextlib.suppress(InvalidStateError):  # the link was aborted at this moment
            self.theirs.set_result(theirs)

    def _packed(self) -> bytes:
        return b"".join(
            self._SIZES.pack(len(key), len(value)) + key.encode() + value
            for key, value in self._values.items()
        )

    def _unpacked(self, data: bytes) -> dict[str, bytes]:
        values = {}
        at = 0
        while at + self._SIZES.size <= len(data):
            key_size, value_size = self._SIZES.unpack_from(data, at)
            key_at = at + self._SIZES.size
            value_at = key_at + key_size
            at = value_at + value_size
            values[data[key_at:value_at].decode(errors="replace")] = data[value_at:at]
        return values


class _Pair:
    """One end of a gloo group of rank 0 and a receiver.

    Its thread connects, posts messages and waits for them: gloo's send writes to the socket itself
    for as long as the peer keeps up.
    """

    def __init__(self, member: GroupMember, device: object, peer: int) -> None:
        self.peer = peer
        self.store = _AddressStore()
        self._group: list[_ProcessGroup] = []  # which the thread drops at its end
        self._other = 1 if member.rank == 0 else 0
        self.thread = DetachedWorker(self._group, "rollwire-gloo")
        store, epoch, own = self.store, member.epoch, 1 - self._other
        self.connected: Future[None] = self.thread.submit(
            lambda group: group.append(_connect(store, epoch, own, device))
        )

    def addresses(self) -> bytes:
        """What the other end needs to connect."""
        until = time.monotonic() + _ADDRESS_SECONDS
        while not self.store.own.done():
            if self.connected.done():
                self.connected.result()
            if time.monotonic() > until:
                raise TransportTimeout("gloo has not begun to listen in time")
            with contextlib.suppress(TimeoutError):
                self.store.own.result(0.05)
        return self.store.own.result()

    def send(self, messages: list[tuple[Tensor, int]]) -> Future[list[_Work]]:
        other = self._other
        return self.thread.submit(
            lambda group: [group[0].send([tensor], other, tag) for tensor, tag in messages]
        )

    def receive(self, messages: list[tuple[Tensor, int]]) -> Future[list[_Work]]:
        other = self._other
        return self.thread.submit(
            lambda group: [group[0].recv([tensor], other, tag) for tensor, tag in messages]
        )

    def completion(self, posted: Future[list[_Work]], timeout: float) -> Future[object]:
        """Done or failed when gloo says so; a little after the timeout if nothing else does."""
        until = time.monotonic() + timeout + _SLACK_SECONDS
        return self.thread.submit(
            lambda _: [work.wait(_time_left(until)) for work in posted.result()]
        )

    def abort(self) -> None:
        self.store.theirs.cancel()
        # ProcessGroupGloo.abort leaves the connections open. A wait that times out closes all
        # connections of its group, and so those of the peer.
        for group in self._group.copy():
            with contextlib.suppress(RuntimeError):
                mark = torch.zeros(1, dtype=torch.uint8)
                group.recv([mark], self._other, _NEVER).wait(timedelta(milliseconds=1))

    def shut_down(self) -> None:
        self._group = []
        self.thread.shut_down()


class _GlooTransfer(Transfer):
    def __init__(
        self, link: _GlooLink, tensors: tuple[Tensor, ...], posted: dict[_Pair, Future[list[_Work]]]
    ) -> None:
        self._link = link
        self._tensors = tensors
        self._posted = posted

    def wait(self, timeout: float) -> None:
        completions = {
            pair.completion(posted, timeout): pair for pair, posted in self._posted.items()
        }
        self._link.wait_for(completions, timeout, "the transfer with rank {} failed")


class _GlooLink(Link):
    def __init__(self, member: GroupMember) -> None:
        self.device = _CPU
        self._epoch = member.epoch
        self._sends = member.rank == 0
        self._idle = True
        self._aborted = False
        self._changed = threading.Event()  # what is waited for, or whether this was aborted
        self._waiting: dict[Future[object], _Pair] = {}
        self._lock = threading.Lock()
        try:
            host = member.host if self._sends else member.listen.host or _facing(member.host)
            # By default gloo, and torch, resolve the machine's name. Only private names lead
            # elsewhere. One device for all pairs: each has a thread that polls 100 times a second.
            device = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
        except (OSError, RuntimeError, UnicodeError) as error:
            raise TransportError(
                f"gloo cannot listen for {member.host}: {_reason(error)}"
            ) from error
        peers = range(1, member.world_size) if self._sends else [0]
        self._pairs = {peer: _Pair(member, device, peer) for peer in peers}
        if not self._sends:
            try:
                self.answer = self._addresses()[0]
            except TransportError:
                self.close()
                raise

    @property
    def waits_for(self) -> int | None:
        waiting = self._waiting
        return min((p.peer for future, p in waiting.items() if not future.done()), default=None)

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        for peer, pair in self._pairs.items():
            pair.store.give(unsealed(self._epoch, answers[peer], peer))
        return self._addresses()

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        if self._aborted:
            raise link_aborted()
        if not self._sends:
            self._pairs[0].store.give(unsealed(self._epoch, offer, 0))
        connecting: dict[Future[object], _Pair] = {
            cast("Future[object]", pair.connected): pair for pair in self._pairs.values()
        }
        self.wait_for(connecting, timeout, "rank {} cannot be reached")

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.send, header, payload)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(_Pair.receive, header, payload)

    def wait_for(self, futures: dict[Future[object], _Pair], timeout: float, what: str) -> None:
        """Returns once all are done; an error names the first pair that failed or is late."""
        pending = set(futures)
        changed = self._changed = threading.Event()
        self._waiting = futures

        def note(future: Future[object]) -> None:
            pending.discard(future)
            if not pending or future.cancelled() or future.exception() is not None:
                changed.set()

        for future in futures:
            future.add_done_callback(note)
        try:
            in_time = self._aborted or changed.wait(timeout)
            if self._aborted:
                raise link_aborted()
            for future, pair in futures.items():
                if future.done() and (error := future.exception()) is not None:
                    text = f"{what.format(pair.peer)}: {_reason(error)}"
                    raise TransportError(text, pair.peer) from error
            if not in_time:
                late = min(futures[future].peer for future in pending.copy())
                raise TransportTimeout(f"{what.format(late)}: its deadline ran out", late)
        finally:
            self._waiting = {}
            for future in pending.copy():
                future.cancel()

    def finish(self) -> None:
        super().finish()
        self._idle = True

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._changed.set()
        for pair in self._pairs.values():
            pair.abort()

    def close(self) -> bool:
        if not self._idle:
            self.abort()
        self._aborted = True
        self._changed.set()
        for pair in self._pairs.values():
            pair.store.theirs.cancel()
            pair.shut_down()
        until = time.monotonic() + _CLOSE_SECONDS
        stuck = [
            p.peer for p in self._pairs.values() if not p.thread.join(until - time.monotonic())
        ]
        if stuck and not self._idle:
            logger.info("gloo still holds messages with ranks %s; it keeps their memory", stuck)
        return self._idle or not stuck

    def _addresses(self) -> dict[int, bytes]:
        try:
            addresses = {peer: pair.addresses() for peer, pair in self._pairs.items()}
        except (RuntimeError, CancelledError) as error:
            raise TransportError(f"gloo cannot listen: {_reason(error)}") from error
        return {peer: sealed(self._epoch, data) for peer, data in addresses.items()}

    def _post(
        self,
        post: Callable[[_Pair, list[tuple[Tensor, int]]], Future[list[_Work]]],
        header: Tensor,
        payload: Tensor,
    ) -> Transfer:
        if self._aborted:
            raise link_aborted()
        self._idle = False
        messages = [(header, _HEADER), (payload, _PAYLOAD + payload.numel())]
        posted = {pair: post(pair, messages) for pair in self._pairs.values()}
        return _GlooTransfer(self, (header, payload), posted)


def _connect(store: _AddressStore, epoch: str, rank: int, device: object) -> _ProcessGroup:
    """Connects a pair; each end proves that it knows the epoch."""
    backend = dist.ProcessGroupGloo
    options = backend._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [device]  # noqa: SLF001
    options._timeout = timedelta(seconds=_CONNECT_SECONDS)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    group = cast("_ProcessGroup", backend(store, rank, 2, options))
    own, expected = _proof(epoch, rank), _proof(epoch, 1 - rank)
    theirs = torch.zeros_like(own)
    for work in (group.send([own], 1 - rank, _PROOF), group.recv([theirs], 1 - rank, _PROOF)):
        work.wait(options._timeout)  # noqa: SLF001
    if not torch.equal(theirs, expected):
        raise TransportError("whoever is there is not a member of this group")
    return group


def _proof(epoch: str, rank: int) -> Tensor:
    return torch.tensor(list(hashlib.sha256(f"rollwire:{epoch}:{rank}".encode()).digest()))


def _facing(host: str) -> str:
    """The address of this machine that faces ``host``."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _time_left(deadline: float) -> timedelta:
    # Gloo counts whole milliseconds and takes zero for no limit.
    return timedelta(milliseconds=max(math.ceil((deadline - time.monotonic()) * 1000), 1))


def _reason(error: BaseException) -> str:
    # Gloo's messages begin with a place in its source, and end with advice for collectives.
    return re.sub(r"^\[\S+:\d+\] |\. This is typically.*$|\n.*$", "", str(error), flags=re.S)


BACKEND = GlooBackend()

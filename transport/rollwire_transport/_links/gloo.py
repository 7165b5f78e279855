"""Gloo: over TCP, from and to host memory, on any machine.

Rank 0 has a pair, which is a gloo group of two, with every receiver, and sends each bucket to all
of them side by side. A broadcast in one group would save some copies; but when it fails, it cannot
say who failed and leaves the others waiting, and all members must reach each other.

A connection that breaks in the middle of a message does not end gloo's wait for that message. So
threads wait for gloo, and the control channel tells who died or gave up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import struct
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted
from rollwire_transport._links.failure_detector import StarFailureDetector
from rollwire_transport._links.framing import MessageType
from rollwire_transport._threads import DetachedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions
    from rollwire_transport._links.control_channel import ControlChannel

    _Post = Callable[["_Pair", Tensor, int], "_Message"]

logger = logging.getLogger(__name__)

# Tags tell the messages between two ranks apart. A payload's tag is _PAYLOAD plus its size: gloo
# ends the process that gets a longer message than it expects, so ends that disagree on a size must
# not find each other's message.
_HEADER, _FINISH, _NEVER, _PAYLOAD = range(4)

_CHECK_SECONDS = 0.02  # between checks of the members while waiting for a message
_BLAME_SECONDS = 0.3  # for the members to say why a message did not come
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

    def connect(
        self,
        member: GroupMember,
        channel: ControlChannel,
        token: bytes,
        deadline: float,
        cancelled: threading.Event,
    ) -> Link:
        del token
        with ThreadPoolExecutor(len(channel.peers)) as pool:
            connecting = {
                peer: pool.submit(_connect_pair, member, channel, peer, deadline, cancelled)
                for peer in channel.peers
            }
        pairs, errors = [], []
        for peer, future in connecting.items():
            try:
                pairs.append(future.result())
            except (RuntimeError, TransportError) as error:
                errors.append(_connect_error(member, peer, error, deadline))
        link = _GlooLink(channel, pairs, sends=member.rank == 0)
        if errors:
            link.close()  # tells all members
            raise errors[0]
        return link


class _Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class _Group(Protocol):  # what is used of ProcessGroupGloo, which torch's stubs lack
    def send(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...
    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> _Work: ...


class _Pair:
    """One end of a gloo group of rank 0 and a receiver.

    Its thread posts messages and waits for them: gloo's send writes to the socket itself for as
    long as the peer keeps up.
    """

    def __init__(self, group: _Group, rank: int, peer: int) -> None:
        self.peer = f"rank {peer}"
        self._group: _Group | None = group
        self._other = 1 if rank == 0 else 0
        self.thread = DetachedWorker(group, "rollwire-gloo")

    def send(self, tensor: Tensor, tag: int) -> _Message:
        other = self._other
        posted = self.thread.submit(lambda group: group.send([tensor], other, tag))
        return _Message(self, posted, tensor)

    def receive(self, tensor: Tensor, tag: int) -> _Message:
        other = self._other
        posted = self.thread.submit(lambda group: group.recv([tensor], other, tag))
        return _Message(self, posted, tensor)

    def abort(self) -> None:
        # ProcessGroupGloo.abort leaves the connections open. A wait that times out closes all
        # connections of its group, and so those of the peer.
        if (group := self._group) is not None:
            with contextlib.suppress(RuntimeError):
                mark = torch.zeros(1, dtype=torch.uint8)
                group.recv([mark], self._other, _NEVER).wait(timedelta(milliseconds=1))

    def shut_down(self) -> None:
        self._group = None
        self.thread.shut_down()


@dataclass(frozen=True, slots=True)
class _Message:
    pair: _Pair
    posted: Future[_Work]
    tensor: Tensor

    def completion(self, deadline: float) -> Future[object]:
        """Done or failed when gloo says so; if nothing else does before, after the deadline."""
        posted, limit = self.posted, deadline + _BLAME_SECONDS
        return self.pair.thread.submit(lambda _: posted.result().wait(_time_left(limit)))


@dataclass(frozen=True, slots=True)
class _GlooTransfer(Transfer):
    link: _GlooLink
    messages: list[_Message]

    def wait(self, timeout: float) -> None:
        self.link.wait_for(self.messages, time.monotonic() + timeout)


class _GlooLink(Link):
    def __init__(self, channel: ControlChannel, pairs: list[_Pair], *, sends: bool) -> None:
        self.device = _CPU
        self.upstream = "rank 0"
        self._sends = sends
        self._channel = channel
        self._detector = StarFailureDetector(channel)
        self._pairs = pairs
        self._finished = False
        self._aborted = False
        self._lock = threading.Lock()

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post_bucket(_Pair.send, header, payload)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post_bucket(_Pair.receive, header, payload)

    def wait_for(self, messages: list[_Message], deadline: float) -> None:
        completions = {message.completion(deadline): message.pair.peer for message in messages}
        pending = set(completions)
        try:
            while pending:
                if self._aborted:
                    raise link_aborted()
                self._detector.check()
                if time.monotonic() >= deadline:
                    raise self._timeout(sorted({completions[future] for future in pending}))
                done, pending = wait(pending, _CHECK_SECONDS, FIRST_EXCEPTION)
                for future in done:
                    if error := future.exception():
                        raise self._failure(completions[future], error) from error
        finally:
            for future in pending:
                future.cancel()
        if not self._sends:
            self._channel.send(MessageType.STEP)

    def finish(self, timeout: float) -> None:
        # Over gloo, so that it comes after the last bucket.
        post = _Pair.receive if self._sends else _Pair.send
        self._post(post, [(torch.zeros(1, dtype=torch.uint8), _FINISH)]).wait(timeout)
        self._channel.send(MessageType.FINISHED)
        self._finished = True

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
        self._channel.hang_up()
        for pair in self._pairs:
            pair.abort()

    def close(self) -> bool:
        if not self._finished:
            self.abort()
        self._aborted = True
        for pair in self._pairs:
            pair.shut_down()
        until = time.monotonic() + _CLOSE_SECONDS
        stuck = [p.peer for p in self._pairs if not p.thread.join(until - time.monotonic())]
        if stuck:
            logger.info("gloo still holds messages with %s; it keeps their memory", stuck)
        self._channel.close()
        return not stuck

    def _post_bucket(self, post: _Post, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(post, [(header, _HEADER), (payload, _PAYLOAD + payload.numel())])

    def _post(self, post: _Post, messages: Iterable[tuple[Tensor, int]]) -> Transfer:
        if self._aborted:
            raise link_aborted()
        return _GlooTransfer(
            self, [post(pair, tensor, tag) for tensor, tag in messages for pair in self._pairs]
        )

    def _timeout(self, peers: list[str]) -> TransportTimeout:
        """Blames one of the peers whose deadline passed: if there is one, the laggard."""
        peer = self._detector.laggard if self._sends else None
        if not self._sends:
            self._channel.send(MessageType.TIMED_OUT)
        peer = peer if peer in peers else peers[0]
        return TransportTimeout(f"the transfer with {peer} failed: its deadline ran out", peer)

    def _failure(self, peer: str, error: BaseException) -> TransportError:
        """What broke a connection, which the members may know better than gloo."""
        try:
            self._detector.await_blame(lambda: self._aborted)
        except TransportError as reason:
            return reason
        if self._aborted:
            return link_aborted()
        return TransportError(f"the transfer with {peer} failed: {_reason(error)}", peer)


class _ExchangeStore(dist.Store):  # type: ignore[name-defined,misc]  # torch's stubs lack it
    """The store in which the two ends of a pair leave their addresses: the control channel.

    torch's own store over TCP waits forever for a process that is frozen or unreachable.
    """

    _KEY_SIZE = struct.Struct("<H")

    def __init__(
        self, channel: ControlChannel, peer: int, deadline: float, cancelled: threading.Event
    ) -> None:
        super().__init__()
        self._channel = channel
        self._peer = peer
        self._deadline = deadline
        self._cancelled = cancelled
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        name = key.encode()
        self._channel.put(self._peer, self._KEY_SIZE.pack(len(name)) + name + value)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            entry = self._channel.get(self._peer, self._deadline, self._cancelled)
            if len(entry) < self._KEY_SIZE.size:
                raise TransportError(f"rank {self._peer} sent a message of another format")
            end = self._KEY_SIZE.size + self._KEY_SIZE.unpack_from(entry)[0]
            name = entry[self._KEY_SIZE.size : end].decode(errors="replace")
            self._values[name] = entry[end:]
        return self._values[key]

    def wait(self, keys: list[str], _timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def barrier(self, rank: int) -> None:
        """Returns once both ends are here."""
        self.set(f"done/{rank}", b"")
        self.get(f"done/{self._peer}")


def _connect_pair(
    member: GroupMember,
    channel: ControlChannel,
    peer: int,
    deadline: float,
    cancelled: threading.Event,
) -> _Pair:
    backend = dist.ProcessGroupGloo
    # By default gloo, and torch, resolve the machine's name. Only private names lead elsewhere.
    host = member.listen.host or channel.peers[peer].connection.local_host
    options = backend._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [backend.create_device(hostname=host, lazy_init=False)]  # noqa: SLF001
    options._timeout = _time_left(deadline)  # noqa: SLF001
    options._threads = 1  # noqa: SLF001 - for collectives, of which there are none
    store = _ExchangeStore(channel, peer, deadline, cancelled)
    group = cast("_Group", backend(store, min(member.rank, 1), 2, options))
    store.barrier(member.rank)
    return _Pair(group, member.rank, peer)


def _connect_error(
    member: GroupMember, peer: int, error: BaseException, deadline: float
) -> TransportError:
    if member.rank > 0 and isinstance(error, TransportError):
        return error
    what = (
        "the group could not be formed"
        if member.rank
        else f"rank {peer} joined but cannot be reached"
    )
    if time.monotonic() >= deadline:
        return TransportTimeout(f"{what}: its deadline ran out", f"rank {peer}")
    return TransportError(f"{what}: {_reason(error)}", f"rank {peer}")


def _time_left(deadline: float) -> timedelta:
    # Gloo counts whole milliseconds and takes zero for no limit.
    return timedelta(milliseconds=max(math.ceil((deadline - time.monotonic()) * 1000), 1))


def _reason(error: BaseException) -> str:
    # Gloo's messages begin with a place in its source, and end with advice for collectives.
    return re.sub(r"^\[\S+:\d+\] |\. This is typically.*$|\n.*$", "", str(error), flags=re.S)


BACKEND = GlooBackend()

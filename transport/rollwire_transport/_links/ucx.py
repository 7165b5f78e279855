"""UCX: point to point, forwarded from server to server, over whatever UCX finds best: RDMA, NVLink,
TCP.

The members form a chain in the order of their ranks. A bucket goes down it in chunks: a relay
forwards a chunk while the next one arrives, so that rank 0 sends each byte once, however many
receivers there are, and the last one has it little later than the first. A relay forwards what came
before it is verified; each receiver verifies what came to it.

Rank 0 tells each member the UCX addresses of its neighbours. Messages carry tags made of the epoch,
which only members know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rollwire_transport._errors import TransportError
from rollwire_transport._links import libucx
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted
from rollwire_transport._links.failure_detector import ChainFailureDetector
from rollwire_transport._links.framing import MessageType
from rollwire_transport._streams import packing_context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions
    from rollwire_transport._links.control_channel import ControlChannel

logger = logging.getLogger(__name__)

# A relay holds back one chunk. For host memory over TCP small ones are better; between GPUs a copy
# is worth its start only if it is large.
_HOST_CHUNK_BYTES = 4 << 20
_DEVICE_CHUNK_BYTES = 64 << 20

# UCX notifies nobody when something in flight is done, so it is polled. The interval grows by a
# quarter while nothing moves: completion is noticed late by a quarter of its duration at most, and
# a slow link costs little CPU.
_POLL_SECONDS = 0.0003
_MAX_POLL_SECONDS = 0.004
_POLL_GROWTH = 1.25
_IDLE_SECONDS = 0.05
_BLAME_SECONDS = 0.3  # for rank 0 to say who is to blame
_JOIN_SECONDS = 10.0  # for the thread of a link that was aborted

_CHUNK_SIZE = struct.Struct("<Q")  # the bootstrap token


class UcxBackend(Backend):
    name = "ucx"
    # On a GPU it comes first: it connects in a tenth of NCCL's time, takes no SM from decoding, and
    # serves members that share a GPU.
    cpu_preference, gpu_preference = 1, 0

    def unavailable_reason(self, listen: ListenOptions) -> str:
        try:
            libucx.load()
        except (ImportError, OSError) as error:
            return f"ucxx cannot be loaded: {error}"
        return listen.fixed_host_problem("ucx", "UCX_NET_DEVICES")

    def warm_up(self, device: torch.device, listen: ListenOptions) -> None:
        """Has UCX look for its ways from a GPU, which it does once in a process."""
        try:
            libucx.Worker(device, listen.ports).close()
        except TransportError as error:
            logger.warning("UCX could not be warmed up: %s", error)

    def bootstrap_token(self, member: GroupMember) -> bytes:
        on_device = member.device.type == "cuda"
        return _CHUNK_SIZE.pack(_DEVICE_CHUNK_BYTES if on_device else _HOST_CHUNK_BYTES)

    def connect(
        self,
        member: GroupMember,
        channel: ControlChannel,
        token: bytes,
        deadline: float,
        cancelled: threading.Event,
    ) -> Link:
        if len(token) != _CHUNK_SIZE.size:
            raise TransportError(f"rank 0 sent {len(token)} bytes for UCX's chunk size", "rank 0")
        (chunk_bytes,) = _CHUNK_SIZE.unpack(token)
        worker = libucx.Worker(member.device, member.listen.ports)
        try:
            if member.rank == 0:
                previous, following = (
                    b"",
                    _introduce_neighbours(channel, worker.address, deadline, cancelled),
                )
            else:
                channel.put(0, worker.address)
                previous = channel.get(0, deadline, cancelled)
                following = channel.get(0, deadline, cancelled)
            place = _Place(member.rank, member.epoch, chunk_bytes, previous, following)
            return _UcxLink(place, channel, worker, member.device)
        except BaseException:
            worker.close()
            raise


def _introduce_neighbours(
    channel: ControlChannel, address: bytes, deadline: float, cancelled: threading.Event
) -> bytes:
    """Gives each receiver the addresses of its neighbours; returns that of rank 1."""
    addresses = {rank: channel.get(rank, deadline, cancelled) for rank in channel.peers}
    addresses[0] = address
    for rank in channel.peers:
        channel.put(rank, addresses[rank - 1])
        channel.put(rank, addresses.get(rank + 1, b""))
    return addresses[1]


@dataclass(frozen=True, slots=True)
class _Place:
    """A member's place in the chain, and its neighbours' UCX addresses or b""."""

    rank: int
    epoch: str
    chunk_bytes: int
    previous: bytes
    following: bytes

    def tag(self, receiver: int, size: int) -> Any:
        """The tag of a message to a rank. Ends that disagree on sizes must not match messages."""
        text = f"{self.epoch}/{receiver}/{size}".encode()
        value = hashlib.blake2b(text, digest_size=8, person=b"rollwire").digest()
        return libucx.load().UCXXTag(int.from_bytes(value, "little"))


@dataclass(slots=True, eq=False)
class _Bucket(Transfer):
    """A bucket in flight, as its chunks, the header first.

    Rank 0 sends all of them at once. Other ranks receive each in their order, and forward it if a
    member follows.
    """

    link: _UcxLink
    chunks: list[Any]
    receives: deque[Any] = field(default_factory=deque)
    sends: deque[Any] = field(default_factory=deque)
    received: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float) -> None:
        self.link.wait_for(self, timeout)

    def advance(self, forward: Callable[[Any], Any] | None) -> None:
        while self.receives and self.receives[0].completed:
            with _lost(previous=True):
                self.receives.popleft().check_error()
            if forward is not None:
                self.sends.append(forward(self.chunks[self.received]))
            self.received += 1
        while self.sends and self.sends[0].completed:
            with _lost(previous=False):
                self.sends.popleft().check_error()

    @property
    def released(self) -> bool:
        """Whether UCX does not use its memory any more."""
        return all(request.completed for request in (*self.receives, *self.sends))

    def forget(self) -> None:
        self.receives.clear()
        self.sends.clear()


class _Lost(Exception):  # noqa: N818 - what happened to the connection with a neighbour
    def __init__(self, reason: str, *, previous: bool) -> None:
        super().__init__(reason)
        self.previous = previous


class _UcxLink(Link):
    """One end. Its thread reads the control channel, forwards chunks, and frees everything in the
    end.
    """

    def __init__(
        self,
        place: _Place,
        channel: ControlChannel,
        worker: libucx.Worker,
        device: torch.device,
    ) -> None:
        self.device = device if worker.takes(device) else torch.device("cpu")
        self.upstream = f"rank {max(place.rank - 1, 0)}"
        self._place = place
        self._worker = worker
        self._previous = worker.connect(place.previous)
        self._following = worker.connect(place.following)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._channel = channel
        self._detector = ChainFailureDetector(channel)
        self._lock = threading.Lock()  # guards what follows
        self._buckets: deque[_Bucket] = deque()
        self._forwarded_bytes = 0
        self._failure: TransportError | None = None
        self._timed_out = ""  # why this end gives up waiting, if it does
        self._pending = 0  # requests in flight at the last poll
        self._poll_seconds = _POLL_SECONDS
        self._finished = threading.Event()  # this end has
        self._all_finished = threading.Event()
        self._all_released = False
        self._close_timeout = 0.0  # of close, for the other members, once this end has finished
        self._thread = threading.Thread(target=self._run, name="rollwire-ucx", daemon=True)
        self._thread.start()

    @property
    def header_device(self) -> torch.device:
        # Copied to a GPU, each would interrupt another process that samples there.
        return torch.device("cpu")

    @property
    def forwarded_bytes(self) -> int:
        return self._forwarded_bytes

    def stream_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._stream is None else packing_context(self._stream)

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        if self._stream is not None:  # UCX does not wait for work that is queued on streams
            torch.cuda.current_stream(self.device).synchronize()
        return self._post(header, payload, self._send)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(header, payload, self._receive)

    def wait_for(self, bucket: _Bucket, timeout: float) -> None:
        if not bucket.done.wait(timeout):
            self._give_up(f"a bucket did not move within {timeout:g} s", bucket.done)
        self._check()

    def finish(self, timeout: float) -> None:
        self._check()
        self._close_timeout = timeout
        self._finished.set()
        self._channel.wake()
        if self._place.rank == 0:
            if not self._all_finished.wait(timeout):
                self._give_up(f"not all finished within {timeout:g} s", self._all_finished)
            self._check()

    def abort(self) -> None:
        self._fail(link_aborted())

    def close(self) -> bool:
        if self._place.rank > 0:
            # What the next member has not received yet stays until rank 0 hangs up: all finished.
            self._thread.join(self._close_timeout)
        self.abort()
        self._thread.join(_JOIN_SECONDS)
        return self._all_released

    def _check(self) -> None:
        if (failure := self._failure) is not None:
            raise type(failure)(str(failure), failure.peer)

    def _give_up(self, why: str, event: threading.Event) -> None:
        """Fails the link after a timeout; ``event`` is set once the link's thread has done so."""
        self._timed_out = why
        self._channel.wake()
        if not event.wait(_JOIN_SECONDS):
            self._fail(self._detector.timeout(why))

    def _fail(self, error: TransportError) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            for bucket in self._buckets:
                bucket.done.set()
        self._all_finished.set()
        self._channel.wake()

    def _post(self, header: Tensor, payload: Tensor, begin: Callable[[_Bucket], None]) -> Transfer:
        size = self._place.chunk_bytes
        pieces = [payload[start : start + size] for start in range(0, payload.numel(), size)]
        bucket = _Bucket(self, [libucx.array(tensor) for tensor in (header, *pieces)])
        with self._lock:
            self._check()
            self._buckets.append(bucket)
            try:
                begin(bucket)
            except _Lost as lost:
                rank = self._neighbour(lost)
                raise TransportError(f"rank {rank} was lost: {lost}", f"rank {rank}") from lost
        self._channel.wake()
        return bucket

    def _send(self, bucket: _Bucket) -> None:
        for chunk in bucket.chunks:
            bucket.sends.append(self._forward(chunk))

    def _receive(self, bucket: _Bucket) -> None:
        for chunk in bucket.chunks:
            tag = self._place.tag(self._place.rank, chunk.nbytes)
            with _lost(previous=True):
                bucket.receives.append(self._previous.tag_recv(chunk, tag))

    def _forward(self, chunk: Any) -> Any:
        tag = self._place.tag(self._place.rank + 1, chunk.nbytes)
        with _lost(previous=False):
            return self._following.tag_send(chunk, tag)

    def _neighbour(self, lost: _Lost) -> int:
        return self._place.rank + (-1 if lost.previous else 1)

    # From here on: what its thread runs.

    def _run(self) -> None:
        reported = False
        try:
            while self._failure is None:
                self._channel.read(self._poll_seconds if self._buckets else _IDLE_SECONDS)
                self._detector.check()
                self._detector.report(self._advance())
                if self._finished.is_set() and self._place.rank > 0 and not reported:
                    self._channel.send(MessageType.FINISHED)
                    reported = True
                if self._channel.all_finished:
                    self._all_finished.set()
                if self._timed_out:
                    timeout = self._detector.timeout(self._timed_out)
                    self._fail(self._consult_rank_0(MessageType.TIMED_OUT, 0, timeout))
        except TransportError as error:
            self._fail(error)
        except _Lost as lost:
            rank = self._neighbour(lost)
            loss = TransportError(f"rank {rank} was lost: {lost}", f"rank {rank}")
            self._fail(self._consult_rank_0(MessageType.PEER_LOST, rank, loss))
        finally:
            self._free()

    def _advance(self) -> MessageType:
        """Moves the buckets on; returns what this end waits for."""
        forward = None if self._following is None else self._forward
        with self._lock:
            for bucket in self._buckets:
                bucket.advance(forward)
                if bucket.receives:
                    break  # later buckets are forwarded after it, whichever came first
            pending = sum(len(b.receives) + len(b.sends) for b in self._buckets)
            moved, self._pending = pending != self._pending, pending
            longer = min(self._poll_seconds * _POLL_GROWTH, _MAX_POLL_SECONDS)
            self._poll_seconds = _POLL_SECONDS if moved else longer
            while self._buckets and not (self._buckets[0].receives or self._buckets[0].sends):
                bucket = self._buckets.popleft()
                if forward is not None:
                    self._forwarded_bytes += sum(c.nbytes for c in bucket.chunks[1:])
                bucket.done.set()
            if any(bucket.sends for bucket in self._buckets):
                return MessageType.FORWARDING
            return MessageType.RECEIVING if self._buckets else MessageType.WORKING

    def _consult_rank_0(
        self, type_: MessageType, rank: int, error: TransportError
    ) -> TransportError:
        """Reports a failure to rank 0; returns its reason, since it hears of the others too.

        If it gives none in time, returns ``error``.
        """
        if self._place.rank == 0:
            return error
        self._channel.send_rank(type_, rank)
        deadline = time.monotonic() + _BLAME_SECONDS
        try:
            while time.monotonic() < deadline:
                self._channel.read(_BLAME_SECONDS / 10)
                self._detector.check()
        except TransportError as reason:
            return reason
        return error

    def _free(self) -> None:
        self._fail(TransportError("the link's thread failed"))  # if nothing else has
        failure = self._failure
        if self._place.rank == 0 and failure is not None and failure.peer is not None:
            self._channel.send_rank(MessageType.ABORTED, int(failure.peer.removeprefix("rank ")))
        self._channel.hang_up()
        with self._lock:
            buckets = list(self._buckets)
            self._buckets.clear()
        self._previous = self._following = None
        try:
            self._all_released = self._worker.close(buckets)
        finally:
            self._channel.close()


@contextlib.contextmanager
def _lost(*, previous: bool) -> Iterator[None]:
    try:
        yield
    except libucx.load().UCXError as error:
        raise _Lost(str(error), previous=previous) from error


BACKEND = UcxBackend()

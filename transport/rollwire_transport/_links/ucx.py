"""UCX: point to point, forwarded from server to server, over whatever UCX finds best: RDMA, NVLink,
TCP.

The members form a chain in the order of their ranks. A bucket goes down it in chunks: a relay
forwards a chunk while the next one arrives, so that rank 0 sends each byte once, however many
receivers there are, and the last one has it little later than the first. A relay forwards what came
before it is verified; each receiver verifies what came to it.

Each member answers with its UCX address, and rank 0 offers the addresses of the neighbours.
Messages carry tags made of the epoch, which only members know.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rollwire_transport._concurrency import packing_context
from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links import libucx
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted, sealed, unsealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions

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
_JOIN_SECONDS = 10.0  # for the thread of a link that was aborted

_OFFER = struct.Struct("<QI")  # chunk size, length of the previous one's address; both follow


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

    def open(self, member: GroupMember) -> Link:
        return _UcxLink(member)


@dataclass(slots=True, eq=False)
class _UcxTransfer(Transfer):
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
    """One end. Once connected, its thread forwards chunks, and frees everything in the end."""

    def __init__(self, member: GroupMember) -> None:
        self._epoch = member.epoch
        self._rank = member.rank
        self.upstream = max(member.rank - 1, 0)
        self._worker = libucx.Worker(member.device, member.listen.ports)
        self.answer = sealed(self._epoch, self._worker.address)
        self.device = member.device if self._worker.takes(member.device) else torch.device("cpu")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._offer = b""
        self._chunk_bytes = 0
        self._previous: Any = None
        self._following: Any = None
        self._wake = threading.Event()
        self._lock = threading.Lock()  # guards what follows
        self._buckets: deque[_UcxTransfer] = deque()
        self._forwarded_bytes = 0
        self._failure: TransportError | None = None
        self._pending = 0  # requests in flight at the last poll
        self._poll_seconds = _POLL_SECONDS
        self._waits_for: int | None = None
        self._all_released: bool | None = None  # known once everything is freed
        self._thread = threading.Thread(target=self._run, name="rollwire-ucx", daemon=True)

    @property
    def header_device(self) -> torch.device:
        # Copied to a GPU, each would interrupt another process that samples there.
        return torch.device("cpu")

    @property
    def forwarded_bytes(self) -> int:
        return self._forwarded_bytes

    @property
    def waits_for(self) -> int | None:
        return self._waits_for

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        on_device = self.device.type == "cuda"
        chunk_bytes = _DEVICE_CHUNK_BYTES if on_device else _HOST_CHUNK_BYTES
        addresses = {0: self._worker.address}
        addresses |= {rank: unsealed(self._epoch, answers[rank], rank) for rank in answers}

        def offer(rank: int) -> bytes:
            previous, following = (addresses.get(rank + step, b"") for step in (-1, 1))
            return sealed(
                self._epoch, _OFFER.pack(chunk_bytes, len(previous)) + previous + following
            )

        self._offer = offer(0)
        return {rank: offer(rank) for rank in answers}

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        del timeout  # UCX connects when something is sent
        data = unsealed(self._epoch, offer if self._rank else self._offer, 0)
        self._chunk_bytes, size = _OFFER.unpack_from(data)
        addresses = data[_OFFER.size :]
        with self._lock:
            self._check()
            self._previous = self._worker.connect(addresses[:size], self._rank - 1)
            self._following = self._worker.connect(addresses[size:], self._rank + 1)
            self._thread.start()

    def stream_context(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._stream is None else packing_context(self._stream)

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        if self._stream is not None:  # UCX does not wait for work that is queued on streams
            torch.cuda.current_stream(self.device).synchronize()
        return self._post(header, payload, self._send)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(header, payload, self._receive)

    def wait_for(self, bucket: _UcxTransfer, timeout: float) -> None:
        if not bucket.done.wait(timeout):
            peer = self._waits_for
            who = "" if peer is None else f": rank {peer} is behind"
            raise TransportTimeout(f"a bucket did not move within {timeout:g} s{who}", peer)
        self._check()

    def abort(self) -> None:
        self._fail(link_aborted())

    def close(self) -> bool:
        self.abort()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)
        elif self._all_released is None:
            self._free()
        return bool(self._all_released)

    def _check(self) -> None:
        if (failure := self._failure) is not None:
            raise type(failure)(str(failure), failure.peer)

    def _fail(self, error: TransportError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            for bucket in self._buckets:
                bucket.done.set()
        self._wake.set()

    def _post(
        self, header: Tensor, payload: Tensor, begin: Callable[[_UcxTransfer], None]
    ) -> Transfer:
        size = self._chunk_bytes
        pieces = [payload[start : start + size] for start in range(0, payload.numel(), size)]
        bucket = _UcxTransfer(self, [libucx.array(tensor) for tensor in (header, *pieces)])
        with self._lock:
            self._check()
            self._buckets.append(bucket)
            try:
                begin(bucket)
            except _Lost as lost:
                raise self._loss(lost) from lost
        self._wake.set()
        return bucket

    def _send(self, bucket: _UcxTransfer) -> None:
        for chunk in bucket.chunks:
            bucket.sends.append(self._forward(chunk))

    def _receive(self, bucket: _UcxTransfer) -> None:
        for chunk in bucket.chunks:
            tag = self._tag(self._rank, chunk.nbytes)
            with _lost(previous=True):
                bucket.receives.append(self._previous.tag_recv(chunk, tag))

    def _forward(self, chunk: Any) -> Any:
        tag = self._tag(self._rank + 1, chunk.nbytes)
        with _lost(previous=False):
            return self._following.tag_send(chunk, tag)

    def _tag(self, receiver: int, size: int) -> Any:
        """The tag of a message to a rank. Ends that disagree on sizes must not match messages."""
        text = f"{self._epoch}/{self.transfers}/{receiver}/{size}".encode()
        value = hashlib.blake2b(text, digest_size=8, person=b"rollwire").digest()
        return libucx.load().UCXXTag(int.from_bytes(value, "little"))

    def _loss(self, lost: _Lost) -> TransportError:
        rank = self._rank + (-1 if lost.previous else 1)
        return TransportError(f"rank {rank} was lost: {lost}", rank)

    # From here on: what its thread runs.

    def _run(self) -> None:
        try:
            while self._failure is None:
                self._wake.wait(self._poll_seconds if self._buckets else None)
                self._wake.clear()
                self._advance()
        except _Lost as lost:
            self._fail(self._loss(lost))
        finally:
            self._free()

    def _advance(self) -> None:
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
                self._waits_for = self._rank + 1
            else:
                self._waits_for = self._rank - 1 if self._buckets else None

    def _free(self) -> None:
        self._fail(TransportError("the link's thread failed"))  # if nothing else has
        with self._lock:
            buckets = list(self._buckets)
            self._buckets.clear()
        self._previous = self._following = None
        self._all_released = self._worker.close(buckets)


@contextlib.contextmanager
def _lost(*, previous: bool) -> Iterator[None]:
    try:
        yield
    except libucx.load().UCXError as error:
        raise _Lost(str(error), previous=previous) from error


BACKEND = UcxBackend()

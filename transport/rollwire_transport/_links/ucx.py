"""UCX: point to point, passed on from server to server, over whatever UCX finds to be best: RDMA,
NVLink, TCP.

The members form a chain in the order of their ranks. A bucket goes down it in chunks: a relay
passes a chunk on while the next one comes in, so that rank 0 sends each byte once, however many
receive it, and the last has it little later than the first. A relay passes on what came before it
is verified; each receiver verifies what came to it.

The members meet at rank 0 (see ``control``), which tells each the UCX addresses of its neighbours,
and keeps watch over all (see ``chain``). Messages carry tags made of the epoch, which only members
know.
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

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links import libucx
from rollwire_transport._links.base import Availability, Link, Rendezvous, Transfer
from rollwire_transport._links.control_channel import TICKET_BYTES, Gathering, call, card_of_rank
from rollwire_transport._links.failure_detector import Watch, Word

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from rollwire_transport._links.listener import ListenOptions

logger = logging.getLogger(__name__)

# A relay holds back one chunk: small ones for the host's memory, over TCP; between GPUs a copy is
# worth its start only when it is large.
_HOST_CHUNK_BYTES = 4 << 20
_DEVICE_CHUNK_BYTES = 64 << 20

# While something is under way, UCX tells nobody when it is done. Waits grow by a quarter while
# nothing has moved, so that it is found late by a quarter of what it took, and a slow link costs
# little CPU.
_POLL_SECONDS = 0.0003
_LONGEST_POLL_SECONDS = 0.004
_POLL_GROWTH = 1.25
_IDLE_SECONDS = 0.05
_VERDICT_SECONDS = 0.3  # for rank 0 to say who is to blame
_LET_GO_SECONDS = 10.0  # for the thread of a link that was aborted

_LENGTH = struct.Struct("<H")  # of a UCX address
_TICKET = struct.Struct("<Q")  # bytes of a chunk


def available(listen: ListenOptions) -> Availability:
    """Whether ucxx is installed and can be loaded, and can listen there."""
    try:
        libucx.load()
    except (ImportError, OSError) as error:
        return Availability(ok=False, reason=f"ucxx cannot be loaded: {error}")
    problem = listen.needs_no_host("ucx", "UCX_NET_DEVICES")
    return Availability(ok=not problem, reason=problem)


def prepare(device: torch.device, listen: ListenOptions) -> None:
    """Has UCX do what it does once in a process, for the first worker."""
    try:
        libucx.Worker(device, listen.ports).close()
    except TransportError as error:
        logger.warning("UCX could not be prepared: %s", error)


def open_rendezvous(
    *, epoch: str, world_size: int, host: str, port: int, device: torch.device
) -> Rendezvous:
    """See ``links.open_rendezvous``."""
    return _UcxRendezvous(epoch, world_size, host, port, device)


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
    deadline = time.monotonic() + timeout
    lines, ticket = call(epoch, rank, world_size, rendezvous, card_of_rank(rank), timeout, closed)
    connections = lines.detach()
    with _closed_on_error(connections), _worker(device, listen.ports) as worker:
        _write(connections[0], worker.address)
        previous, following = (_read(connections[0], deadline, 0) for _ in range(2))
        (chunk_bytes,) = _TICKET.unpack_from(ticket)
        place = _Place(rank, epoch, chunk_bytes, previous, following)
        return _UcxLink(place, connections, worker, device)


class _UcxRendezvous(Rendezvous):
    def __init__(
        self, epoch: str, world_size: int, host: str, port: int, device: torch.device
    ) -> None:
        self._epoch = epoch
        self._device = device
        self._gathering = Gathering(epoch, world_size, host, port)
        self.address = self._gathering.address

    def form_group(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        lines = self._gathering.gather(card_of_rank(0), timeout)
        chunk_bytes = _DEVICE_CHUNK_BYTES if self._device.type == "cuda" else _HOST_CHUNK_BYTES
        lines.start(_TICKET.pack(chunk_bytes).ljust(TICKET_BYTES, b"\0"))
        connections = lines.detach()
        with _closed_on_error(connections), _worker(self._device) as worker:
            addresses = {rank: _read(line, deadline, rank) for rank, line in connections.items()}
            addresses[0] = worker.address
            for rank, line in connections.items():
                _write(line, addresses[rank - 1])
                _write(line, addresses.get(rank + 1, b""))
            place = _Place(0, self._epoch, chunk_bytes, b"", addresses[1])
            return _UcxLink(place, connections, worker, self._device)

    def close(self) -> None:
        self._gathering.close()


@dataclass(frozen=True, slots=True)
class _Place:
    """A member's place in a chain and the UCX addresses of its neighbours, if it has them."""

    rank: int
    epoch: str
    chunk_bytes: int
    previous: bytes
    following: bytes

    def tag(self, receiver: int, size: int) -> Any:
        """Of a message to a rank. Ends that disagree on sizes must not find each other's."""
        text = f"{self.epoch}/{receiver}/{size}".encode()
        value = hashlib.blake2b(text, digest_size=8, person=b"rollwire").digest()
        return libucx.load().UCXXTag(int.from_bytes(value, "little"))


@dataclass(slots=True, eq=False)
class _Bucket(Transfer):
    """A bucket under way, as its chunks, the header first.

    At rank 0 all of them are sent at once. Elsewhere each is received, in their order, and sent on
    where somebody follows.
    """

    link: _UcxLink
    chunks: list[Any]
    receives: deque[Any] = field(default_factory=deque)
    sends: deque[Any] = field(default_factory=deque)
    received: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self, timeout: float) -> None:
        self.link.land(self, timeout)

    def advance(self, pass_on: Callable[[Any], Any] | None) -> None:
        """Goes on as far as it can."""
        while self.receives and self.receives[0].completed:
            with _lost(previous=True):
                self.receives.popleft().check_error()
            if pass_on is not None:
                self.sends.append(pass_on(self.chunks[self.received]))
            self.received += 1
        while self.sends and self.sends[0].completed:
            with _lost(previous=False):
                self.sends.popleft().check_error()

    @property
    def let_go(self) -> bool:
        """Whether UCX has nothing to do with its memory any more."""
        return all(request.completed for request in (*self.receives, *self.sends))

    def forget(self) -> None:
        self.receives.clear()
        self.sends.clear()


class _Lost(Exception):  # noqa: N818 - what happened to the connection with a neighbour
    def __init__(self, reason: str, *, previous: bool) -> None:
        super().__init__(reason)
        self.previous = previous


class _UcxLink(Link):
    """One end. A thread of its own keeps watch, passes chunks on, and lets go of everything in the
    end.
    """

    def __init__(
        self,
        place: _Place,
        connections: dict[int, socket.socket],
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
        self._watch = Watch(place.rank, connections)
        self._lock = threading.Lock()  # around what follows
        self._buckets: deque[_Bucket] = deque()
        self._forwarded_bytes = 0
        self._failure: TransportError | None = None
        self._late = ""  # why this end gives up waiting, if it does
        self._pending = 0  # what was under way at the last look
        self._poll_seconds = _POLL_SECONDS
        self._finish = threading.Event()  # this end has
        self._finished = threading.Event()  # all have
        self._all_let_go = False
        self._patience = 0.0  # of close with the others, once this end has finished
        self._thread = threading.Thread(target=self._run, name="rollwire-ucx", daemon=True)
        self._thread.start()

    @property
    def header_device(self) -> torch.device:
        # Copied to a device, each would take a turn on it, for which whoever samples there waits.
        return torch.device("cpu")

    @property
    def forwarded_bytes(self) -> int:
        return self._forwarded_bytes

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._stream is None else self._lane(self._stream)

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        if self._stream is not None:  # UCX does not wait for what streams have still to do
            torch.cuda.current_stream(self.device).synchronize()
        return self._post(header, payload, self._send)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post(header, payload, self._receive)

    def land(self, bucket: _Bucket, timeout: float) -> None:
        """Waits for a bucket; see ``Transfer.wait``."""
        if not bucket.done.wait(timeout):
            self._give_up(f"a bucket did not move within {timeout:g} s", bucket.done)
        self._check()

    def finish(self, timeout: float) -> None:
        self._check()
        self._patience = timeout
        self._finish.set()
        self._watch.wake()
        if self._place.rank == 0:
            if not self._finished.wait(timeout):
                self._give_up(f"not all finished within {timeout:g} s", self._finished)
            self._check()

    def abort(self) -> None:
        self._fail(TransportError("the link was aborted or closed at this end"))

    def close(self) -> bool:
        if self._place.rank > 0:
            # What the next one has still to take stays until rank 0 says that all have finished.
            self._thread.join(self._patience)
        self.abort()
        self._thread.join(_LET_GO_SECONDS)
        return self._all_let_go

    def _check(self) -> None:
        if (failure := self._failure) is not None:
            raise type(failure)(str(failure), failure.peer)

    def _give_up(self, why: str, event: threading.Event) -> None:
        """Has waited too long for an event, which comes with the failure that follows."""
        self._late = why
        self._watch.wake()
        if not event.wait(_LET_GO_SECONDS):
            self._fail(self._watch.timeout(why))

    def _fail(self, error: TransportError) -> None:
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            for bucket in self._buckets:
                bucket.done.set()
        self._finished.set()
        self._watch.wake()

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
        self._watch.wake()
        return bucket

    def _send(self, bucket: _Bucket) -> None:
        for chunk in bucket.chunks:
            bucket.sends.append(self._pass_on(chunk))

    def _receive(self, bucket: _Bucket) -> None:
        for chunk in bucket.chunks:
            tag = self._place.tag(self._place.rank, chunk.nbytes)
            with _lost(previous=True):
                bucket.receives.append(self._previous.tag_recv(chunk, tag))

    def _pass_on(self, chunk: Any) -> Any:
        tag = self._place.tag(self._place.rank + 1, chunk.nbytes)
        with _lost(previous=False):
            return self._following.tag_send(chunk, tag)

    def _neighbour(self, lost: _Lost) -> int:
        return self._place.rank + (-1 if lost.previous else 1)

    @contextlib.contextmanager
    def _lane(self, stream: torch.cuda.Stream) -> Iterator[None]:
        stream.wait_stream(torch.cuda.default_stream(self.device))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()

    # What its thread does.

    def _run(self) -> None:
        told = False
        try:
            while self._failure is None:
                self._watch.wait(self._poll_seconds if self._buckets else _IDLE_SECONDS)
                self._watch.check()
                self._watch.tick(self._advance())
                if self._finish.is_set() and self._place.rank > 0 and not told:
                    self._watch.tell(Word.FINISHED)
                    told = True
                if self._watch.finished:
                    self._finished.set()
                if self._late:
                    self._fail(self._ask(Word.LATE, 0, self._watch.timeout(self._late)))
        except TransportError as error:
            self._fail(error)
        except _Lost as lost:
            rank = self._neighbour(lost)
            loss = TransportError(f"rank {rank} was lost: {lost}", f"rank {rank}")
            self._fail(self._ask(Word.LOST, rank, loss))
        finally:
            self._let_go()

    def _advance(self) -> Word:
        """Lets the buckets go on; returns what this end waits for."""
        pass_on = None if self._following is None else self._pass_on
        with self._lock:
            for bucket in self._buckets:
                bucket.advance(pass_on)
                if bucket.receives:
                    break  # what follows is passed on after it, whichever came first
            pending = sum(len(b.receives) + len(b.sends) for b in self._buckets)
            moved, self._pending = pending != self._pending, pending
            longer = min(self._poll_seconds * _POLL_GROWTH, _LONGEST_POLL_SECONDS)
            self._poll_seconds = _POLL_SECONDS if moved else longer
            while self._buckets and not (self._buckets[0].receives or self._buckets[0].sends):
                bucket = self._buckets.popleft()
                if pass_on is not None:
                    self._forwarded_bytes += sum(c.nbytes for c in bucket.chunks[1:])
                bucket.done.set()
            if any(bucket.sends for bucket in self._buckets):
                return Word.PASSING
            return Word.TAKING if self._buckets else Word.WORKING

    def _ask(self, word: Word, about: int, error: TransportError) -> TransportError:
        """Tells rank 0 what went wrong here; returns what it says, since it hears of the others
        too, or else ``error``.
        """
        if self._place.rank == 0:
            return error
        self._watch.tell(word, about)
        deadline = time.monotonic() + _VERDICT_SECONDS
        try:
            while time.monotonic() < deadline:
                self._watch.wait(_VERDICT_SECONDS / 10)
                self._watch.check()
        except TransportError as verdict:
            return verdict
        return error

    def _let_go(self) -> None:
        self._fail(TransportError("the link's thread failed"))  # if nothing else has
        failure = self._failure
        if self._place.rank == 0 and failure is not None and failure.peer is not None:
            self._watch.tell(Word.OVER, int(failure.peer.removeprefix("rank ")))
        self._watch.hang_up()
        with self._lock:
            buckets = list(self._buckets)
            self._buckets.clear()
        self._previous = self._following = None
        try:
            self._all_let_go = self._worker.close(buckets)
        finally:
            self._watch.close()


@contextlib.contextmanager
def _lost(*, previous: bool) -> Iterator[None]:
    try:
        yield
    except libucx.load().UCXError as error:
        raise _Lost(str(error), previous=previous) from error


@contextlib.contextmanager
def _worker(device: torch.device, ports: tuple[int, int] | None = None) -> Iterator[libucx.Worker]:
    """A worker, which whoever takes it closes; here only after an error."""
    worker = libucx.Worker(device, ports)
    try:
        yield worker
    except BaseException:
        worker.close()
        raise


@contextlib.contextmanager
def _closed_on_error(connections: dict[int, socket.socket]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise


def _write(connection: socket.socket, address: bytes) -> None:
    with contextlib.suppress(OSError):  # of one that is gone, which is found by reading
        connection.settimeout(1)  # a few bytes, on a connection that is empty
        connection.sendall(_LENGTH.pack(len(address)) + address)


def _read(connection: socket.socket, deadline: float, rank: int) -> bytes:
    """The UCX address that a member tells."""
    (size,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size, deadline, rank))
    return _read_exactly(connection, size, deadline, rank)


def _read_exactly(connection: socket.socket, size: int, deadline: float, rank: int) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            piece = connection.recv(size - len(data))
        except TimeoutError as error:
            raise TransportTimeout("the group did not form in time", f"rank {rank}") from error
        except OSError:
            piece = b""
        if not piece:
            raise TransportError(f"rank {rank} left before the group stood", f"rank {rank}")
        data += piece
    return data

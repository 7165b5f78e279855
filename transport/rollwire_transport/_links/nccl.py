"""NCCL: from GPU to GPU, a broadcast from rank 0 to all, in a communicator of its own.

Each member has a GPU of its own (to try things out, members with an ``NCCL_HOSTID`` each can share
one: bytes go by sockets then). Buckets are staged on it: packing and unpacking have a stream,
broadcasts another one, so that neither holds up what else the device does. NCCL does not notice
when a peer on the same machine dies, and cannot say who is frozen: the connections of ``control``
can. NCCL picks the network interface itself (``NCCL_SOCKET_IFNAME``); the meeting's address is for
these connections alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollwire_transport._errors import TransportError, TransportTimeout
from rollwire_transport._links import libnccl
from rollwire_transport._links.base import Availability, Link, Rendezvous, Transfer
from rollwire_transport._links.control_channel import CARD_BYTES, Gathering, Lines, Signal, call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from rollwire_transport._links.listener import ListenOptions

logger = logging.getLogger(__name__)

_SPIN_SECONDS = 0.0002  # what most waits take; longer ones sleep in between
_POLL_SECONDS = 0.00005
_LAUNCH_SECONDS = 10.0  # for NCCL to put an operation on a stream, which waits for nobody
_ABORT_SECONDS = 10.0  # for NCCL to let go of a group


def available(listen: ListenOptions) -> Availability:
    """Whether there is a GPU, and torch's NCCL, and it can listen there."""
    if torch.version.cuda is None:
        return Availability(ok=False, reason="this build of torch has no CUDA")
    if not torch.cuda.is_available():
        return Availability(ok=False, reason="torch finds no CUDA device here")
    try:
        libnccl.load()
    except (OSError, AttributeError) as error:
        return Availability(ok=False, reason=f"NCCL cannot be loaded: {error}")
    problem = listen.needs_no_host("nccl", "NCCL_SOCKET_IFNAME")
    problem = problem or listen.needs_system_ports("nccl")
    return Availability(ok=not problem, reason=problem)


def open_rendezvous(
    *, epoch: str, world_size: int, host: str, port: int, device: torch.device
) -> Rendezvous:
    """See ``links.open_rendezvous``; without a CUDA device, buckets take the current one."""
    return _NcclRendezvous(epoch, world_size, host, port, _cuda(device))


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
    """See ``links.join``; without a CUDA device, buckets take the current one."""
    del listen  # see ``available``
    deadline = time.monotonic() + timeout
    device = _cuda(device)
    lines, ticket = call(epoch, rank, world_size, rendezvous, _card(device), timeout, closed)
    return _stand(lines, rank, world_size, epoch, ticket, device, deadline, closed)


class _NcclRendezvous(Rendezvous):
    def __init__(
        self, epoch: str, world_size: int, host: str, port: int, device: torch.device
    ) -> None:
        self._epoch = epoch
        self._world_size = world_size
        self._device = device
        self._closed = threading.Event()
        self._gathering = Gathering(epoch, world_size, host, port)
        self.address = self._gathering.address

    def form_group(self, timeout: float) -> Link:
        deadline = time.monotonic() + timeout
        lines = self._gathering.gather(_card(self._device), timeout)
        try:
            ticket = libnccl.unique_id()
        except libnccl.NcclError as error:
            lines.close()
            raise TransportError(f"NCCL cannot listen here: {error}") from error
        lines.start(ticket)
        return _stand(
            lines, 0, self._world_size, self._epoch, ticket, self._device, deadline, self._closed
        )

    def close(self) -> None:
        self._closed.set()
        self._gathering.close()


def _stand(
    lines: Lines,
    rank: int,
    world_size: int,
    epoch: str,
    ticket: bytes,
    device: torch.device,
    deadline: float,
    closed: threading.Event,
) -> Link:
    """Makes a link of a group whose members have all come; gives it up when ``closed`` is set."""
    link = _NcclLink(lines, rank, device, closed)
    try:
        link.stand(ticket, world_size, epoch, deadline)
    except BaseException:
        link.close()
        raise
    return link


class _NcclTransfer(Transfer):
    def __init__(self, link: _NcclLink, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._link = link

    def wait(self, timeout: float) -> None:
        self._link.land(self, time.monotonic() + timeout)


class _NcclLink(Link):
    """One end: a communicator, its streams, and the control connections.

    ``abort`` hands the communicator to a thread that may take as long as NCCL does; until that has
    ended, whatever was under way keeps its memory.
    """

    def __init__(
        self, lines: Lines, rank: int, device: torch.device, closed: threading.Event
    ) -> None:
        self.device = device
        self.upstream = "rank 0"
        self._lines = lines
        self._sends = rank == 0
        self._rank = rank
        self._closed = closed
        self._streams = _Streams.take(device)
        self._communicator: libnccl.Communicator | None = None
        self._under_way: list[_NcclTransfer] = []
        self._lock = threading.Lock()  # around the communicator, which abort takes away
        self._aborted = False
        self._reaper: threading.Thread | None = None
        self._patience = 0.0  # of close with the others, once this end has finished

    def stand(self, ticket: bytes, world_size: int, epoch: str, deadline: float) -> None:
        """Makes the communicator, and sees a first broadcast through it."""
        seal = hashlib.sha256(b"rollwire:" + epoch.encode()).digest()
        with torch.cuda.device(self.device), self._errors():
            self._communicator = libnccl.Communicator(ticket, self._rank, world_size)
            self._await(self._ready, deadline, "NCCL did not form the group in time")
            sent = seal if self._sends else bytes(len(seal))
            mark = torch.tensor(list(sent), dtype=torch.uint8, device=self.device)
            self._streams.broadcasts.wait_stream(torch.cuda.current_stream(self.device))
            self.land(self._post((mark,), deadline), deadline)
            if bytes(mark.tolist()) != seal:
                raise TransportError("the group's first broadcast came with another's bytes")
            if self._sends:
                self._await(
                    lambda: self._lines.fewest_steps > 0, deadline, "the group did not stand"
                )
        self._closed = threading.Event()  # the meeting's end is not that of the link

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return self._lane()

    @contextlib.contextmanager
    def _lane(self) -> Iterator[None]:
        stream = self._streams.packing
        stream.wait_stream(torch.cuda.default_stream(self.device))
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                # Never waits for a peer: the packing stream has no broadcasts to wait for.
                stream.synchronize()

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        with self._errors():
            self._streams.broadcasts.wait_stream(torch.cuda.current_stream(self.device))
        return self._post((header, payload), time.monotonic() + _LAUNCH_SECONDS)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        transfer = self._post((header, payload), time.monotonic() + _LAUNCH_SECONDS)
        self._lines.signal(Signal.STEP)
        return transfer

    def land(self, transfer: _NcclTransfer, deadline: float) -> None:
        """Waits for a transfer; see ``Transfer.wait``."""
        with self._errors():
            self._await(transfer.done.query, deadline, "a bucket did not move in time")
        if self._aborted:  # which ends what is under way, as if it were done
            raise _aborted()
        with contextlib.suppress(ValueError):  # given up at this moment
            self._under_way.remove(transfer)
        if not self._sends:
            self._lines.signal(Signal.STEP)

    def finish(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._errors():
            if self._sends:
                self._await(lambda: self._lines.finished, deadline, "the group did not finish")
            else:
                self._check()
                self._lines.signal(Signal.FINISHED)
        self._patience = timeout

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._reaper = threading.Thread(
                target=self._reap, args=(self._communicator,), name="rollwire-nccl", daemon=True
            )
            self._communicator = None
            self._reaper.start()
        self._lines.hang_up()

    def close(self) -> bool:
        if not self._sends:
            # What this end maps for its peers stays until all have finished.
            deadline = time.monotonic() + self._patience
            while not (self._aborted or self._lines.over) and time.monotonic() < deadline:
                self._lines.read()
                time.sleep(_POLL_SECONDS * 100)
        self.abort()
        if self._reaper is not None:
            self._reaper.join(_ABORT_SECONDS)
            if self._reaper.is_alive():
                logger.warning("NCCL has not let go of a group for %g s", _ABORT_SECONDS)
        self._lines.close()
        return not self._under_way

    def _post(self, tensors: tuple[Tensor, ...], deadline: float) -> _NcclTransfer:
        stream = self._streams.broadcasts
        runs = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        with self._errors():  # where the device is the current one: in a lane, or ``stand``
            transfer = _NcclTransfer(self, tensors)
            self._under_way.append(transfer)
            with self._lock:
                if self._communicator is None:
                    raise _aborted()
                self._communicator.broadcast(runs, stream.cuda_stream)
            self._await(self._ready, deadline, "NCCL did not begin a broadcast in time")
            transfer.done.record(stream)
        return transfer

    def _ready(self) -> bool:
        with self._lock:
            if self._communicator is None:
                raise _aborted()
            return self._communicator.ready()

    def _await(self, done: Callable[[], bool], deadline: float, late: str) -> None:
        began = time.monotonic()
        while not done():
            self._check()
            now = time.monotonic()
            if now >= deadline:
                raise self._timeout(late)
            time.sleep(0 if now - began < _SPIN_SECONDS else _POLL_SECONDS)

    def _check(self) -> None:
        if self._aborted or self._closed.is_set():
            raise _aborted()
        self._lines.check()
        self._ready()

    def _timeout(self, late: str) -> TransportTimeout:
        if not self._sends:
            self._lines.signal(Signal.LATE)
            return TransportTimeout(late, "rank 0")
        laggard = self._lines.laggard
        return TransportTimeout(f"{late}{f': {laggard} is behind' if laggard else ''}", laggard)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns what NCCL and CUDA report into ours; a peer that left meanwhile is the reason."""
        try:
            yield
        except (libnccl.NcclError, RuntimeError) as error:
            self._lines.blame(lambda: self._aborted)
            if self._aborted:
                raise _aborted() from error
            raise TransportError(f"NCCL failed: {error}") from error

    def _reap(self, communicator: libnccl.Communicator | None) -> None:
        try:
            with torch.cuda.device(self.device):
                if communicator is not None:
                    communicator.abort()
                self._streams.broadcasts.synchronize()
        except RuntimeError:
            logger.exception("the device failed while a group was given up")
        else:
            self._under_way.clear()
            self._streams.give_back()


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """The streams of a link. They are used again: torch keeps memory for each stream apart."""

    packing: torch.cuda.Stream
    broadcasts: torch.cuda.Stream

    @classmethod
    def take(cls, device: torch.device) -> _Streams:
        """Streams that no other link uses."""
        try:
            return _idle.setdefault(device, []).pop()
        except IndexError:
            # What waits for a peer must not hold up others. Torch hands out its few streams of each
            # priority in turn, and hardly anybody takes one of high priority.
            streams = [torch.cuda.Stream(device, priority) for priority in (0, -1)]  # type: ignore[no-untyped-call]
            return cls(*streams)

    def give_back(self) -> None:
        """For the next link."""
        _idle[self.packing.device].append(self)


_idle: dict[torch.device, list[_Streams]] = {}


def _cuda(device: torch.device) -> torch.device:
    index = device.index if device.type == "cuda" else None
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _card(device: torch.device) -> bytes:
    """Tells GPUs apart; one GPU counts as two where ``NCCL_HOSTID`` tells NCCL of two hosts."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    told = f"{os.environ.get('NCCL_HOSTID', '')} {uuid}"
    return hashlib.sha256(told.encode()).digest()[:CARD_BYTES]


def _aborted() -> TransportError:
    return TransportError("the link was aborted or closed at this end")

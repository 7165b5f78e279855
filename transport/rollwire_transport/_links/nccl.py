"""NCCL: from GPU to GPU, a broadcast from rank 0 to all, in a communicator of its own.

Each member has a GPU of its own. (For tests, members with different ``NCCL_HOSTID`` can share one;
bytes then go over sockets.) Buckets are staged on it. Packing and unpacking have one stream and
broadcasts another one, so that neither holds up other work on the device. NCCL does not notice when
a peer on the same machine dies, and cannot say who is frozen: who drives the group has to. NCCL
picks the network interface itself (``NCCL_SOCKET_IFNAME``).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from rollwire_transport._concurrency import BROADCAST_STREAMS, PACKING_STREAMS, packing_context
from rollwire_transport._errors import TransportError, TransportTimeout, UnsuitableDevices
from rollwire_transport._links import libnccl
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions

logger = logging.getLogger(__name__)

_SPIN_SECONDS = 0.0002  # most waits are this short; longer ones sleep in between
_POLL_SECONDS = 0.00005
_LAUNCH_SECONDS = 10.0  # for NCCL to queue an operation on a stream, which waits for nobody
_ABORT_SECONDS = 10.0  # for NCCL to free a group


class NcclBackend(Backend):
    name = "nccl"
    cpu_preference, gpu_preference = 2, 1

    def unavailable_reason(self, listen: ListenOptions) -> str:
        if torch.version.cuda is None:
            return "this build of torch has no CUDA"
        if not torch.cuda.is_available():
            return "torch finds no CUDA device here"
        try:
            libnccl.load()
        except (OSError, AttributeError) as error:
            return f"NCCL cannot be loaded: {error}"
        return listen.fixed_host_problem(
            "nccl", "NCCL_SOCKET_IFNAME"
        ) or listen.ephemeral_ports_problem("nccl")

    def bucket_device(self, device: torch.device) -> torch.device:
        """The device with its index; for tensors elsewhere, the current CUDA device."""
        index = device.index if device.type == "cuda" else None
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def open(self, member: GroupMember) -> Link:
        return _NcclLink(member)


class _NcclTransfer(Transfer):
    def __init__(self, link: _NcclLink, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors
        self.done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._link = link

    def wait(self, timeout: float) -> None:
        self._link.wait_for(self, time.monotonic() + timeout)


class _NcclLink(Link):
    """One end of a communicator.

    Aborting leaves the communicator to a thread, since NCCL may take a while to free it. Until that
    has ended, what was in flight keeps its memory.
    """

    def __init__(self, member: GroupMember) -> None:
        self.device = member.device
        self.answer = _device_id(member.device)
        self._member = member
        self._sends = member.rank == 0
        self._unique_id = b""
        self._packing_stream = PACKING_STREAMS.acquire(member.device)
        self._broadcast_stream = BROADCAST_STREAMS.acquire(member.device)
        self._communicator: libnccl.Communicator | None = None
        self._in_flight: list[_NcclTransfer] = []
        self._waiting = False
        self._lock = threading.Lock()  # guards the communicator, which abort takes away
        self._aborted = False
        self._cleanup: threading.Thread | None = None

    @property
    def waits_for(self) -> int | None:
        return None if self._sends or not self._waiting else 0

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        owners = {self.answer: 0}
        for rank, device_id in sorted(answers.items()):
            if owners.setdefault(device_id, rank) != rank:
                raise UnsuitableDevices(
                    f"rank {rank} is on the GPU of another member, and each needs its own: use "
                    "ucx, or gloo",
                    rank,
                )
        try:
            self._unique_id = libnccl.unique_id()
        except libnccl.NcclError as error:
            raise TransportError(f"NCCL cannot listen here: {error}") from error
        return dict.fromkeys(answers, self._unique_id)

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        """Makes the communicator and waits for a first broadcast over it."""
        deadline = time.monotonic() + timeout
        unique_id = self._unique_id if self._sends else offer
        if len(unique_id) != libnccl.UNIQUE_ID_BYTES:
            raise TransportError(f"rank 0 sent {len(offer)} bytes for NCCL's unique id", 0)
        seal = hashlib.sha256(b"rollwire:" + self._member.epoch.encode()).digest()
        with torch.cuda.device(self.device), self._errors():
            member = self._member
            with self._lock:
                if self._aborted:
                    raise link_aborted()
                self._communicator = libnccl.Communicator(unique_id, member.rank, member.world_size)
            self._await(self._ready, deadline, "NCCL did not form the group in time")
            sent = seal if self._sends else bytes(len(seal))
            mark = torch.tensor(list(sent), dtype=torch.uint8, device=self.device)
            self._broadcast_stream.wait_stream(torch.cuda.current_stream(self.device))
            self.wait_for(self._post((mark,), deadline), deadline)
            if bytes(mark.tolist()) != seal:
                raise TransportError("the group's first broadcast has unexpected bytes")

    def stream_context(self) -> contextlib.AbstractContextManager[None]:
        # Its end never waits for a peer: the packing stream does not wait for broadcasts.
        return packing_context(self._packing_stream)

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        with self._errors():
            self._broadcast_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._post((header, payload), time.monotonic() + _LAUNCH_SECONDS)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return self._post((header, payload), time.monotonic() + _LAUNCH_SECONDS)

    def wait_for(self, transfer: _NcclTransfer, deadline: float) -> None:
        with self._errors():
            self._await(transfer.done.query, deadline, "a bucket did not move in time")
        if self._aborted:  # which ends what is in flight as if it were done
            raise link_aborted()
        with contextlib.suppress(ValueError):  # aborted at this moment
            self._in_flight.remove(transfer)

    def abort(self) -> None:
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self._cleanup = threading.Thread(
                target=self._free, args=(self._communicator,), name="rollwire-nccl", daemon=True
            )
            self._communicator = None
            self._cleanup.start()

    def close(self) -> bool:
        self.abort()
        if self._cleanup is not None:
            self._cleanup.join(_ABORT_SECONDS)
            if self._cleanup.is_alive():
                logger.warning("NCCL has not freed a group within %g s", _ABORT_SECONDS)
        return not self._in_flight

    def _post(self, tensors: tuple[Tensor, ...], deadline: float) -> _NcclTransfer:
        stream = self._broadcast_stream
        runs = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        with self._errors():  # the device is the current one: see ``stream_context``, ``connect``
            transfer = _NcclTransfer(self, tensors)
            with self._lock:
                if self._communicator is None:
                    raise link_aborted()
                self._in_flight.append(transfer)
                self._communicator.broadcast(runs, stream.cuda_stream)
            self._await(self._ready, deadline, "NCCL did not begin a broadcast in time")
            transfer.done.record(stream)
        return transfer

    def _ready(self) -> bool:
        with self._lock:
            if self._communicator is None:
                raise link_aborted()
            return self._communicator.ready()

    def _await(self, done: Callable[[], bool], deadline: float, late: str) -> None:
        began = time.monotonic()
        self._waiting = True
        try:
            while not done():
                if self._aborted:
                    raise link_aborted()
                self._ready()
                now = time.monotonic()
                if now >= deadline:
                    raise TransportTimeout(late, self.waits_for)
                time.sleep(0 if now - began < _SPIN_SECONDS else _POLL_SECONDS)
        finally:
            self._waiting = False

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turns errors of NCCL and CUDA into ours."""
        try:
            yield
        except (libnccl.NcclError, RuntimeError) as error:
            if self._aborted:
                raise link_aborted() from error
            raise TransportError(f"NCCL failed: {error}") from error

    def _free(self, communicator: libnccl.Communicator | None) -> None:
        try:
            with torch.cuda.device(self.device):
                if communicator is not None:
                    communicator.abort()
                self._broadcast_stream.synchronize()
        except RuntimeError:
            logger.exception("the device failed while a group was aborted")
        else:
            self._in_flight.clear()
            PACKING_STREAMS.release(self._packing_stream)
            BROADCAST_STREAMS.release(self._broadcast_stream)


def _device_id(device: torch.device) -> bytes:
    """Tells GPUs apart, and hosts as ``NCCL_HOSTID`` does."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.sha256(f"{os.environ.get('NCCL_HOSTID', '')} {uuid}".encode()).digest()[:16]


BACKEND = NcclBackend()

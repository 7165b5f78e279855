"""CUDA IPC: for processes on one GPU. Receivers copy out of the sender's buffers, on the GPU.

Rank 0 has a TCP connection with each receiver. It says in which buffer a bucket lies, a receiver
copies it and says so, and the buffer is free again. The buffers are opened once, and stay for the
next update. Each member notices at once when another one dies, as its connection ends.

Processes with PID or IPC namespaces of their own cannot share memory: a receiver tries while it
connects, and rank 0 learns of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import torch

from rollwire_transport._concurrency import PACKING_STREAMS, packing_context
from rollwire_transport._errors import TransportError, TransportTimeout, UnsuitableDevices
from rollwire_transport._links import libcudart
from rollwire_transport._links.base import Backend, Link, Transfer, link_aborted, sealed, unsealed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor

    from rollwire_transport._links.base import GroupMember, ListenOptions

logger = logging.getLogger(__name__)

_OFFER = struct.Struct("<H")  # port; the host follows
_HELLO = struct.Struct("<I32s")  # rank, proof that it is a member
_MEMORY = struct.Struct(f"<cIQ{libcudart.HANDLE_BYTES}s")  # "m", number, size, handle
_BUCKET = struct.Struct("<cIQ32s")  # "b", number of its memory, size, header
_COPIED, _CANNOT = b"c", b"x"
_PROBE_BYTES = 64
_POLL_SECONDS = 0.05  # between two looks whether it was aborted
_HELLO_SECONDS = 0.5  # for a member that has connected to say who it is
_CLOSE_SECONDS = 5.0  # for the others to close what they have opened


class CudaIpcBackend(Backend):
    name = "cuda_ipc"
    cpu_preference, gpu_preference = 3, -1

    def unavailable_reason(self, listen: ListenOptions) -> str:
        del listen  # receivers do not listen
        if not torch.cuda.is_available():
            return "torch finds no CUDA device here"
        try:
            libcudart.load()
        except (OSError, AttributeError) as error:
            return f"the CUDA runtime cannot be loaded: {error}"
        return ""

    def bucket_device(self, device: torch.device) -> torch.device:
        """The device with its index; for tensors elsewhere, the current CUDA device."""
        index = device.index if device.type == "cuda" else None
        return torch.device("cuda", torch.cuda.current_device() if index is None else index)

    def open(self, member: GroupMember) -> Link:
        return _SendingLink(member) if member.rank == 0 else _ReceivingLink(member)


class _CudaIpcTransfer(Transfer):
    def __init__(self, work: Callable[[float], None]) -> None:
        self._work = work

    def wait(self, timeout: float) -> None:
        self._work(time.monotonic() + timeout)


class _CudaIpcLink(Link):
    """What both ends have in common: connections, and a stream of their own."""

    def __init__(self, member: GroupMember) -> None:
        self.device = member.device
        self._member = member
        self._stream = PACKING_STREAMS.acquire(member.device)
        self._aborted = False
        self._closed = False
        self._lock = threading.Lock()  # guards what follows
        self._sockets: dict[int, socket.socket] = {}  # by the ranks at their other ends
        self._waits_for: int | None = None

    @property
    def header_device(self) -> torch.device:
        return torch.device("cpu")

    def stream_context(self) -> AbstractContextManager[None]:
        return packing_context(self._stream)

    @property
    def waits_for(self) -> int | None:
        return self._waits_for

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)  # not for reading: see ``_release``

    def close(self) -> bool:
        self.abort()
        if not self._closed:
            self._closed = True
            with torch.cuda.device(self.device):
                self._stream.synchronize()
                self._release()
            for connection in self._sockets.values():
                connection.close()
            PACKING_STREAMS.release(self._stream)
        return True

    def _release(self) -> None:
        raise NotImplementedError

    def _keep(self, rank: int, connection: socket.socket) -> None:
        with self._lock:
            self._sockets[rank] = connection
            if self._aborted:
                raise link_aborted()

    def _transmit(self, rank: int, data: bytes) -> None:
        try:
            self._sockets[rank].sendall(data)
        except OSError as error:
            raise self._lost(rank, error) from error

    def _read(self, rank: int, size: int, deadline: float) -> bytes:
        connection, data = self._sockets[rank], b""
        self._waits_for = rank
        try:
            while len(data) < size:
                if self._aborted:
                    raise link_aborted()
                if (left := deadline - time.monotonic()) <= 0:
                    raise TransportTimeout(f"a bucket did not move in time: rank {rank}", rank)
                connection.settimeout(min(left, _POLL_SECONDS))
                with contextlib.suppress(TimeoutError):
                    if not (more := connection.recv(size - len(data))):
                        raise ConnectionError("it has closed its connection")
                    data += more
        except OSError as error:
            raise self._lost(rank, error) from error
        finally:
            self._waits_for = None
        return data

    def _lost(self, rank: int, error: OSError) -> TransportError:
        if self._aborted:
            return link_aborted()
        return TransportError(f"rank {rank} was lost: {error}", rank)


class _SendingLink(_CudaIpcLink):
    """Rank 0's end. Its buffers stay for the next update; one that is too small is left alone."""

    def __init__(self, member: GroupMember) -> None:
        super().__init__(member)
        self.answer = _device_id(member.device)
        self._listener: socket.socket | None = None
        self._memories: list[tuple[libcudart.SharedMemory, Tensor]] = []
        self._lent: dict[int, int] = {}  # by address: the number of the memory

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        for rank in sorted(answers):
            if unsealed(self._member.epoch, answers[rank], rank) != self.answer:
                raise UnsuitableDevices(
                    f"rank {rank} is not on the GPU of the trainer: use another backend", rank
                )
        host = self._member.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"cannot listen at {host}: {error}") from error
        port = self._listener.getsockname()[1]
        return dict.fromkeys(answers, sealed(self._member.epoch, _OFFER.pack(port) + host.encode()))

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        del offer
        deadline = time.monotonic() + timeout
        assert self._listener is not None  # noqa: S101 - ``offers`` comes first
        with self._listener:
            while len(self._sockets) < self._member.world_size - 1:
                self._accept(self._listener, deadline)
        with torch.cuda.device(self.device):
            self.buffer(_PROBE_BYTES)
        for rank in self._sockets:
            if self._read(rank, 1, deadline) != _COPIED:
                raise UnsuitableDevices(
                    f"rank {rank} cannot open this process's memory on the GPU: CUDA IPC needs "
                    "the same PID and IPC namespaces",
                    rank,
                )
        self._lent.clear()

    def _accept(self, listener: socket.socket, deadline: float) -> None:
        if self._aborted:
            raise link_aborted()
        if (left := deadline - time.monotonic()) <= 0:
            raise TransportTimeout("a receiver did not connect in time")
        listener.settimeout(min(left, _POLL_SECONDS))
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            rank = _rank_of(connection, self._member.epoch)
            if rank is None or rank in self._sockets:
                connection.close()  # a stranger
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._keep(rank, connection)

    def buffer(self, nbytes: int) -> Tensor:
        lent = set(self._lent.values())
        for number, (_, tensor) in enumerate(self._memories):
            if number not in lent and nbytes <= tensor.numel():
                break
        else:
            number = len(self._memories)
            tensor = self._allocate(number, nbytes)
        self._lent[tensor.data_ptr()] = number
        return tensor[:nbytes]

    def _allocate(self, number: int, nbytes: int) -> Tensor:
        try:
            with torch.cuda.device(self.device):
                memory = libcudart.SharedMemory.allocate(nbytes)
                tensor = memory.tensor()
                self._memories.append((memory, tensor))
                handle = memory.handle()
        except libcudart.CudaError as error:
            raise TransportError(f"no memory that other processes can open: {error}") from error
        for rank in self._sockets:
            self._transmit(rank, _MEMORY.pack(b"m", number, nbytes, handle))
        return tensor

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        if (number := self._lent.get(payload.data_ptr())) is None:
            number = self._lent[(buffer := self.buffer(payload.numel())).data_ptr()]
            buffer.copy_(payload)
        numbers = header.tolist()
        torch.cuda.current_stream(self.device).synchronize()
        message = _BUCKET.pack(b"b", number, payload.numel(), struct.pack("<4q", *numbers))
        for rank in self._sockets:
            self._transmit(rank, message)
        return _CudaIpcTransfer(self._wait_until_copied)

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        raise NotImplementedError("rank 0 sends")

    def _wait_until_copied(self, deadline: float) -> None:
        for rank in self._sockets:
            if self._read(rank, 1, deadline) != _COPIED:
                raise TransportError(f"rank {rank} sent what is no answer to a bucket", rank)

    def finish(self) -> None:
        super().finish()
        self._lent.clear()

    def _release(self) -> None:
        if self._listener is not None:
            self._listener.close()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for rank, connection in self._sockets.items():
            if not _closed_by_peer(connection, deadline):
                logger.warning(
                    "rank %d may still use this process's memory, %d MiB of which stay taken",
                    *(rank, sum(memory.nbytes for memory, _ in self._memories) >> 20),
                )
                return
        memories, self._memories = self._memories, []
        for memory, tensor in memories:
            del tensor
            memory.release()


class _ReceivingLink(_CudaIpcLink):
    """A receiver's end."""

    def __init__(self, member: GroupMember) -> None:
        super().__init__(member)
        self.answer = sealed(member.epoch, _device_id(member.device))
        self._memories: dict[int, tuple[libcudart.SharedMemory, Tensor]] = {}

    def offers(self, answers: Mapping[int, bytes]) -> dict[int, bytes]:
        raise NotImplementedError("rank 0 makes offers")

    def connect(self, timeout: float, offer: bytes = b"") -> None:
        deadline = time.monotonic() + timeout
        data = unsealed(self._member.epoch, offer, 0)
        (port,), host = _OFFER.unpack_from(data), data[_OFFER.size :].decode()
        try:
            connection = socket.create_connection((host, port), timeout)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            raise TransportError(f"rank 0 cannot be reached: {error}", 0) from error
        self._keep(0, connection)
        rank = self._member.rank
        self._transmit(0, _HELLO.pack(rank, _proof(self._member.epoch, rank)))
        self._read(0, 1, deadline)  # of the first memory
        try:
            self._open(deadline)
        except libcudart.CudaError as error:
            self._transmit(0, _CANNOT)
            raise TransportError(f"rank 0's memory cannot be opened here: {error}", 0) from error
        self._transmit(0, _COPIED)

    def send(self, header: Tensor, payload: Tensor) -> Transfer:
        raise NotImplementedError("rank 0 alone sends")

    def receive(self, header: Tensor, payload: Tensor) -> Transfer:
        return _CudaIpcTransfer(lambda deadline: self._copy(header, payload, deadline))

    def _open(self, deadline: float) -> None:
        rest = self._read(0, _MEMORY.size - 1, deadline)
        _, number, nbytes, handle = _MEMORY.unpack(b"m" + rest)
        with torch.cuda.device(self.device):
            memory = libcudart.SharedMemory.open(handle, nbytes)
            self._memories[number] = memory, memory.tensor()

    def _copy(self, header: Tensor, payload: Tensor, deadline: float) -> None:
        while (kind := self._read(0, 1, deadline)) == b"m":
            try:
                self._open(deadline)
            except libcudart.CudaError as error:
                raise TransportError(f"rank 0's memory cannot be opened: {error}", 0) from error
        rest = self._read(0, _BUCKET.size - 1, deadline)
        _, number, nbytes, numbers = _BUCKET.unpack(kind + rest)
        header.copy_(torch.tensor(struct.unpack("<4q", numbers)))
        memory = self._memories.get(number)
        if kind != b"b" or memory is None or not payload.numel() == nbytes <= memory[1].numel():
            raise TransportError(
                f"rank 0 sent a bucket of {nbytes} bytes, expected were {payload.numel()}", 0
            )
        payload.copy_(memory[1][:nbytes], non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()
        self._transmit(0, _COPIED)

    def _release(self) -> None:
        memories, self._memories = self._memories, {}
        for memory, tensor in memories.values():
            del tensor
            memory.release()


def _device_id(device: torch.device) -> bytes:
    """Tells the GPUs of all machines apart."""
    return str(torch.cuda.get_device_properties(device).uuid).encode()


def _proof(epoch: str, rank: int) -> bytes:
    return hashlib.sha256(f"rollwire:{epoch}:{rank}".encode()).digest()


def _rank_of(connection: socket.socket, epoch: str) -> int | None:
    """The rank of the member that has connected; None if it is none, or does not say so at once."""
    data = b""
    try:
        connection.settimeout(_HELLO_SECONDS)
        while len(data) < _HELLO.size:
            if not (more := connection.recv(_HELLO.size - len(data))):
                return None
            data += more
    except OSError:
        return None
    rank: int
    rank, proof = _HELLO.unpack(data)
    return rank if proof == _proof(epoch, rank) else None


def _closed_by_peer(connection: socket.socket, deadline: float) -> bool:
    """Whether the other end has released what it had opened, or is gone."""
    try:
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(4096):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


BACKEND = CudaIpcBackend()

"""What is used of ucxx: its blocking core. Its asynchronous layer needs the caller's event loop."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollwire_transport._errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
_EPOLL_MS = 100  # UCX wakes its thread when there is work; this is in case it does not
_RELEASE_SECONDS = 2.0  # for UCX to end what was in flight on a connection that was cut
_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS = 100_000_000, 10


class InFlight(Protocol):
    """Memory that UCX may read or write, until ``released``."""

    @property
    def released(self) -> bool: ...

    def forget(self) -> None:
        """Drops the requests, which belong to UCX."""


class Worker:
    """UCX for one link. A thread of UCX's own moves the bytes, without Python.

    It listens on one of ``ports``, from the first to the last. ``address`` is what others need to
    connect.
    """

    def __init__(self, device: torch.device, ports: tuple[int, int] | None = None) -> None:
        libucxx = load()
        options = {
            name: "1M"  # 8K by default, which costs TCP most of its speed
            for name in ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
            if f"UCX_{name}" not in os.environ
        }
        if ports is not None:
            options["TCP_PORT_RANGE"] = "{}-{}".format(*ports)
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        try:
            self._context = libucxx.UCXContext(options, feature_flags=features)
            self._worker = libucxx.UCXWorker(self._context, enable_delayed_submission=True)
            self.address: bytes = self._worker.address.tobytes()
        except libucxx.UCXError as error:
            raise TransportError(f"UCX cannot be used: {error}") from error
        self._endpoints: list[Any] = []
        if device.type == "cuda":
            self._worker.set_progress_thread_start_callback(torch.cuda.set_device, (device,))
        self._worker.start_progress_thread(polling_mode=False, epoll_timeout=_EPOLL_MS)

    def takes(self, device: torch.device) -> bool:
        return device.type == "cpu" or (device.type == "cuda" and self._context.cuda_support)

    def connect(self, address: bytes, rank: int) -> Any:
        """A connection to the worker of a rank; None without an address."""
        if not address:
            return None
        libucxx = load()
        try:
            endpoint = libucxx.UCXEndpoint.create_from_worker_address(
                self._worker,
                libucxx.UCXAddress.create_from_buffer(bytearray(address)),
                endpoint_error_handling=True,
            )
        except libucxx.UCXError as error:
            raise TransportError(f"rank {rank} cannot be reached: {error}", rank) from error
        self._endpoints.append(endpoint)
        return endpoint

    def close(self, in_flight: Sequence[InFlight] = ()) -> bool:
        """Frees everything; returns whether UCX has released the memory that is in flight.

        UCX crashes or leaks files if a connection is closed while it sends. But it handles dead
        peers, so TCP connections with requests in flight are cut first.
        """
        if in_flight:
            self._cut()
            _wait_until(lambda: not any(e.alive for e in self._endpoints) or _released(in_flight))
        for endpoint in self._endpoints:
            endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
        if all_released := _wait_until(lambda: _released(in_flight)):
            for memory in in_flight:
                memory.forget()
        else:
            logger.warning(
                "UCX has not released %d buckets: the memory that they lie in is kept",
                len(in_flight),
            )
            _kept.extend((self._worker, *in_flight))  # it may still write to them
        self._worker.stop_progress_thread()
        # Now, not when the last reference goes, which an error's traceback may hold.
        self._endpoints.clear()
        del self._worker, self._context
        return all_released

    def _cut(self) -> None:
        for file in _sockets(self._worker.epoll_file_descriptor):
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
                connection.getpeername()  # fails for one that listens
                connection.shutdown(socket.SHUT_RDWR)


_kept: list[object] = []


def _released(in_flight: Sequence[InFlight]) -> bool:
    return all(memory.released for memory in in_flight)


def _wait_until(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _RELEASE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _sockets(epoll: int) -> Iterator[int]:
    """The sockets that an epoll descriptor waits for, directly or through nested ones.

    UCX's thread closes files meanwhile; those are skipped.
    """
    try:
        lines = Path(f"/proc/self/fdinfo/{epoll}").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        name, _, rest = line.partition(":")
        if name != "tfd":
            continue
        file = int(rest.split()[0])
        try:
            kind = str(Path(f"/proc/self/fd/{file}").readlink())
        except OSError:
            continue
        if kind.startswith("socket:"):
            yield file
        elif "eventpoll" in kind:
            yield from _sockets(file)


@functools.cache
def load() -> Any:
    """The module; ImportError or OSError if it cannot be loaded."""
    # UCX would report variables that ucxx sets as misspelled, on standard output.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    from ucxx import libucxx

    return libucxx


def array(tensor: Tensor) -> Any:
    from ucxx._lib.arr import Array

    return Array(tensor.numpy() if tensor.device.type == "cpu" else tensor)

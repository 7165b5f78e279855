"""CUDA streams of this package's own, so that moving weights and other work do not wait for each
other.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")


class StreamPool:
    """Streams that nobody else uses.

    They are used again, since torch caches memory for each stream apart.
    """

    def __init__(self, priority: int) -> None:
        self._priority = priority
        self._idle: dict[torch.device, list[torch.cuda.Stream]] = {}

    def acquire(self, device: torch.device) -> torch.cuda.Stream:
        """Takes a stream of a device, given with its index."""
        try:
            return self._idle.setdefault(device, []).pop()
        except IndexError:
            return torch.cuda.Stream(device, self._priority)  # type: ignore[no-untyped-call]

    def release(self, stream: torch.cuda.Stream) -> None:
        self._idle.setdefault(stream.device, []).append(stream)


PACKING_STREAMS = StreamPool(priority=0)
# What waits for peers must hold up nobody else: torch hands out its few streams of each priority in
# turn, and hardly anybody takes one of high priority.
BROADCAST_STREAMS = StreamPool(priority=-1)
# A pool of its own: what a source allocates is cached for its stream, which must come back for the
# next update, even if links are closed in another order.
_SIDE_STREAMS = StreamPool(priority=-1)


@contextlib.contextmanager
def packing_context(stream: torch.cuda.Stream) -> Iterator[None]:
    """Makes ``stream`` the current one, after what was queued on the default and current streams.

    Waits at the end for what was queued within.
    """
    device = stream.device
    stream.wait_stream(torch.cuda.default_stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def on_side_stream(device: torch.device | None, work: Callable[[], T]) -> Callable[[], T]:
    """Wraps work for another thread so that it runs on a stream of its own.

    It begins after what this thread has queued on its current stream so far, and what it queues is
    done when it returns.

    A new thread begins on the first device and the default stream, which all threads share. There
    a gather and a collective of the trainer's own would wait for each other in the order in which
    they were queued, and two ranks that queue them in different orders would wait forever.

    Args:
        device: Where ``work`` finds its tensors. Unless it is CUDA, ``work`` is returned as it is.
        work: Called by any one thread, once.
    """
    if device is None or device.type != "cuda":
        return work
    current = torch.cuda.current_stream(device)
    queued = current.record_event()

    def run() -> T:
        stream = _SIDE_STREAMS.acquire(current.device)
        stream.wait_event(queued)
        try:
            with torch.cuda.stream(stream):
                return work()
        finally:
            stream.synchronize()
            _SIDE_STREAMS.release(stream)

    return run

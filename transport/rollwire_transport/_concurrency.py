"""Threads and CUDA streams that move weights, without holding up other work."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


T = TypeVar("T")
R = TypeVar("R")

SWITCH_SECONDS = 0.0005

# A program that ends waits this long for threads that are inside a library: before Python 3.14, one
# that returns to Python while the interpreter shuts down ends the process by SIGABRT, whatever it
# has achieved. What they wait for has a deadline, which is 30 s by default.
EXIT_SECONDS = 60.0


class _SwitchInterval:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0.0

    @contextlib.contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside the block, the threads of the process take turns every ``SWITCH_SECONDS``.

        A bucket needs the interpreter several times on its way. By default Python lets a thread
        that computes keep it for 5 ms each time; beside an engine or a trainer that would take
        longer than moving the bytes.
        """
        with self._lock:
            if not self._users:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SWITCH_SECONDS, self._before))
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    sys.setswitchinterval(self._before)


fast_thread_switching = _SwitchInterval().shortened


class DetachedWorker(Generic[T]):
    """Runs one job after another on an object, in a thread of its own.

    The thread drops the object in the end, which may block too. It is a daemon: if it never
    returns it keeps the process for ``EXIT_SECONDS`` at most.
    """

    def __init__(self, target: T, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[T], None] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=([target], self._jobs), name=name, daemon=True
        )
        self._thread.start()

    def submit(self, work: Callable[[T], R]) -> Future[R]:
        """Queues ``work``; cancelling its future skips it if it has not begun."""
        future: Future[R] = Future()

        def job(target: T) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(target)
            except BaseException as error:
                # Without its frames, which refer to the object.
                future.set_exception(error.with_traceback(None))
            else:
                future.set_result(result)

        self._jobs.put(job)
        return future

    def shut_down(self) -> None:
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        self._thread.join(max(timeout, 0))
        return not self._thread.is_alive()


_busy_threads: set[int] = set()


def _work(targets: list[T], jobs: SimpleQueue[Callable[[T], None] | None]) -> None:
    target, me = targets.pop(), threading.get_ident()
    while job := jobs.get():
        _busy_threads.add(me)
        job(target)
        del job  # and what it refers to, before the next one comes
        _busy_threads.discard(me)
    _busy_threads.add(me)
    del target
    _busy_threads.discard(me)


@atexit.register
def _wait_for_busy_threads() -> None:
    deadline = time.monotonic() + EXIT_SECONDS
    while _busy_threads and time.monotonic() < deadline:
        time.sleep(0.01)


class StreamPool:
    """CUDA streams for one user each, kept for reuse: torch caches memory for each stream."""

    def __init__(self, priority: int) -> None:
        self._priority = priority
        self._idle: dict[torch.device, list[torch.cuda.Stream]] = {}

    def acquire(self, device: torch.device) -> torch.cuda.Stream:
        try:
            return self._idle.setdefault(device, []).pop()
        except IndexError:
            return torch.cuda.Stream(device, self._priority)  # type: ignore[no-untyped-call]

    def release(self, stream: torch.cuda.Stream) -> None:
        self._idle.setdefault(stream.device, []).append(stream)


PACKING_STREAMS = StreamPool(priority=0)
# Work that waits for peers must not hold up other work. torch gives out its few streams of each
# priority in turn, and hardly anybody uses those of high priority.
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


def on_side_stream(
    device: torch.device | None, work: Callable[[], T], *, after_queued: bool = True
) -> Callable[[], T]:
    """Wraps work for another thread so that it runs on a stream of its own.

    What it queues is done when it returns.

    A new thread begins on the first device and the default stream, which all threads share. There
    a gather and a collective of the trainer's own would wait for each other in the order in which
    they were queued, and two ranks that queue them in different orders would wait forever.

    Args:
        device: Where ``work`` finds its tensors. Unless it is CUDA, ``work`` is returned as it is.
        work: Called by any one thread, once.
        after_queued: Whether it begins after what this thread has queued on its current stream so
            far.
    """
    if device is None or device.type != "cuda":
        return work
    current = torch.cuda.current_stream(device)
    queued = current.record_event() if after_queued else None

    def run() -> T:
        stream = _SIDE_STREAMS.acquire(current.device)
        if queued is not None:
            stream.wait_event(queued)
        try:
            with torch.cuda.stream(stream):
                return work()
        finally:
            stream.synchronize()
            _SIDE_STREAMS.release(stream)

    return run

"""Threads that move weights: switched to soon, and abandoned if a library does not return."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

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
        """Has the threads of the process take turns every ``SWITCH_SECONDS`` within.

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

    Args:
        target: The object. It is freed at the end only if nobody else refers to it.
        name: Of the thread.
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
        """Ends the thread after the jobs that are queued."""
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Returns whether the thread ended within ``timeout`` seconds."""
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

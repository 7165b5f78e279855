"""A thread for what may block beyond its time."""

from __future__ import annotations

import atexit
import threading
import time
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R")

EXIT_SECONDS = 60.0
"""A program that ends waits so long for threads that are within a library: one that comes back to
Python while the interpreter is taken apart ends the whole process by SIGABRT, whatever it has
achieved (before Python 3.14). What they wait for has a deadline, which is 30 s by default."""

_at_work: set[int] = set()  # threads


class Hand(Generic[T]):
    """Does one thing after another to an object, in a thread of its own.

    The thread lets go of the object in the end, which may take its time too. It is a daemon: what
    never comes back does not keep the process for longer than ``EXIT_SECONDS``.

    Args:
        held: The object. ``let_go`` can only give it back if nobody else keeps it.
        name: Of the thread.
    """

    def __init__(self, held: T, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[T], None] | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_work, args=([held], self._jobs), name=name, daemon=True
        )
        self._thread.start()

    def ask(self, work: Callable[[T], R]) -> Future[R]:
        """What ``work`` will have given; cancelling it skips what has not begun."""
        future: Future[R] = Future()

        def job(held: T) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(held)
            except BaseException as error:
                # Without its frames, which hold the object.
                future.set_exception(error.with_traceback(None))
            else:
                future.set_result(result)

        self._jobs.put(job)
        return future

    def let_go(self) -> None:
        """Ends the thread once it has done what it was asked to."""
        self._jobs.put(None)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended, within so many seconds."""
        self._thread.join(max(timeout, 0))
        return not self._thread.is_alive()


def _work(held: list[T], jobs: SimpleQueue[Callable[[T], None] | None]) -> None:
    one, me = held.pop(), threading.get_ident()
    while job := jobs.get():
        _at_work.add(me)
        job(one)
        del job  # with what it holds, before the next comes
        _at_work.discard(me)
    _at_work.add(me)
    del one
    _at_work.discard(me)


@atexit.register
def _let_them_come_back() -> None:
    give_up = time.monotonic() + EXIT_SECONDS
    while _at_work and time.monotonic() < give_up:
        time.sleep(0.01)

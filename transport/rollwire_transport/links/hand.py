"""A thread for what may block beyond its time."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
R = TypeVar("R")


class Hand(Generic[T]):
    """Does one thing after another to an object, in a thread of its own.

    The thread lets go of the object in the end, which may take its time too. It is a daemon: what
    never comes back does not keep the process.

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
    one = held.pop()
    while job := jobs.get():
        job(one)
        del job  # with what it holds, before the next comes

"""Blocking calls beside the event loop, in threads that can be abandoned.

A thread cannot be killed. One that hangs is left to itself; as a daemon it does not keep the
interpreter from exiting, as those of a ``ThreadPoolExecutor`` do.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Call(Generic[T]):
    """A call in another thread.

    Attributes:
        result: What it returns or raises. Cancelling it abandons the call: nobody learns how it
            ends.
        since: When it began on the monotonic clock; None before.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # So that asyncio does not log an exception that nobody awaits.
        self.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.since: float | None = None
        self._work = work

    def run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:
            self._report(functools.partial(self.result.set_exception, as_exception(error)))
        else:
            self._report(functools.partial(self.result.set_result, result))

    def _report(self, set_outcome: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.result.get_loop().call_soon_threadsafe(
                lambda: None if self.result.done() else set_outcome()
            )


def run_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``work`` in a thread of its own; cancelling the future abandons it."""
    call = Call(work)
    threading.Thread(target=call.run, name="rollwire-blocking", daemon=True).start()
    return call.result


class WorkerThread:
    """A thread that makes calls one after the other, in their order; started by the first.

    ``abandon`` leaves it to the call that it makes, and a new one goes on with the rest.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = self._new_queue()

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Has ``work`` called, within the context of now. Used from one event loop.

        Cancelling its ``result`` before it begins takes it back.
        """
        call = Call(functools.partial(contextvars.copy_context().run, work))
        if self._queue.closed:
            self._queue = self._new_queue()
        self._queue.put(call, self._name)
        return call

    def abandon(self, call: Call[T], error: Exception) -> None:
        """Gives up a call that has begun; its result is ``error``."""
        waiting = self._queue.close()
        if not call.result.done():
            call.result.set_exception(error)
        self._queue = self._new_queue()
        for other in waiting:
            self._queue.put(other, self._name)

    def close(self) -> None:
        """Ends the thread after its call, and cancels the others. Idempotent."""
        for call in self._queue.close():
            call.result.cancel()

    def _new_queue(self) -> _Queue:
        queue = _Queue()
        weakref.finalize(self, queue.close).atexit = False  # nobody submits any more
        return queue


class _Queue:
    """The calls of one thread, which holds this and not its owner: that can be collected."""

    def __init__(self) -> None:
        self.closed = False
        self._calls: deque[Call[Any]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, call: Call[Any], name: str) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()

    def close(self) -> list[Call[Any]]:
        """Lets the thread end; returns the calls that it has not begun."""
        with self._changed:
            self.closed = True
            calls, self._calls = list(self._calls), deque()
            self._changed.notify()
        return calls

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            call.run()
            del call  # and what it holds, before the next one comes

    def _next(self) -> Call[Any] | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._calls or self.closed)
                if self.closed:
                    return None
                call = self._calls.popleft()
                if not call.result.cancelled():
                    call.since = time.monotonic()
                    return call


def as_exception(error: BaseException) -> Exception:
    """What a future may have in place of what a caller's function raised: SystemExit and the like
    would end the event loop, CancelledError the task that awaits it, though nobody cancelled that;
    StopIteration is refused.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"it raised {error!r}")
    wrapped.__cause__ = error
    return wrapped

"""Blocking work beside the event loop, in threads that can be given up."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def run_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``work`` in a thread of its own; the future has what it returns or raises.

    A thread cannot be killed. Cancelling the future gives this one up: it goes on until ``work``
    ends, nobody learns how, and the interpreter does not wait for it at its exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            _tell(future, functools.partial(future.set_exception, as_exception(error)))
        else:
            _tell(future, functools.partial(future.set_result, result))

    threading.Thread(target=run, name="rollwire-blocking", daemon=True).start()
    return future


@dataclass(eq=False, slots=True)
class Call(Generic[T]):
    """A call that a ``WorkerThread`` makes.

    Attributes:
        result: What it returns or raises.
        since: When it began, or came further, on the monotonic clock; None before.
    """

    work: Callable[[], T]
    result: asyncio.Future[T]
    since: float | None = None


class WorkerThread:
    """A thread that makes calls one after the other, in their order; started by the first.

    A thread cannot be killed: ``abandon`` leaves it to the call that it makes, and a new one goes
    on with the rest. The interpreter does not wait for either at its exit.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = self._new_queue()

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Has it called, within the context of now. Used from one event loop.

        Cancelling its ``result`` before it begins takes it back; afterwards nobody learns of it.
        """
        call = Call(work, asyncio.get_running_loop().create_future())
        call.result.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # retrieved
        call.work = functools.partial(contextvars.copy_context().run, work)
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
    """What one thread has to do; shared with it, so that it does not keep its owner alive."""

    def __init__(self) -> None:
        self.closed = False
        self._calls: deque[Call[Any]] = deque()
        self._changed = threading.Condition()
        self._started = False

    def put(self, call: Call[Any], name: str) -> None:
        with self._changed:
            self._calls.append(call)
            self._changed.notify()
            if not self._started:
                self._started = True
                threading.Thread(target=self._serve, name=name, daemon=True).start()

    def close(self) -> list[Call[Any]]:
        """Lets the thread end; what it has not begun."""
        with self._changed:
            self.closed = True
            calls, self._calls = list(self._calls), deque()
            self._changed.notify()
        return calls

    def _serve(self) -> None:
        while (call := self._next()) is not None:
            try:
                result = call.work()
            except BaseException as error:
                told = as_exception(error)
                _tell(call.result, functools.partial(call.result.set_exception, told))
            else:
                _tell(call.result, functools.partial(call.result.set_result, result))
            del call

    def _next(self) -> Call[Any] | None:
        with self._changed:
            while True:
                while not self._calls and not self.closed:
                    self._changed.wait()
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
    told = RuntimeError(f"it raised {error!r}")
    told.__cause__ = error
    return told


def _tell(result: asyncio.Future[T], how: Callable[[], None]) -> None:
    """Says how a call ended, unless that is known."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        result.get_loop().call_soon_threadsafe(lambda: None if result.done() else how())

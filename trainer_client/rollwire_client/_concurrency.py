"""Blocking calls beside the event loop, tasks that end with their owner, and a loop in a thread.

A thread cannot be killed. One that hangs is left to itself; as a daemon it does not keep the
interpreter from exiting, as those of a ``ThreadPoolExecutor`` do.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rollwire_client._affinity import LoopAffinity
from rollwire_client._errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    Calls = queue.SimpleQueue["Call[Any] | None"]

T = TypeVar("T")

_LOOP_TIMEOUT = 30.0  # seconds for a loop's thread to start, and for what was cancelled to end


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
        self.since = time.monotonic()
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

    ``abandon`` leaves it to the call that it makes, and a new one goes on with the rest. Used from
    one event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls | None = None

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Has ``work`` called, within the context of now. Cancelling its ``result`` before it
        begins takes it back.
        """
        call = Call(functools.partial(contextvars.copy_context().run, work))
        self._put(call)
        return call

    def abandon(self, call: Call[T], error: Exception) -> None:
        """Gives up a call that has begun; its result is ``error``."""
        waiting = self._stop()
        if not call.result.done():
            call.result.set_exception(error)
        for other in waiting:
            self._put(other)

    def close(self) -> None:
        """Ends the thread after its call, and cancels the others. Idempotent."""
        for call in self._stop():
            call.result.cancel()

    def _put(self, call: Call[Any]) -> None:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            # The thread holds the queue and not this object: when nobody can submit any more, it
            # ends.
            weakref.finalize(self, self._calls.put, None).atexit = False
            threading.Thread(
                target=_make_calls, args=(self._calls,), name=self._name, daemon=True
            ).start()
        self._calls.put(call)

    def _stop(self) -> list[Call[Any]]:
        """Lets the thread end; returns the calls that it has not begun."""
        calls, self._calls = self._calls, None
        waiting = []
        if calls is not None:
            with contextlib.suppress(queue.Empty):
                while (call := calls.get_nowait()) is not None:
                    waiting.append(call)
            calls.put(None)
        return waiting


def _make_calls(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        if not call.result.cancelled():
            call.run()
        del call  # and what it holds, before the next one comes


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


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs, and waits for it; what it raises does not matter any more.

    Each task is cancelled once: it may need a while to clean up, undisturbed. When the caller is
    cancelled meanwhile, that is raised once all have ended.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await _wait(tasks)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs what has to be done, in bounded time; a cancellation is raised only after it."""
    task = asyncio.create_task(work)
    await _wait([task])
    return task.result()


async def _wait(tasks: list[asyncio.Task[Any]]) -> None:
    cancelled: asyncio.CancelledError | None = None
    while running := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved
    if cancelled is not None:
        raise cancelled


class LoopThread:
    """A thread that runs an event loop; a context manager, whose end cancels what still runs there.

    Any thread may call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread = threading.Thread()
        self._affinity: LoopAffinity | None = None

    def __enter__(self) -> Self:
        if self._affinity is not None:
            self._affinity.check_process()
            raise RuntimeError("this SyncFleet is open already")
        self._affinity = LoopAffinity("SyncFleet")
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        self._stop = asyncio.Event()

        async def run() -> None:
            started.set_result(asyncio.get_running_loop())
            await self._stop.wait()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(run()), name="rollwire-loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result(_LOOP_TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        if self._affinity is None or self._affinity.forked:
            return
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._stop.set)  # after the calls before it
        if loop is not None:
            self._thread.join(_LOOP_TIMEOUT)
        self._affinity = None

    def check(self) -> None:
        """Raises NotOpenHereError in a forked child, where the loop's thread is not."""
        if self._affinity is not None:
            self._affinity.check_process()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` in the loop, and returns its result or raises its error.

        An exception in the calling thread, such as KeyboardInterrupt, cancels the work, and is
        raised once that has ended.

        Raises:
            ClosedError: The loop does not run, or the work was cancelled there.
            NotOpenHereError: This is a forked child.
            RuntimeError: Called from the loop's own thread, which cannot wait for itself.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(asyncio.create_task(work))
            tasks[0].add_done_callback(functools.partial(_copy_outcome, future))

        try:
            loop = self._schedule(begin)
        except (ClosedError, RuntimeError):
            work.close()
            raise
        try:
            return future.result()
        finally:
            if not future.done():
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there
                    loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                    concurrent.futures.wait([future], _LOOP_TIMEOUT)

    def _schedule(self, function: Callable[[], None]) -> asyncio.AbstractEventLoop:
        self.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError("called within the event loop, which cannot wait for itself")
        with self._lock:
            if self._loop is None:
                raise ClosedError("it is not open: use it within `with`")
            self._loop.call_soon_threadsafe(function)
            return self._loop


def _copy_outcome(future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        future.set_exception(ClosedError("it was cancelled, or closed meanwhile"))
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())

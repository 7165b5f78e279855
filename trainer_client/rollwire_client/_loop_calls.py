"""Calls from other threads into an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from rollwire_client._concurrency import LoopAffinity, running_loop
from rollwire_client._errors import ClosedError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

_LOOP_TIMEOUT = 30.0  # seconds for a loop's thread to start, and for what was cancelled to end
_LOOP_CHECK_SECONDS = 1.0  # between two looks whether the loop of a call was closed


class LoopCalls:
    """Calls from any thread into an event loop that runs in another one.

    Args:
        loop: The loop; None while there is none.
        affinity: Of what is used there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None, affinity: LoopAffinity) -> None:
        self._lock = threading.Lock()
        self._loop = loop
        self._affinity = affinity
        self._submitted: set[_LoopWork[Any]] = set()
        self._watching = False

    def close(self) -> None:
        """Takes no more calls; the loop goes on."""
        with self._lock:
            self._loop = None

    def check_process(self) -> None:
        """Raises NotOpenHereError in a forked child, where the loop's thread is not."""
        self._affinity.check_process()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs ``work`` in the loop. Cancelling the future cancels it. If it is cancelled there, or
        the loop is closed before its end, the future has a ClosedError.
        """
        submitted = _LoopWork(work)
        loop = self._start(submitted)
        submitted.future.add_done_callback(
            lambda future: submitted.cancel(loop) if future.cancelled() else None
        )
        with self._lock:
            self._submitted.add(submitted)
            if not self._watching:
                self._watching = True
                threading.Thread(
                    target=self._watch, args=(loop,), name="rollwire-submitted", daemon=True
                ).start()
        return submitted.future

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs ``work`` in the loop, and returns its result or raises its error: ClosedError if it
        was cancelled there. An exception in the calling thread, such as KeyboardInterrupt, cancels
        the work, and is raised once that has ended.
        """
        called = _LoopWork(work)
        loop = self._start(called, waits=True)
        try:
            while not concurrent.futures.wait([called.future], _LOOP_CHECK_SECONDS).done:
                if loop.is_closed():
                    called.abandon()
            return called.future.result()
        finally:
            if not called.future.done():
                called.cancel(loop)
                concurrent.futures.wait([called.future], _LOOP_TIMEOUT)

    def _start(self, work: _LoopWork[T], *, waits: bool = False) -> asyncio.AbstractEventLoop:
        """Has ``work`` begun in the loop, and returns the loop. ``waits``: this thread waits for
        the work.
        """
        try:
            self.check_process()
            with self._lock:
                loop = self._running(waits=waits)
                loop.call_soon_threadsafe(work.begin)
                return loop
        except (ClosedError, RuntimeError):
            work.coroutine.close()
            raise

    def _running(self, *, waits: bool) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._loop.is_closed():
            raise ClosedError("it is not open: use it within `with`")
        if waits and self._loop is running_loop():
            raise RuntimeError(
                "called within the event loop, which cannot wait for itself: await the method "
                "of the async object there, or call this in another thread"
            )
        return self._loop

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what was submitted to a loop that was closed, which nobody else notices."""
        while True:
            with self._lock:
                self._submitted = {work for work in self._submitted if not work.future.done()}
                self._watching = bool(self._submitted)
                submitted = list(self._submitted)
            if not submitted:
                return
            concurrent.futures.wait([work.future for work in submitted], _LOOP_CHECK_SECONDS)
            if loop.is_closed():
                for work in submitted:
                    work.abandon()


class _LoopWork(Generic[T]):
    """A coroutine for an event loop that runs in another thread, and its outcome."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self.coroutine = coroutine
        self.future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._task: asyncio.Task[T] | None = None

    def begin(self) -> None:
        """Called in the loop."""
        if self.future.done():
            self.coroutine.close()
            return
        self._task = asyncio.create_task(self.coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.call_soon_threadsafe(lambda: self._task.cancel() if self._task else None)
        except RuntimeError:  # the loop is closed: nothing runs there
            self.abandon()

    def abandon(self) -> None:
        """The loop was closed."""
        if self._task is None:  # it took the work, and never ran again
            self.coroutine.close()
        self._set_error(ClosedError("the event loop of the fleet was closed meanwhile"))

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._set_error(ClosedError("it was cancelled, or closed meanwhile"))
        elif (error := task.exception()) is not None:
            self._set_error(error)
        else:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                self.future.set_result(task.result())

    def _set_error(self, error: BaseException) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            self.future.set_exception(error)


class LoopThread(LoopCalls):
    """A thread that runs an event loop, for calls from any thread. A context manager, whose end
    cancels what still runs there.
    """

    def __init__(self) -> None:
        super().__init__(None, LoopAffinity("SyncFleet", bound=False))
        self._stop = asyncio.Event()
        self._thread = threading.Thread()

    def __enter__(self) -> Self:
        self.check_process()
        if self._affinity.bound:
            raise RuntimeError("this SyncFleet is open already")
        self._affinity.bind()
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
        if self._affinity.forked:
            return
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._stop.set)  # after the calls before it
        if loop is not None:
            self._thread.join(_LOOP_TIMEOUT)
        self._affinity.release()

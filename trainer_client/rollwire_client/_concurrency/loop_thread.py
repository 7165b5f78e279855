"""An event loop in a thread of its own, for callers that are not async."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rollwire_client._concurrency.affinity import LoopAffinity
from rollwire_client._errors import ClosedError, NotOpenHereError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

_TIMEOUT = 30.0  # seconds for the thread to start, and for what was cancelled to end


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
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run(started)), name="rollwire-loop", daemon=True
        )
        self._thread.start()
        self._loop = started.result(_TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        if self._affinity is None or self._affinity.forked:
            return
        with self._lock:
            loop, self._loop = self._loop, None
            if loop is not None:
                loop.call_soon_threadsafe(self._stop.set)  # after the calls before it
        if loop is not None:
            self._thread.join(_TIMEOUT)
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
            self.check()
        except NotOpenHereError:
            work.close()
            raise
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("called within the event loop, which cannot wait for itself")
        with self._lock:
            if (loop := self._loop) is not None:
                loop.call_soon_threadsafe(begin)
        if loop is None:
            work.close()
            raise ClosedError("it is not open: use it within `with`")
        try:
            return future.result()
        finally:
            if not future.done():
                with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there
                    loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                    concurrent.futures.wait([future], _TIMEOUT)

    async def _run(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        started.set_result(asyncio.get_running_loop())
        await self._stop.wait()


def _copy_outcome(future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        future.set_exception(ClosedError("it was cancelled, or closed meanwhile"))
    elif (error := task.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())

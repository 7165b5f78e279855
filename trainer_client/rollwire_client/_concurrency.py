"""Which process, event loop, thread and task does something, and what ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import logging
import os
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from grpc._cython import cygrpc  # type: ignore[attr-defined]

from rollwire_client._errors import NotOpenHereError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    Calls = queue.SimpleQueue["Call[Any] | None"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
if _FORK_SUPPORT not in os.environ:
    # gRPC's own fork handlers start threads in the child, which work on the parent's connections:
    # children die, and messages of the parent are lost. gRPC reads the variable when it is
    # imported, and again after a reset; the value at its first use counts.
    os.environ[_FORK_SUPPORT] = "0"
    # Private to gRPC, and there from 1.80 to 1.85 at least. Without it the variable has an effect
    # only if gRPC was not imported before.
    getattr(cygrpc, "reset_grpc_config_vars", lambda: None)()

_grpc_objects: weakref.WeakSet[Any] = weakref.WeakSet()
_grpc_process: int | None = None  # which used gRPC first: this one or an ancestor


class LoopAffinity:
    """The process and the event loop in which ``name`` (as messages have it) was opened.

    A forked child has none of gRPC's threads; torch's DataLoader and ``multiprocessing`` fork by
    default on Linux. So a child must not touch the gRPC objects that it inherited, and cannot use
    gRPC itself once its parent has: whoever tries gets an error at once.
    """

    def __init__(self, name: str, *, bound: bool = True) -> None:
        self._name = name
        self._process: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        if bound:
            self.bind()

    def bind(self) -> None:
        self._process, self._loop = os.getpid(), running_loop()

    def release(self) -> None:
        """It was closed: anybody may open it."""
        self._process = self._loop = None

    @property
    def bound(self) -> bool:
        return self._process is not None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        return self._loop

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that opened it."""
        return self._process not in {None, os.getpid()}

    def check(self) -> None:
        """Raises NotOpenHereError in another process or event loop."""
        self.check_process()
        loop = running_loop()
        if loop is self._loop or loop is None or self._loop is None:
            return
        state = "has ended" if self._loop.is_closed() else "is not this one"
        raise NotOpenHereError(
            f"this {self._name} was opened in an event loop that {state}: open one in each "
            "asyncio.run and each thread, or use SyncFleet, which any thread may"
        )

    def check_process(self) -> None:
        if self.forked:
            raise NotOpenHereError(
                f"this {self._name} was opened in process {self._process}, of which process "
                f"{os.getpid()} is a fork: use it there; or start this process with "
                "multiprocessing's 'spawn' or 'forkserver' (DataLoader: "
                "multiprocessing_context='spawn'), and open one in it"
            )


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def use_grpc(item: Any) -> None:
    """Registers a channel, call or server of gRPC, which forked children must not end."""
    global _grpc_process
    if _grpc_process is None and os.environ.get(_FORK_SUPPORT, "").lower() in {"1", "true", "yes"}:
        logger.warning(
            "%s is on: gRPC's fork handlers kill forked children of a process with an open Fleet, "
            "and break its rollouts; leave it out, or set it to 0",
            _FORK_SUPPORT,
        )
    _grpc_process = os.getpid()
    _grpc_objects.add(item)


def check_grpc() -> None:
    """Raises NotOpenHereError in a forked child of a process that has used gRPC."""
    if _grpc_process is not None and _grpc_process != os.getpid():
        raise NotOpenHereError(
            f"process {os.getpid()} is a fork of process {_grpc_process}, which had connected to "
            "servers: no fork of it can. Start this process with multiprocessing's 'spawn' or "
            "'forkserver' (DataLoader: multiprocessing_context='spawn'), or before the first Fleet "
            "is opened"
        )


def _keep_untouched() -> None:
    """In a forked child: freeing or cancelling the copies would end those of the parent."""
    for item in _grpc_objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))  # never freed
        if hasattr(item, "cancel"):  # a call, whose tasks may be cancelled here
            item.cancel = _cancelled


def _cancelled() -> NoReturn:
    raise asyncio.CancelledError


os.register_at_fork(after_in_child=_keep_untouched)


class Call(Generic[T]):
    """A call in another thread. Cancelling its ``result`` abandons it: its end does not matter."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        # So that asyncio does not log an exception that nobody awaits.
        self.result.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.begun = False
        self._work = work

    def run(self) -> None:
        self.begun = True
        try:
            value = self._work()
        except BaseException as error:
            set_outcome = functools.partial(self.result.set_exception, as_exception(error))
        else:
            set_outcome = functools.partial(self.result.set_result, value)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.result.get_loop().call_soon_threadsafe(
                lambda: None if self.result.done() else set_outcome()
            )


def run_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``work`` in a thread of its own; cancelling the future abandons it.

    A thread cannot be killed. One that hangs is left to itself; as a daemon it does not keep the
    interpreter from exiting, as those of a ``ThreadPoolExecutor`` do.
    """
    call = Call(work)
    threading.Thread(target=call.run, name="rollwire-blocking", daemon=True).start()
    return call.result


class WorkerThread:
    """A thread that makes one call after the other, without waiting for the event loop in between;
    used from one event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Calls | None = None

    def submit(self, work: Callable[[], T]) -> Call[T]:
        """Has ``work`` called, within the context of now. Cancelling its ``result`` before it has
        begun takes it back.
        """
        call = Call(functools.partial(contextvars.copy_context().run, work))
        self._put(call)
        return call

    def abandon(self, call: Call[T], error: Exception) -> None:
        """Leaves the thread to a call that has begun, whose result is now ``error``; a new thread
        makes the other calls.
        """
        waiting = self._stop()
        if not call.result.done():
            call.result.set_exception(error)
        for other in waiting:
            self._put(other)

    def close(self) -> None:
        """Ends the thread after its call, and cancels the others. The next call starts another.
        Idempotent.
        """
        for call in self._stop():
            call.result.cancel()

    def _put(self, call: Call[Any]) -> None:
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            # The thread holds the queue, not this object: it ends when nobody can submit any more.
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
        if not call.result.done():
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


async def cancel_all(
    tasks: Iterable[asyncio.Task[Any]], timeout: float | None = None
) -> list[asyncio.Task[Any]]:
    """Cancels what still runs, once, and waits while it cleans up; what it raises does not matter
    any more. When the caller is cancelled meanwhile, that is raised once all have ended.

    Returns:
        Those that have not ended within ``timeout`` seconds.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    return await _wait(tasks, timeout)


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Runs what has to be done, in bounded time; a cancellation is raised only after it."""
    task = asyncio.create_task(work)
    await _wait([task])
    return task.result()


async def _wait(
    tasks: list[asyncio.Task[Any]], timeout: float | None = None
) -> list[asyncio.Task[Any]]:
    cancelled: asyncio.CancelledError | None = None
    clock = asyncio.get_running_loop().time
    give_up = None if timeout is None else clock() + timeout
    while running := [task for task in tasks if not task.done()]:
        if give_up is not None and clock() >= give_up:
            break
        try:
            await asyncio.wait(running, timeout=None if give_up is None else give_up - clock())
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # retrieved
    if cancelled is not None:
        raise cancelled
    return running

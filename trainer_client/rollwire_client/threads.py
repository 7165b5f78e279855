"""Blocking work beside the event loop, in threads that can be given up."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Runs ``work`` in a thread of its own; the future has what it returns or raises.

    A thread cannot be killed. Cancelling the future gives this one up: it goes on until ``work``
    ends, nobody learns how, and the interpreter does not wait for it at its exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved

    def tell(how: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if future.done() else how())

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            tell(functools.partial(future.set_exception, error))
        else:
            tell(functools.partial(future.set_result, result))

    threading.Thread(target=run, name="rollwire-blocking", daemon=True).start()
    return future

"""A thread that outlives the calls which are made on it."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Caller:
    """One thread that runs calls one by one, and lives until it is told to stop."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def runs(self) -> bool:
        """Whether it has been called, and not stopped."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """What ``function`` returns or raises there."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)

        if not self.runs:
            self._thread.start()
        self._calls.put(run)
        return result

    def stop(self) -> None:
        """Ends it after the calls that are under way. Idempotent."""
        if self.runs:
            self._calls.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

"""Threads that move weights get the interpreter soon, beside others that never let go of it.

A bucket needs the interpreter some times on its way. Python lets a thread that computes keep it for
5 ms each time; beside an engine or a trainer that would take longer than the bytes.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 0.0005


class _Switching:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking = 0
        self._before = 0.0

    @contextlib.contextmanager
    def fast_thread_switching(self) -> Iterator[None]:
        """While anybody is in this, threads of the process take turns every ``SECONDS``."""
        with self._lock:
            if not self._asking:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(SECONDS, self._before))
            self._asking += 1
        try:
            yield
        finally:
            with self._lock:
                self._asking -= 1
                if not self._asking:
                    sys.setswitchinterval(self._before)


fast_thread_switching = _Switching().fast_thread_switching

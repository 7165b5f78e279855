"""Deadlines that do not count the time in which this process did not listen.

An event loop may be blocked for a while: by a reward function that computes, a stopped process, a
machine that sleeps. Whatever the loop waited for may have arrived meanwhile. So these deadlines do
not count stalls (up to a minute in all), and after a stall the loop first reads what has arrived.

    async with Timeout(5.0):         # as asyncio.timeout
        await call.read()

    Timer(60.0, give_up)             # as loop.call_later
    elapsed(since)                   # as time.monotonic() - since
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

_CHECK_SECONDS = 0.1  # between two checks whether the loop runs
_READ_SECONDS = 0.25  # after a stall, to read what has arrived
_MAX_STALLED_SECONDS = 60.0  # of one wait: a process that never listens must give up too
_MAX_STALLS = 256  # that are remembered


class _StallDetector:
    """Remembers when an event loop did not run."""

    def __init__(self) -> None:
        self.stalls: deque[tuple[float, float]] = deque(maxlen=_MAX_STALLS)
        self._checked_at = time.monotonic()
        self._check_again()

    def check(self) -> float:
        """Notes a stall that has just ended, and returns the time."""
        now = time.monotonic()
        if now - self._checked_at > 2 * _CHECK_SECONDS:
            self.stalls.append((self._checked_at + _CHECK_SECONDS, now))
        self._checked_at = now
        return now

    def _check_again(self) -> None:
        self.check()
        asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check_again)


_detectors: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _StallDetector] = (
    weakref.WeakKeyDictionary()
)


def _detector() -> _StallDetector:
    loop = asyncio.get_running_loop()
    if (detector := _detectors.get(loop)) is None:
        detector = _detectors[loop] = _StallDetector()
    return detector


def elapsed(since: float) -> float:
    """Seconds since ``since`` (of ``time.monotonic``) in which the running loop was not stalled.
    Stalls before the first use of this module in a loop are not known.
    """
    detector = _detector()
    now = detector.check()
    stalled = 0.0
    for begin, end in reversed(detector.stalls):
        if end <= since:
            break
        stalled += end - max(begin, since)
    return now - since - min(stalled, _MAX_STALLED_SECONDS)


class Deadline:
    def __init__(self, seconds: float) -> None:
        self._since = _detector().check()
        self._seconds = seconds

    @property
    def left(self) -> float:
        return max(self._seconds - elapsed(self._since), 0.0)


class Timer(Deadline):
    """Calls ``callback`` once the deadline has passed, unless cancelled before."""

    def __init__(self, seconds: float, callback: Callable[..., object], *arguments: object) -> None:
        super().__init__(seconds)
        self._callback = callback
        self._arguments = arguments
        self._has_read = False
        self._schedule(seconds)

    def cancel(self) -> None:
        self._handle.cancel()

    def _schedule(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        left = self.left
        if left == 0 and not self._has_read:
            stalls = _detector().stalls
            since_stall = time.monotonic() - (stalls[-1][1] if stalls else 0.0)
            if since_stall < _READ_SECONDS:
                self._has_read = True
                left = _READ_SECONDS - since_stall
        if left > 0:
            self._schedule(left)
        else:
            self._callback(*self._arguments)


class Timeout:
    """Ends its block with ``TimeoutError`` after ``seconds``, stalls not counted."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = Timer(self._seconds, self._expire)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _expire(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time())

"""Deadlines that judge a peer, in the time in which this process listened to it.

An event loop that does something else for a while (a reward that computes, a process that is
stopped, a machine that sleeps) hears nobody meanwhile. Whatever it waited for may have come long
ago. So that time is not counted (up to a minute), and what has come is read before anybody is
judged.

    async with Patience(5.0):        # as asyncio.timeout, in that time
        await call.read()

    Timer(60.0, give_up)             # as loop.call_later
    listened(since)                  # as time.monotonic() - since
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

_BEAT_SECONDS = 0.1  # between two looks whether the loop runs
_READ_SECONDS = 0.25  # after a stall, for what has come to be read
_MOST_SECONDS = 60.0  # of stalls that one wait does not count: it lasts no longer than that beyond
_REMEMBERED = 256  # stalls


class _Heart:
    """Beats while an event loop runs, and remembers when it did not."""

    def __init__(self) -> None:
        self.stalls: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)
        self._beat_at = time.monotonic()
        self._beat()

    def look(self) -> float:
        """Notes a stall that has just ended; the time is now."""
        now = time.monotonic()
        if now - self._beat_at > 2 * _BEAT_SECONDS:
            self.stalls.append((self._beat_at + _BEAT_SECONDS, now))
        self._beat_at = now
        return now

    def _beat(self) -> None:
        self.look()
        asyncio.get_running_loop().call_later(_BEAT_SECONDS, self._beat)


_hearts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Heart] = weakref.WeakKeyDictionary()


def _heart() -> _Heart:
    loop = asyncio.get_running_loop()
    if (heart := _hearts.get(loop)) is None:
        heart = _hearts[loop] = _Heart()
    return heart


def listened(since: float) -> float:
    """Seconds since ``since`` (of ``time.monotonic``) in which the running loop listened.

    Stalls before the first use of this module in a loop are not known of, and of all together no
    more than a minute is taken off: whoever never listens must judge some day too.
    """
    heart = _heart()
    now = heart.look()
    stalled = 0.0
    for begin, end in reversed(heart.stalls):
        if end <= since:
            break
        stalled += end - max(begin, since)
    return now - since - min(stalled, _MOST_SECONDS)


class Deadline:
    """When the running loop has listened for ``seconds`` from now on."""

    def __init__(self, seconds: float) -> None:
        self._since = _heart().look()
        self._seconds = seconds

    @property
    def left(self) -> float:
        """Seconds to go, if there is no stall."""
        return max(self._seconds - listened(self._since), 0.0)


class Timer(Deadline):
    """Calls ``callback`` once the running loop has listened for ``seconds``, unless cancelled."""

    def __init__(self, seconds: float, callback: Callable[..., object], *arguments: object) -> None:
        super().__init__(seconds)
        self._callback = callback
        self._arguments = arguments
        self._has_read = False
        self._arm(seconds)

    def cancel(self) -> None:
        """Nothing is called. Any number of times."""
        self._handle.cancel()

    def _arm(self, seconds: float) -> None:
        self._handle = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left = self.left
        if left == 0 and not self._has_read:
            stalls = _heart().stalls
            since_stall = time.monotonic() - (stalls[-1][1] if stalls else 0.0)
            if since_stall < _READ_SECONDS:
                self._has_read = True
                left = _READ_SECONDS - since_stall
        if left > 0:
            self._arm(left)
        else:
            self._callback(*self._arguments)


class Patience:
    """Ends what is within by ``TimeoutError`` once the loop has listened for ``seconds``."""

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

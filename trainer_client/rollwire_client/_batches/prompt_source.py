"""Reads prompts from the caller's iterator in a thread, so that it cannot block the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._batches.callbacks import CallbackRunner, CallTimer
    from rollwire_client._batches.group_buffer import GroupBuffer

logger = logging.getLogger(__name__)

_STOP_TIMEOUT = 0.05  # seconds for the iterator to return what it is about to return
_CHUNK_SECONDS, _CHUNK_PROMPTS = 0.05, 1000  # of a data set, at once
_END: Any = object()


class PromptSource:
    """Reads as many prompts as are asked for into ``buffer.prompts``, and no more.

    Args:
        prompts: The caller's iterator.
        runner: Its thread calls the iterator.
        buffer: Gets the prompts.

    Attributes:
        ended: There are no more.
        error: What the iterator raised.
    """

    def __init__(
        self, prompts: Iterator[Prompt], runner: CallbackRunner, buffer: GroupBuffer
    ) -> None:
        self.ended = False
        self.error: Exception | None = None
        self._prompts = prompts
        self._runner = runner
        self._buffer = buffer
        self._stopped = False
        self._reading: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether some that were asked for are still to come."""
        return self._reading is not None and not self._reading.done()

    def request(self, count: int) -> None:
        """Has that many read, unless it is busy."""
        if not self.busy and not self.ended:
            self._reading = asyncio.create_task(self._read(count), name="rollwire prompts")

    async def stop(self) -> None:
        """Reads no more. One that the iterator is about to return goes to the buffer later."""
        self._stopped = True
        if self._reading is not None and self.busy:
            await asyncio.wait([self._reading], timeout=_STOP_TIMEOUT)

    async def _read(self, count: int) -> None:
        timer = _timer(self._runner)
        read = partial(self._read_in_thread, count, timer, asyncio.get_running_loop())
        try:
            await self._runner.run_in_thread(read, timer)
        except Exception as error:
            self.error, self.ended = error, True
            if self._stopped:
                logger.warning("prompts failed after the batch had ended: %r", error)
        finally:
            self._buffer.changed.set()

    def _read_in_thread(
        self, count: int, timer: CallTimer, loop: asyncio.AbstractEventLoop
    ) -> None:
        for _ in range(count):
            if self._stopped:
                return
            if (prompt := next(self._prompts, _END)) is _END:
                self.ended = True
                return
            timer.last_progress = time.monotonic()
            self._buffer.prompts.append(prompt)
            loop.call_soon_threadsafe(self._buffer.changed.set)


async def read_all(prompts: Iterator[Prompt], runner: CallbackRunner) -> list[Prompt]:
    """All of a data set, in chunks: of an endless one the reading can be cancelled."""
    taken: list[Prompt] = []
    timer = _timer(runner)

    def read_chunk() -> bool:
        """Whether there are more."""
        until, most = time.monotonic() + _CHUNK_SECONDS, len(taken) + _CHUNK_PROMPTS
        for prompt in prompts:
            taken.append(prompt)
            timer.last_progress = time.monotonic()
            if timer.last_progress > until or len(taken) >= most:
                return True
        return False

    while await runner.run_in_thread(read_chunk, timer):
        pass
    return taken


def _timer(runner: CallbackRunner) -> CallTimer:
    return runner.timer("prompts", "its next prompt")

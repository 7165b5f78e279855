"""What the caller gives to be called: bounded in time, named in the log, beside the event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from rollwire_client._concurrency.threads import WorkerThread, as_exception
from rollwire_client._errors import CallbackError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Awaitable, Callable, Iterator

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._concurrency.threads import Call
    from rollwire_client._trajectory import Trajectory

    Reward = Callable[[Prompt, Trajectory], float | Awaitable[float]]

logger = logging.getLogger(__name__)

_PATIENCE = (
    30.0  # seconds that a call takes before the log says so; each next line after twice that
)
_LOOK = 1.0  # seconds between two looks at a call
_CANCELLING = 1.0  # seconds for a coroutine to end that was cancelled
_REWARD_DELAY = 0.1  # seconds until a reward that raised is asked for again; then four times that
_STOPPING = 0.05  # seconds for the iterator to give what it is about to give
_PART = 0.05, 1000  # seconds, prompts: so much of a data set is read at once


class Caller:
    """Calls plain functions in a thread of its own, one at a time, and coroutine functions in the
    event loop.

    Args:
        thread: Its name.
        timeout: Seconds that a call may take; None: any.
    """

    def __init__(self, thread: str, timeout: float | None) -> None:
        self._timeout = timeout
        self._thread = WorkerThread(thread)
        self._calls: dict[Call[Any], Watch] = {}  # in their order; the first is under way

    async def call(self, name: str, function: Callable[..., Any], *arguments: Any, of: str) -> Any:
        """What the function returns or raises; what can be awaited is awaited.

        Args:
            name: As the caller knows it, such as "reward".
            function: Is called.
            *arguments: Of it.
            of: What it is called for, such as "prompt 'a'".

        Raises:
            CallbackError: It takes longer than it may.
        """
        work = functools.partial(function, *arguments)
        if _is_async(function):
            given = work()
        else:
            given = await self.run(work, self.watch(name, of))
        if not inspect.isawaitable(given):
            return given
        return await _awaited(asyncio.ensure_future(_guarded(given)), self.watch(name, of))

    def watch(self, name: str, of: str) -> Watch:
        """For a call; see ``call``."""
        return Watch(name, of, self._timeout)

    async def run(self, work: Callable[[], Any], watch: Watch) -> Any:
        """Calls it in the thread."""
        call = self._thread.submit(work)
        self._calls[call] = watch
        call.result.add_done_callback(lambda _: self._calls.pop(call))
        try:
            while not call.result.done():
                await asyncio.wait([call.result], timeout=watch.interval)
                self._look()
        finally:
            if call.since is None:
                call.result.cancel()  # else it goes on, and those behind it look at it
        return call.result.result()

    def close(self) -> None:
        """Ends the thread, once it has nothing to do any more. Idempotent."""
        self._thread.close()

    def _look(self) -> None:
        for call, watch in self._calls.items():
            if call.since is not None:
                try:
                    watch.look(call.since)
                except CallbackError as error:
                    self._thread.abandon(call, error)
            return


class Watch:
    """Says in the log that a call takes long, and when it takes too long.

    Attributes:
        interval: Seconds between two looks.
        came_further: When it did, on the monotonic clock.
    """

    def __init__(self, name: str, of: str, timeout: float | None) -> None:
        self.interval = _LOOK if timeout is None else min(_LOOK, timeout / 4)
        self.came_further = 0.0
        self._name, self._of, self._timeout = name, of, timeout
        self._next = 0.0

    def look(self, since: float) -> None:
        """Looks at a call that began then, on the monotonic clock.

        Raises:
            CallbackError: It takes too long.
        """
        now = time.monotonic()
        since = max(since, self.came_further)
        if self._timeout is not None and now - since >= self._timeout:
            told = f"{self._name} took longer than {self._timeout:g} s for {self._of}"
            raise CallbackError(f"{told}: it was given up", callback=self._name)
        if now < max(self._next, since + _PATIENCE):
            return
        self._next = now + (now - since)
        left = "" if self._timeout is None else f"; it is given up after {self._timeout:g} s"
        logger.warning(
            "%s has taken %.0f s for %s, and has not returned%s",
            self._name, now - since, self._of, left,
        )  # fmt: skip


class Scorer:
    """Asks the caller's ``reward``, again where it raised.

    Args:
        reward: Of a complete sample.
        timeout: Seconds that a call may take; None: any.
        retries: How often it is called again, where it raised.
    """

    def __init__(self, reward: Reward, timeout: float | None, retries: int) -> None:
        self._reward = reward
        self._retries = retries
        self._caller = Caller("rollwire-reward", timeout)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """The reward of a sample.

        Raises:
            CallbackError: It raised each time, took too long, or gave no finite number.
        """
        failures = 0
        while True:
            try:
                of = f"prompt {prompt.id!r}"
                return _number(
                    await self._caller.call("reward", self._reward, prompt, trajectory, of=of),
                    prompt,
                )
            except CallbackError:
                raise
            except Exception as error:
                failures += 1
                if failures > self._retries:
                    told = f"the reward of prompt {prompt.id!r} could not be had: {error!r}"
                    raise CallbackError(told, callback="reward") from error
                logger.warning(
                    "the reward of prompt %r raised %r: it is called again (%d of %d)",
                    prompt.id, error, failures, self._retries,
                )  # fmt: skip
                await asyncio.sleep(_REWARD_DELAY * 4 ** (failures - 1))

    def close(self) -> None:
        """Ends its thread. Idempotent."""
        self._caller.close()


class Source:
    """Takes prompts from the caller's iterator: as many as are asked for, and no more.

    Args:
        prompts: The iterator.
        caller: Calls it.
        arrived: Gets what it gives.
        changed: Is set when there is something new.

    Attributes:
        ended: There are no more.
        error: What it raised.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        caller: Caller,
        arrived: deque[Prompt],
        changed: asyncio.Event,
    ) -> None:
        self.ended = False
        self.error: Exception | None = None
        self._prompts = prompts
        self._caller = caller
        self._arrived = arrived
        self._changed = changed
        self._stopped = False
        self._taking: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether some that were asked for are still to come."""
        return self._taking is not None and not self._taking.done()

    def ask(self, count: int) -> None:
        """Has that many taken, unless it is busy."""
        if not self.busy and not self.ended:
            self._taking = asyncio.create_task(self._take(count), name="rollwire prompts")

    async def stop(self) -> None:
        """No more are taken; one that the iterator is about to give still arrives, later."""
        self._stopped = True
        if self._taking is not None and self.busy:
            await asyncio.wait([self._taking], timeout=_STOPPING)

    async def _take(self, count: int) -> None:
        watch = self._caller.watch("prompts", "its next prompt")
        loop = asyncio.get_running_loop()
        try:
            await self._caller.run(functools.partial(self._bring, count, watch, loop), watch)
        except Exception as error:
            self.error, self.ended = error, True
            if self._stopped:
                logger.warning("prompts failed after the batch had ended: %r", error)
        finally:
            self._changed.set()

    def _bring(self, count: int, watch: Watch, loop: asyncio.AbstractEventLoop) -> None:
        """In the thread."""
        over: Any = object()
        for _ in range(count):
            if self._stopped:
                return
            if (prompt := next(self._prompts, over)) is over:
                self.ended = True
                return
            watch.came_further = time.monotonic()
            self._arrived.append(prompt)
            loop.call_soon_threadsafe(self._changed.set)


async def read_all(prompts: Iterator[Prompt], caller: Caller) -> list[Prompt]:
    """All of a data set."""
    taken: list[Prompt] = []
    watch = caller.watch("prompts", "its next prompt")

    def read() -> bool:
        """Some of them; whether there are more. Whoever gave endless ones is heard in between."""
        give_up, most = time.monotonic() + _PART[0], len(taken) + _PART[1]
        for prompt in prompts:
            taken.append(prompt)
            watch.came_further = time.monotonic()
            if watch.came_further > give_up or len(taken) >= most:
                return True
        return False

    while await caller.run(read, watch):
        pass
    return taken


async def _guarded(given: Awaitable[Any]) -> Any:
    """What it returns or raises; it does not end the event loop, which Ctrl-C alone may."""
    try:
        return await given
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise as_exception(error) from error


async def _awaited(running: asyncio.Future[Any], watch: Watch) -> Any:
    begun = time.monotonic()
    running.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
    try:
        while not running.done():
            await asyncio.wait([running], timeout=watch.interval)
            if not running.done():
                watch.look(begun)
    finally:
        if not running.done():
            running.cancel()
            await asyncio.wait([running], timeout=_CANCELLING)
    try:
        return running.result()
    except (asyncio.CancelledError, GeneratorExit) as error:  # its own: nobody ended it
        raise as_exception(error) from error


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(function, "__call__", None)  # noqa: B004 - of an object of a class of theirs
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _number(reward: object, prompt: Prompt) -> float:
    """The reward, of whatever type has a value: numpy's numbers, bools, tensors of one element."""
    try:
        value = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        told = f"the reward of prompt {prompt.id!r} is {reward!r:.80}, no finite number"
        raise CallbackError(told, callback="reward")
    return value

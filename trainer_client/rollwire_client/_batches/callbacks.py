"""Calls the caller's functions beside the event loop, within a time limit that names them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from rollwire_client._concurrency import WorkerThread, as_exception
from rollwire_client._errors import CallbackError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._concurrency import Call
    from rollwire_client._trajectory import Trajectory

    Reward = Callable[[Prompt, Trajectory], float | Awaitable[float]]

logger = logging.getLogger(__name__)

_LOG_AFTER = 30.0  # seconds until the log says that a call takes long; then doubled each time
_CHECK_INTERVAL = 1.0  # seconds between two checks of a call
_CANCEL_TIMEOUT = 1.0  # seconds for a cancelled coroutine to end
_REWARD_DELAY = 0.1  # seconds until a reward that raised is called again; then four times that


class CallbackRunner:
    """Calls plain functions in a thread of its own, one at a time, and coroutine functions in the
    event loop.

    Args:
        thread: Name of the thread.
        timeout: Seconds that a call may take; None: no limit.
    """

    def __init__(self, thread: str, timeout: float | None) -> None:
        self._timeout = timeout
        self._thread = WorkerThread(thread)
        self._calls: dict[Call[Any], CallTimer] = {}  # in their order; the first is under way

    async def call(self, name: str, function: Callable[..., Any], *args: Any, subject: str) -> Any:
        """Returns or raises what the function does; an awaitable result is awaited.

        Args:
            name: As the caller knows the function, such as "reward".
            function: To call.
            *args: Its arguments.
            subject: What it is called for, such as "prompt 'a'".

        Raises:
            CallbackError: It takes longer than it may.
        """
        work = functools.partial(function, *args)
        if _is_async(function):
            result = work()
        else:
            result = await self.run_in_thread(work, self.timer(name, subject))
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(_without_exits(result))
        return await _await_task(task, self.timer(name, subject))

    def timer(self, name: str, subject: str) -> CallTimer:
        return CallTimer(name, subject, self._timeout)

    async def run_in_thread(self, work: Callable[[], Any], timer: CallTimer) -> Any:
        call = self._thread.submit(work)
        self._calls[call] = timer
        call.result.add_done_callback(lambda _: self._calls.pop(call))
        try:
            while not call.result.done():
                await asyncio.wait([call.result], timeout=timer.interval)
                self._check_current_call()
        finally:
            # A call that has begun goes on without its waiter. Those that wait behind it keep
            # checking it, so that it cannot block them for ever.
            if call.since is None:
                call.result.cancel()
        return call.result.result()

    def close(self) -> None:
        """Ends the thread after its current call. Idempotent."""
        self._thread.close()

    def _check_current_call(self) -> None:
        call, timer = next(iter(self._calls.items()), (None, None))
        if call is None or timer is None or call.since is None:
            return
        try:
            timer.check(call.since)
        except CallbackError as error:
            self._thread.abandon(call, error)


class CallTimer:
    """Logs that a call takes long, and raises when it takes too long.

    Attributes:
        interval: Seconds between two checks.
        last_progress: When a call of many parts finished the last one (``time.monotonic``).
    """

    def __init__(self, name: str, subject: str, timeout: float | None) -> None:
        self.interval = _CHECK_INTERVAL if timeout is None else min(_CHECK_INTERVAL, timeout / 4)
        self.last_progress = 0.0
        self._name, self._subject, self._timeout = name, subject, timeout
        self._next_log = 0.0

    def check(self, started: float) -> None:
        """Checks a call that started then (``time.monotonic``).

        Raises:
            CallbackError: It takes too long.
        """
        now = time.monotonic()
        started = max(started, self.last_progress)
        seconds = now - started
        if self._timeout is not None and seconds >= self._timeout:
            raise CallbackError(
                f"{self._name} took longer than {self._timeout:g} s for {self._subject}: it was "
                "given up",
                callback=self._name,
            )
        if now < max(self._next_log, started + _LOG_AFTER):
            return
        self._next_log = now + seconds
        limit = "" if self._timeout is None else f"; it is given up after {self._timeout:g} s"
        logger.warning(
            "%s has taken %.0f s for %s, and has not returned%s",
            self._name, seconds, self._subject, limit,
        )  # fmt: skip


class RewardCaller:
    """Calls the caller's ``reward``, again if it raised.

    Args:
        reward: Scores a complete sample.
        timeout: Seconds that a call may take; None: no limit.
        retries: How often it is called again after it raised.
    """

    def __init__(self, reward: Reward, timeout: float | None, retries: int) -> None:
        self._reward = reward
        self._retries = retries
        self._runner = CallbackRunner("rollwire-reward", timeout)

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> float:
        """The reward of a sample.

        Raises:
            CallbackError: It raised each time, took too long, or returned no finite number.
        """
        subject, failures = f"prompt {prompt.id!r}", 0
        while True:
            try:
                reward = await self._runner.call(
                    "reward", self._reward, prompt, trajectory, subject=subject
                )
                return _finite_number(reward, prompt)
            except CallbackError:
                raise
            except Exception as error:
                failures += 1
                if failures > self._retries:
                    raise CallbackError(
                        f"the reward of {subject} could not be computed: {error!r}",
                        callback="reward",
                    ) from error
                logger.warning(
                    "the reward of %s raised %r: it is called again (%d of %d)",
                    subject, error, failures, self._retries,
                )  # fmt: skip
                await asyncio.sleep(_REWARD_DELAY * 4 ** (failures - 1))

    def close(self) -> None:
        """Ends its thread. Idempotent."""
        self._runner.close()


async def _without_exits(result: Awaitable[Any]) -> Any:
    """Turns SystemExit and the like into an Exception: in a task they would end the event loop,
    which only Ctrl-C may.
    """
    try:
        return await result
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise as_exception(error) from error


async def _await_task(task: asyncio.Future[Any], timer: CallTimer) -> Any:
    started = time.monotonic()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved
    try:
        while not task.done():
            await asyncio.wait([task], timeout=timer.interval)
            if not task.done():
                timer.check(started)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=_CANCEL_TIMEOUT)
    try:
        return task.result()
    except (asyncio.CancelledError, GeneratorExit) as error:  # raised inside: nobody cancelled us
        raise as_exception(error) from error


def _is_async(function: Callable[..., Any]) -> bool:
    call_method = getattr(function, "__call__", None)  # noqa: B004 - of an object with an async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def _finite_number(reward: object, prompt: Prompt) -> float:
    """The reward as a float: numpy's numbers, bools and tensors of one element are fine too."""
    try:
        value = float(reward)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise CallbackError(
            f"the reward of prompt {prompt.id!r} is {reward!r:.80}, no finite number",
            callback="reward",
        )
    return value

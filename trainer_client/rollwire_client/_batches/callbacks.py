"""Calls the caller's functions beside the event loop, within a time limit that names them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from rollwire_client._concurrency import WorkerThread, as_exception
from rollwire_client._errors import CallbackError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._concurrency import Call
    from rollwire_client._fleet.session import Conversation, Session
    from rollwire_client._trajectory import Trajectory

    SampleResult: TypeAlias = Trajectory | Conversation
    Reward = (
        Callable[[Prompt, Trajectory], float | Awaitable[float]]
        | Callable[[Prompt, Conversation], float | Awaitable[float]]
    )
    RolloutFunction = Callable[[Session, Prompt], Awaitable[None]]

logger = logging.getLogger(__name__)

_LOG_AFTER = 30.0  # seconds until the log says that a call takes long; then doubled each time
_CANCEL_TIMEOUT = 1.0  # seconds for a cancelled coroutine to end
_REWARD_DELAY = 0.1  # seconds until a reward that raised is called again; then four times that


class CallbackRunner:
    """Calls plain functions in a thread of its own, one at a time, and coroutine functions in the
    event loop. ``timeout`` is in seconds for each call; None: no limit.
    """

    def __init__(self, thread: str, timeout: float | None) -> None:
        self.timeout = math.inf if timeout is None else timeout
        self._thread = WorkerThread(thread)
        self._calls: dict[Call[Any], tuple[str, str]] = {}  # the oldest is under way
        self._watching: asyncio.Task[None] | None = None

    async def call(self, name: str, function: Callable[..., Any], *args: Any, subject: str) -> Any:
        """Returns or raises what the function does; an awaitable result is awaited.

        Raises:
            CallbackError: ``name``, called for ``subject``, takes longer than it may.
        """
        work = functools.partial(function, *args)
        if is_async(function):
            result = work()
        else:
            result = await self.call_in_thread(name, work, subject=subject)
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(without_exits(result))
        _ignore_error(task)
        try:
            await self._wait(task, name, subject)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_CANCEL_TIMEOUT)
        try:
            return task.result()
        except (asyncio.CancelledError, GeneratorExit) as error:  # inside: nobody cancelled us
            raise as_exception(error) from error

    async def call_in_thread(self, name: str, work: Callable[[], Any], *, subject: str) -> Any:
        call = self._thread.submit(work)
        self._calls[call] = name, subject
        call.result.add_done_callback(lambda _: self._calls.pop(call))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="rollwire calls")
        try:
            await asyncio.wait([call.result])
        finally:
            if not call.begun:
                call.result.cancel()
        return call.result.result()

    async def _watch(self) -> None:
        """Abandons a call whose time is up, also one that nobody waits for any more: it must not
        block those behind it for ever.
        """
        while self._calls:
            call, (name, subject) = next(iter(self._calls.items()))
            try:
                await self._wait(call.result, name, subject)
            except CallbackError as error:
                self._thread.abandon(call, error)

    async def _wait(self, result: asyncio.Future[Any], name: str, subject: str) -> None:
        """Logs that a call takes long, and raises when it takes too long."""
        started = time.monotonic()
        seconds, next_log = 0.0, _LOG_AFTER
        while True:
            await asyncio.wait([result], timeout=min(next_log, self.timeout) - seconds)
            if result.done():
                return
            seconds = time.monotonic() - started
            if seconds >= self.timeout:
                raise CallbackError(
                    f"{name} took longer than {self.timeout:g} s for {subject}: it was abandoned",
                    callback=name,
                )
            if seconds < next_log:
                continue
            next_log = 2 * seconds
            limit = f"; it is abandoned after {self.timeout:g} s"
            logger.warning(
                "%s has taken %.0f s for %s, and has not returned%s",
                name, seconds, subject, limit if self.timeout < math.inf else "",
            )  # fmt: skip

    def close(self) -> None:
        """Ends the thread after its current call. Idempotent."""
        self._thread.close()


async def score(
    runner: CallbackRunner, reward: Reward, retries: int, prompt: Prompt, result: SampleResult
) -> float:
    """The reward of a sample; it is called again if it raised.

    Raises:
        CallbackError: It raised each time, took too long, or returned no finite number.
    """
    subject, failures = f"prompt {prompt.id!r}", 0
    while True:
        try:
            value = await runner.call("reward", reward, prompt, result, subject=subject)
            return _finite_number(value, prompt)
        except CallbackError:
            raise
        except Exception as error:
            failures += 1
            if failures > retries:
                raise CallbackError(
                    f"the reward of {subject} could not be computed: {error!r}", callback="reward"
                ) from error
            logger.warning(
                "the reward of %s raised %r: it is called again (%d of %d)",
                subject, error, failures, retries,
            )  # fmt: skip
            await asyncio.sleep(_REWARD_DELAY * 4 ** (failures - 1))


async def without_exits(result: Awaitable[Any]) -> Any:
    """Turns SystemExit and the like into an Exception: in a task they would end the event loop,
    which only Ctrl-C may.
    """
    try:
        return await result
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise as_exception(error) from error


def _ignore_error(future: asyncio.Future[Any]) -> None:
    """Keeps asyncio from logging an exception that nobody awaits any more."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())


def is_async(function: Callable[..., Any]) -> bool:
    call_method = getattr(function, "__call__", None)  # noqa: B004 - of an object with an async one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


def _finite_number(reward: object, prompt: Prompt) -> float:
    try:
        value = float(reward)  # type: ignore[arg-type]  # numpy's, bools, tensors of one element
    except (TypeError, ValueError, RuntimeError, OverflowError):
        value = math.nan
    if not math.isfinite(value):
        raise CallbackError(
            f"the reward of prompt {prompt.id!r} is {reward!r:.80}, no finite number",
            callback="reward",
        )
    return value

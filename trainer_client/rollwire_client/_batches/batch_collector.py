"""Collects one batch, from the prompts that it reads to the groups that it hands out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from rollwire_client._batches.batch import Batch, Decision, DropReason, Group, Part, Progress
from rollwire_client._batches.group import drop_reason, ends_group
from rollwire_client._errors import CallbackError, ClosedError, InvalidRequestError

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable, Iterator

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._batches.callbacks import CallbackRunner
    from rollwire_client._batches.group import LiveGroup
    from rollwire_client._batches.group_buffer import BatchPlan, GroupBuffer

logger = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 8  # of groups: then every group is taken to fail so
_STOP_TIMEOUT = 0.05  # seconds for the iterator to return what it is about to return
_TURN = 0.05  # seconds of reading at once, unless one prompt takes longer
_END: Any = object()


class BatchCollector:
    """Collects one batch: its groups come from ``buffer``, and what is left stays there."""

    def __init__(
        self,
        plan: BatchPlan,
        buffer: GroupBuffer,
        prompts: PromptSource,
        hooks: CallbackRunner,
        decide: Callable[[Group], Decision] | None,
        stop: Callable[[Progress], bool] | None,
        show: Callable[[int, str], None],
        started: float,
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._prompts = prompts
        self._hooks = hooks
        self._decide = decide
        self._stop = stop
        self._show = show
        self._clock = asyncio.get_running_loop().time
        self._started = started
        self._group_errors: list[Exception] = []  # since the last group that was complete
        self._decide_errors: list[Exception] = []  # since ``decide`` last decided

    async def collect(self) -> Batch:
        """The batch. Left by an exception, it hands out nothing and loses nothing."""
        try:
            await self._fill()
        finally:
            await self._prompts.stop()
        seconds = self._clock() - self._started
        finished = tuple(group.snapshot() for group in self._buffer.close_batch())
        carried = tuple(group.snapshot() for group in self._buffer.groups.values())
        dropped = self._buffer.take_dropped()
        return Batch(self._plan.version, Part(finished), Part(carried), Part(dropped), seconds)

    async def _fill(self) -> None:
        buffer = self._buffer
        buffer.open(self._plan, self._clock())
        for group in buffer.groups.values():
            group.lower_oldest_version(self._plan.oldest_version)
        self._record_ended(raising=False)
        while True:
            buffer.changed.clear()
            if buffer.closed:
                raise ClosedError("the batcher was closed")
            self._record_ended()
            self._start_groups()
            stopped = await self._decide_on_ready()
            progress = self._progress()
            self._show(progress.chosen, f"{progress.sampling} sampling, {progress.ready} ready")
            if stopped or buffer.is_over(self._clock()):
                return
            if buffer.prompts or (self._may_start() and not self._prompts.busy):
                continue
            if not (buffer.samples_candidates() or self._prompts.busy):
                self._raise_if_all_fail(self._group_errors, nothing_left=True)
                return  # there are no more prompts
            deadline = buffer.deadline()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                    await buffer.changed.wait()

    def _record_ended(self, *, raising: bool = True) -> None:
        """Raises the first error that every group would meet, once all are recorded. The groups
        that met it start again: at once if it was in the time before this batch.
        """
        shared: Exception | None = None
        for group, error in self._buffer.take_ended():
            if error is not None and not ends_group(error):
                self._buffer.unstarted.append(group)
                shared = shared or (error if raising else None)
                continue
            try:
                self._record(group, error)
            except Exception as raised:
                shared = shared or raised
        if shared is not None:
            raise shared

    def _record(self, group: LiveGroup, error: Exception | None) -> None:
        if error is None:
            self._group_errors.clear()
            self._buffer.complete(group)
        else:
            self._buffer.drop(group, drop_reason(error), error)
            self._record_failure(group.prompt, drop_reason(error), error, self._group_errors)

    def _record_failure(
        self, prompt: Prompt, reason: DropReason, error: Exception, errors: list[Exception]
    ) -> None:
        logger.warning(
            "the group of prompt %r (epoch %d) is dropped as %s: %s",
            prompt.id, prompt.epoch, reason.value, error,
        )  # fmt: skip
        error.add_note(f"It is of prompt {prompt.id!r}, whose group is dropped as {reason.value}.")
        errors.append(error)
        self._raise_if_all_fail(errors)

    def _raise_if_all_fail(self, errors: list[Exception], *, nothing_left: bool = False) -> None:
        """Raises the last of the errors if every group meets them, as far as can be seen.

        Groups whose prompts cannot be sampled end at once, long before the others. So many of those
        in a row say little while others are sampled: no more are started until one of the others
        ends. That the caller's functions fail in a row says enough.
        """
        if not errors:
            return
        last, count = errors[-1], len(errors)
        many = count >= _FAILURES_IN_A_ROW and (nothing_left or isinstance(last, CallbackError))
        if many or (nothing_left and not self._buffer.completed):
            last.add_note(f"Groups dropped in a row, with none that was complete: {count}.")
            raise last

    def _may_start(self) -> bool:
        return (
            not self._prompts.ended
            and len(self._group_errors) < _FAILURES_IN_A_ROW
            and self._buffer.room() > 0
        )

    def _start_groups(self) -> None:
        """Starts groups of the prompts that came, and asks for more where there is room."""
        try:
            while self._buffer.prompts:
                self._add_group(self._buffer.prompts.popleft())
        finally:
            self._buffer.start_all(self._plan.oldest_version)
        if (error := self._prompts.error) is not None:
            error.add_note("So failed `prompts`, which collect takes its prompts from.")
            raise error
        if self._may_start():
            self._prompts.request(self._buffer.room())

    def _add_group(self, prompt: Prompt) -> None:
        try:
            self._buffer.add(prompt)
        except Exception as error:
            self._buffer.refuse(prompt, error)
            if not isinstance(error, InvalidRequestError):
                raise
            self._record_failure(prompt, DropReason.FAILED, error, self._group_errors)

    async def _decide_on_ready(self) -> bool:
        """Decides on the groups that are complete; True: ``stop`` ends the batch."""
        while (group := self._buffer.next_ready()) is not None:
            try:
                decision = await self._decision(group.snapshot())
            except CallbackError as error:
                self._buffer.drop(group, DropReason.FAILED, error)
                self._record_failure(group.prompt, DropReason.FAILED, error, self._decide_errors)
                continue
            self._decide_errors.clear()
            if decision is Decision.TAKE:
                self._buffer.choose(group, self._clock())
            elif decision is Decision.POSTPONE:
                self._buffer.postpone(group)
            else:
                self._buffer.drop(group, DropReason.FILTERED)
            if await self._stops():
                return True
        return False

    async def _decision(self, group: Group) -> Decision:
        """What ``decide`` says; CallbackError if it raised, took too long, or said nothing."""
        if self._decide is None:
            return Decision.TAKE
        subject = f"the group of prompt {group.prompt.id!r}"
        try:
            decision = await self._hooks.call("decide", self._decide, group, subject=subject)
        except CallbackError:
            raise
        except Exception as error:
            raise CallbackError(
                f"decide failed at {subject}: {error!r}", callback="decide"
            ) from error
        if not isinstance(decision, Decision):
            raise CallbackError(
                f"decide returned {decision!r:.80}, not a Decision, of prompt {group.prompt.id!r}",
                callback="decide",
            )
        return decision

    async def _stops(self) -> bool:
        if self._stop is None:
            return False
        try:
            stops = await self._hooks.call(
                "stop", self._stop, self._progress(), subject="the batch"
            )
        except Exception as error:
            error.add_note("So failed `stop`, which collect was given.")
            raise
        if not isinstance(stops, bool):
            raise TypeError(f"stop returned {stops!r}, not True or False")
        return stops

    def _progress(self) -> Progress:
        buffer = self._buffer
        return Progress(
            version=self._plan.version,
            target=self._plan.target,
            chosen=len(buffer.chosen),
            sampling=len(buffer.sampling),
            ready=len(buffer.ready) + len(buffer.postponed),
            seconds=self._clock() - self._started,
        )


class PromptSource:
    """Reads the caller's prompts into ``taken``, in the runner's thread.

    Attributes:
        ended: There are no more.
        error: What the iterator raised.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        runner: CallbackRunner,
        taken: deque[Prompt],
        changed: asyncio.Event,
    ) -> None:
        self.ended = False
        self.error: Exception | None = None
        self._prompts = prompts
        self._runner = runner
        self._taken = taken
        self._changed = changed
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
        """Reads no more. One that the iterator is about to return is taken later."""
        self._stopped = True
        if self._reading is not None and self.busy:
            await asyncio.wait([self._reading], timeout=_STOP_TIMEOUT)

    async def read(self, count: float) -> None:
        """Takes that many; of an endless iterator the reading can be cancelled."""
        loop = asyncio.get_running_loop()
        while count > 0 and not (self.ended or self._stopped):
            turn = partial(self._read_turn, count, loop)
            count -= await self._runner.call_in_thread("prompts", turn, subject="its next prompt")

    async def _read(self, count: int) -> None:
        try:
            await self.read(count)
        except Exception as error:
            self.error, self.ended = error, True
            if self._stopped:
                logger.warning("prompts failed after the batch had ended: %r", error)
        finally:
            self._changed.set()

    def _read_turn(self, most: float, loop: asyncio.AbstractEventLoop) -> int:
        count, until = 0, time.monotonic() + min(_TURN, self._runner.timeout / 2)
        while count < most and time.monotonic() < until and not self._stopped:
            if (prompt := next(self._prompts, _END)) is _END:
                self.ended = True
                break
            count += 1
            self._taken.append(prompt)
            loop.call_soon_threadsafe(self._changed.set)
        return count

"""Collects one batch, from the prompts that it reads to the groups that it hands out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from dataclasses import dataclass, field
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

_FAILURES_IN_A_ROW = 8  # of groups: more would fail in the same way
_STOP_TIMEOUT = 0.05  # seconds for the iterator to return what it is about to return
_TURN = 0.05  # seconds of reading at once, unless one prompt takes longer
_END: Any = object()


@dataclass(slots=True)
class BatchCollector:
    """Collects one batch: its groups come from ``buffer``, and what is left stays there."""

    plan: BatchPlan
    buffer: GroupBuffer
    prompts: PromptSource
    hooks: CallbackRunner
    decide: Callable[[Group], Decision] | None
    stop: Callable[[Progress], bool] | None
    show: Callable[[int, str], None]  # how many groups it has, and a note
    clock: Callable[[], float]
    started: float
    group_errors: list[Exception] = field(default_factory=list)  # since a group was complete
    decide_errors: list[Exception] = field(default_factory=list)  # since ``decide`` decided

    async def collect(self) -> Batch:
        """The batch. Left by an exception, it hands out nothing and loses nothing."""
        try:
            await self._fill()
        finally:
            await self.prompts.stop()
        seconds = self.clock() - self.started
        finished = tuple(group.snapshot() for group in self.buffer.close_batch())
        carried = tuple(group.snapshot() for group in self.buffer.groups.values())
        dropped = self.buffer.take_dropped()
        return Batch(self.plan.version, Part(finished), Part(carried), Part(dropped), seconds)

    async def _fill(self) -> None:
        buffer = self.buffer
        buffer.open(self.plan, self.clock())
        for group in buffer.groups.values():
            group.lower_oldest_version(self.plan.oldest_version)
        self._record_ended(raising=False)
        while True:
            buffer.changed.clear()
            if buffer.closed:
                raise ClosedError("the batcher was closed")
            self._record_ended()
            self._start_groups()
            stopped = await self._decide_on_ready()
            progress = self._progress()
            self.show(progress.chosen, f"{progress.sampling} sampling, {progress.ready} ready")
            if stopped or buffer.is_over(self.clock()):
                return
            if buffer.prompts or (self._may_start() and not self.prompts.busy):
                continue
            if not (buffer.samples_candidates() or self.prompts.busy):
                self._raise_if_all_fail(self.group_errors, nothing_left=True)
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
        for group, error in self.buffer.take_ended():
            if error is not None and not ends_group(error):
                self.buffer.unstarted.append(group)
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
            self.group_errors.clear()
            self.buffer.complete(group)
        else:
            self.buffer.drop(group, drop_reason(error), error)
            self._record_failure(group.prompt, drop_reason(error), error, self.group_errors)

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
        if many or (nothing_left and not self.buffer.completed):
            last.add_note(f"Groups dropped in a row, with none that was complete: {count}.")
            raise last

    def _may_start(self) -> bool:
        return (
            not self.prompts.ended
            and len(self.group_errors) < _FAILURES_IN_A_ROW
            and self.buffer.room() > 0
        )

    def _start_groups(self) -> None:
        """Starts groups of the prompts that came, and asks for more where there is room."""
        try:
            while self.buffer.prompts:
                self._add_group(self.buffer.prompts.popleft())
        finally:
            self.buffer.start_all(self.plan.oldest_version)
        if (error := self.prompts.error) is not None:
            error.add_note("`prompts`, which collect reads, raised this.")
            raise error
        if self._may_start():
            self.prompts.request(self.buffer.room())

    def _add_group(self, prompt: Prompt) -> None:
        try:
            self.buffer.add(prompt)
        except Exception as error:
            self.buffer.refuse(prompt, error)
            if not isinstance(error, InvalidRequestError):
                raise
            self._record_failure(prompt, DropReason.FAILED, error, self.group_errors)

    async def _decide_on_ready(self) -> bool:
        """Decides on the groups that are complete; True: ``stop`` ends the batch."""
        while (group := self.buffer.next_ready()) is not None:
            try:
                decision = await self._decision(group.snapshot())
            except CallbackError as error:
                self.buffer.drop(group, DropReason.FAILED, error)
                self._record_failure(group.prompt, DropReason.FAILED, error, self.decide_errors)
                continue
            self.decide_errors.clear()
            if decision is Decision.TAKE:
                self.buffer.choose(group, self.clock())
            elif decision is Decision.POSTPONE:
                self.buffer.postpone(group)
            else:
                self.buffer.drop(group, DropReason.FILTERED)
            if await self._stops():
                return True
        return False

    async def _decision(self, group: Group) -> Decision:
        """What ``decide`` says; CallbackError if it raised, took too long, or said nothing."""
        if self.decide is None:
            return Decision.TAKE
        subject = f"the group of prompt {group.prompt.id!r}"
        try:
            decision = await self.hooks.call("decide", self.decide, group, subject=subject)
        except CallbackError:
            raise
        except Exception as error:
            raise CallbackError(
                f"decide failed for {subject}: {error!r}", callback="decide"
            ) from error
        if not isinstance(decision, Decision):
            raise CallbackError(
                f"decide returned {decision!r:.80}, not a Decision, for {subject}",
                callback="decide",
            )
        return decision

    async def _stops(self) -> bool:
        if self.stop is None:
            return False
        try:
            stops = await self.hooks.call("stop", self.stop, self._progress(), subject="the batch")
        except Exception as error:
            error.add_note("`stop`, which collect called, raised this.")
            raise
        if not isinstance(stops, bool):
            raise TypeError(f"stop returned {stops!r}, not True or False")
        return stops

    def _progress(self) -> Progress:
        buffer = self.buffer
        return Progress(
            version=self.plan.version,
            target=self.plan.target,
            chosen=len(buffer.chosen),
            sampling=len(buffer.sampling),
            ready=len(buffer.ready) + len(buffer.postponed),
            seconds=self.clock() - self.started,
        )


@dataclass(slots=True)
class PromptSource:
    """Reads the caller's prompts into ``taken``, in the runner's thread.

    Attributes:
        ended: There are no more.
        error: What the iterator raised.
    """

    prompts: Iterator[Prompt]
    runner: CallbackRunner
    taken: deque[Prompt]
    changed: asyncio.Event
    ended: bool = False
    error: Exception | None = None
    stopped: bool = False
    reading: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether some that were asked for are still to come."""
        return self.reading is not None and not self.reading.done()

    def request(self, count: int) -> None:
        """Has that many read, unless it is busy."""
        if not self.busy and not self.ended:
            self.reading = asyncio.create_task(self._read(count), name="rollwire prompts")

    async def stop(self) -> None:
        """Reads no more. One that the iterator is about to return is taken later."""
        self.stopped = True
        if self.reading is not None and self.busy:
            await asyncio.wait([self.reading], timeout=_STOP_TIMEOUT)

    async def read(self, count: float) -> None:
        """Takes that many; of an endless iterator the reading can be cancelled."""
        loop = asyncio.get_running_loop()
        while count > 0 and not (self.ended or self.stopped):
            turn = partial(self._read_turn, count, loop)
            count -= await self.runner.call_in_thread("prompts", turn, subject="its next prompt")

    async def _read(self, count: int) -> None:
        try:
            await self.read(count)
        except Exception as error:
            self.error, self.ended = error, True
            if self.stopped:
                logger.warning("prompts failed after the batch had ended: %r", error)
        finally:
            self.changed.set()

    def _read_turn(self, most: float, loop: asyncio.AbstractEventLoop) -> int:
        count, until = 0, time.monotonic() + min(_TURN, self.runner.timeout / 2)
        while count < most and time.monotonic() < until and not self.stopped:
            if (prompt := next(self.prompts, _END)) is _END:
                self.ended = True
                break
            count += 1
            self.taken.append(prompt)
            loop.call_soon_threadsafe(self.changed.set)
        return count

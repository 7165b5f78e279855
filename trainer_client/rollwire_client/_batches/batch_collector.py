"""Collects one batch, from its opening to the groups that it hands out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import Batch, Decision, DropReason, Group, Part, Progress
from rollwire_client._batches.group import GroupState, drop_reason, ends_group
from rollwire_client._errors import CallbackError, ClosedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._batches.callbacks import CallbackRunner
    from rollwire_client._batches.group import LiveGroup
    from rollwire_client._batches.group_buffer import BatchPlan, GroupBuffer
    from rollwire_client._batches.progress_bar import ProgressBar
    from rollwire_client._batches.prompt_source import PromptSource


logger = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 8  # of groups: then every group is taken to fail so


class BatchCollector:
    """Collects one batch; call ``collect`` once.

    Args:
        plan: What the batch is to be.
        buffer: Its groups come from there; what is left stays there.
        prompts: Of new groups.
        hooks: Calls ``decide`` and ``stop``.
        decide: See ``Batcher.collect``.
        stop: See ``Batcher.collect``.
        bar: Shows the progress.
        started: When the batch was asked for, on the event loop's clock.
    """

    def __init__(
        self,
        plan: BatchPlan,
        buffer: GroupBuffer,
        prompts: PromptSource,
        hooks: CallbackRunner,
        decide: Callable[[Group], Decision] | None,
        stop: Callable[[Progress], bool] | None,
        bar: ProgressBar,
        started: float,
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._prompts = prompts
        self._hooks = hooks
        self._decide = decide
        self._stop = stop
        self._bar = bar
        self._clock = asyncio.get_running_loop().time
        self._started = started
        self._group_errors: list[Exception] = []  # since the last group that was complete
        self._decide_errors: list[Exception] = []  # since ``decide`` last decided

    async def collect(self) -> Batch:
        """The batch. Left by an exception, it hands out nothing and loses nothing."""
        try:
            try:
                await self._fill()
            finally:
                await self._prompts.stop()
        except BaseException:
            self._buffer.abandon_batch()
            raise
        seconds = self._clock() - self._started
        finished = tuple(group.snapshot() for group in self._buffer.close_batch())
        carried = tuple(group.snapshot() for group in self._buffer.groups.values())
        dropped = self._buffer.take_dropped()
        return Batch(self._plan.version, Part(finished), Part(carried), Part(dropped), seconds)

    async def _fill(self) -> None:
        """Returns when the batch has what it is to have."""
        buffer = self._buffer
        buffer.open(self._plan, self._clock())
        self._resume_groups()
        while True:
            buffer.changed.clear()
            if buffer.closed:
                raise ClosedError("the batcher was closed")
            self._record_ended()
            self._start_groups()
            stopped = await self._decide_on_ready()
            self._show_progress()
            if stopped or buffer.is_over(self._clock()):
                return
            if buffer.prompts or (self._may_start() and not self._prompts.busy):
                continue
            if not (buffer.samples_candidates() or self._prompts.busy):
                self._raise_if_all_fail(self._group_errors, nothing_left=True)
                return  # there are no more prompts
            await self._wait_for_change()

    def _resume_groups(self) -> None:
        """Starts again what failed in or after the batch before, by no fault of the group."""
        for group in self._buffer.groups.values():
            group.lower_oldest_version(self._plan.oldest_version)
        for group in self._buffer.ended():
            if group.error is not None and not ends_group(group.error):
                self._buffer.start(group, self._plan.oldest_version)

    def _record_ended(self) -> None:
        """Raises the first error that every group would meet, once all are recorded."""
        shared: Exception | None = None
        for group in self._buffer.ended():
            try:
                self._record(group)
            except Exception as error:
                shared = shared or error
        if shared is not None:
            raise shared

    def _record(self, group: LiveGroup) -> None:
        error = group.error
        if error is None:
            self._group_errors.clear()
            self._buffer.complete(group)
        elif ends_group(error):
            self._drop_failed(group, drop_reason(error), error, self._group_errors)
        else:
            raise error

    def _drop_failed(
        self, group: LiveGroup, reason: DropReason, error: Exception, errors: list[Exception]
    ) -> None:
        self._buffer.drop(group, reason, error)
        self._record_failure(group.prompt, reason, error, errors)

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
        if many or (nothing_left and not self._buffer.any_completed):
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
        for group in self._buffer.not_started():  # loaded, or saved, perhaps while this goes on
            self._buffer.start(group, self._plan.oldest_version)
        while self._buffer.prompts:
            self._start_group(self._buffer.prompts.popleft())
        if (error := self._prompts.error) is not None:
            error.add_note("So failed `prompts`, which collect takes its prompts from.")
            raise error
        if self._may_start():
            self._prompts.request(self._buffer.room())

    def _start_group(self, prompt: Prompt) -> None:
        try:
            group = self._buffer.add(prompt)
        except InvalidRequestError as error:
            self._buffer.refuse(prompt, error)
            self._record_failure(prompt, DropReason.FAILED, error, self._group_errors)
        except Exception as error:
            self._buffer.refuse(prompt, error)
            raise
        else:
            self._buffer.start(group, self._plan.oldest_version)

    async def _decide_on_ready(self) -> bool:
        """Decides on the groups that are complete; True: ``stop`` ends the batch."""
        while (group := self._buffer.next_ready()) is not None:
            try:
                decision = await self._decision(group.snapshot())
            except CallbackError as error:
                self._drop_failed(group, DropReason.FAILED, error, self._decide_errors)
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
        """What ``decide`` says of a group.

        Raises:
            CallbackError: It raised, took too long, or returned no Decision.
        """
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

    def _show_progress(self) -> None:
        progress = self._progress()
        self._bar.show(progress.chosen, f"{progress.sampling} sampling, {progress.ready} ready")

    def _progress(self) -> Progress:
        count = self._buffer.count
        return Progress(
            version=self._plan.version,
            target=self._plan.target,
            chosen=count(GroupState.CHOSEN),
            sampling=count(GroupState.SAMPLING),
            ready=count(GroupState.READY, GroupState.POSTPONED),
            seconds=self._clock() - self._started,
        )

    async def _wait_for_change(self) -> None:
        deadline = self._buffer.deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                await self._buffer.changed.wait()

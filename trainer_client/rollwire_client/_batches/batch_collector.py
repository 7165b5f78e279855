"""One batch, from its opening to the groups that it hands out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from operator import itemgetter
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import (
    Batch,
    Decision,
    DropReason,
    Group,
    Part,
    Progress,
    Prompt,
)
from rollwire_client._batches.group import is_final, reason_of
from rollwire_client._batches.group_buffer import Ledger, Life
from rollwire_client._batches.pool import Pool
from rollwire_client._batches.training_steps import Steps
from rollwire_client._errors import CallbackError, ClosedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_client._batches.callbacks import Caller, Source
    from rollwire_client._batches.group import LiveGroup, Member, Recipe
    from rollwire_client._batches.group_buffer import Plan
    from rollwire_client._batches.progress_bar import Bar


logger = logging.getLogger(__name__)

_FAILURES = 8  # groups in a row, before what ails them counts as everybody's


class Stock:
    """What outlives a batch.

    Attributes:
        recipe: How they are sampled.
        pool: The groups.
        ledger: What each is; under the same numbers.
        gone: Those that were dropped since the batch before, with their numbers.
        succeeded: Whether any group was ever complete.
        steps: Of the trainer.
        arrived: Prompts that were taken, of which no group was begun yet.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.pool = Pool(recipe)
        self.ledger = Ledger()
        self.gone: list[tuple[int, Group]] = []
        self.succeeded = False
        self.steps = Steps()
        self.arrived: deque[Prompt] = deque()

    def add(self, prompt: Prompt, members: list[Member] | None = None) -> LiveGroup:
        """A group that does not run yet; see ``Pool.add``."""
        group = self.pool.add(prompt, members)
        self.ledger.begin(group.number)
        return group

    def begin_arrived(self) -> None:
        """Makes groups of the prompts that arrived after their batch had ended."""
        while self.arrived:
            prompt = self.arrived.popleft()
            try:
                self.add(prompt)
            except Exception as error:
                self.refuse(prompt, error)

    def drop(self, number: int, why: DropReason, error: Exception | None = None) -> None:
        """Lets go of a group that the ledger has dropped."""
        self.gone.append((number, self.pool.remove(number).snapshot(why, error)))

    def refuse(self, prompt: Prompt, error: Exception) -> None:
        """Tells of a prompt that no group can be begun of, or of what is none."""
        after = next(reversed(self.pool.groups), 0)
        if not isinstance(prompt, Prompt):
            prompt = Prompt(f"{prompt!r:.80}", ())
        self.gone.append((after, Group(prompt, (), DropReason.FAILED, error)))


class Collecting:
    """A batch that is collected: await ``batch`` once.

    Args:
        plan: What it is to be.
        stock: What it is made of, and what it leaves.
        prompts: Taken from where there is room for more.
        hooks: Calls the next two.
        decide: See ``Batcher.collect``, as with ``stop``.
        stop: See there.
        bar: Shows how far it is.
        begun: When it was asked for, on the loop's clock.
    """

    def __init__(
        self,
        plan: Plan,
        stock: Stock,
        prompts: Source,
        hooks: Caller,
        decide: Callable[[Group], Decision] | None,
        stop: Callable[[Progress], bool] | None,
        bar: Bar,
        begun: float,
    ) -> None:
        self._plan = plan
        self._stock = stock
        self._pool, self._ledger = stock.pool, stock.ledger
        self._prompts = prompts
        self._hooks = hooks
        self._decide = decide
        self._stop = stop
        self._bar = bar
        self._clock = asyncio.get_running_loop().time
        self._begun = begun
        self._failures: list[Exception] = []  # of groups, since the last one that was complete
        self._undecided: list[Exception] = []  # of ``decide``, since it last said something

    async def batch(self) -> Batch:
        """What it hands out; left by an exception it hands out nothing, and loses nothing."""
        try:
            try:
                await self._run()
            finally:
                await self._prompts.stop()
        except BaseException:
            self._ledger.abandon()
            raise
        return self._close()

    async def _run(self) -> None:
        """Returns when the batch has what it is to have."""
        for number, group in self._pool.groups.items():
            self._ledger.see(number, group.lag(self._stock.steps))
        for number in self._ledger.open(self._plan, self._clock()):
            self._stock.drop(number, DropReason.STALE)
        self._go_on()
        while True:
            self._pool.changed.clear()
            if self._pool.closed:
                raise ClosedError("the batcher was closed")
            self._settle_all()
            self._admit()
            over = await self._choose()
            self._show()
            if over or self._ledger.is_over(self._clock()):
                return
            if self._stock.arrived or (self._may_begin() and not self._prompts.busy):
                continue
            if not (self._ledger.waits() or self._prompts.busy):
                self._check(self._failures, none_is_left=True)
                return  # there are no more prompts
            await self._change()

    def _close(self) -> Batch:
        seconds = self._clock() - self._begun
        taken, dropped = self._ledger.close()
        for number in dropped:
            self._stock.drop(number, DropReason.TAIL)
        finished = tuple(self._pool.remove(number).snapshot() for number in taken)
        carried = tuple(group.snapshot() for group in self._pool.groups.values())
        gone = tuple(group for _, group in sorted(self._stock.gone, key=itemgetter(0)))
        self._stock.gone.clear()
        return Batch(self._plan.version, Part(finished), Part(carried), Part(gone), seconds)

    def _go_on(self) -> None:
        """Groups that failed between batches are sampled again."""
        for number, group in self._pool.groups.items():
            group.allow(self._plan.oldest_version)
            if self._ledger.entries[number].life is not Life.SAMPLING or group.running:
                continue
            if group.failure is not None and not is_final(group.failure):
                self._pool.run(group, self._plan.oldest_version)

    def _settle_all(self) -> None:
        """Books what groups came to.

        Raises:
            Exception: What every group would meet: the first of them.
        """
        told: Exception | None = None
        for group in self._pool.ended():
            try:
                self._settle(group)
            except Exception as error:  # after the others
                told = told or error
        if told is not None:
            raise told

    def _settle(self, group: LiveGroup) -> None:
        error, number = group.failure, group.number
        if error is None:
            self._pool.settled(group)
            self._failures.clear()
            self._stock.succeeded = True
            if not self._ledger.complete(number, group.lag(self._stock.steps)):
                self._stock.drop(number, DropReason.STALE)
        elif is_final(error):
            self._drop(number, reason_of(error), error)
            self._failed(group.prompt, reason_of(error), error, self._failures)
        else:
            raise error

    def _failed(
        self, prompt: Prompt, why: DropReason, error: Exception, in_a_row: list[Exception]
    ) -> None:
        """A prompt's group was dropped for an error."""
        logger.warning(
            "the group of prompt %r (epoch %d) is dropped as %s: %s",
            prompt.id, prompt.epoch, why.value, error,
        )  # fmt: skip
        error.add_note(f"It is of prompt {prompt.id!r}, whose group is dropped as {why.value}.")
        in_a_row.append(error)
        self._check(in_a_row)

    def _check(self, in_a_row: list[Exception], *, none_is_left: bool = False) -> None:
        """Raises the last of the errors if every group meets them, as far as can be seen.

        Groups whose prompts cannot be sampled end at once, long before the others: so many of those
        in a row say little while others are sampled, and no more are begun until one of these ends.
        That the caller's functions fail in a row says enough.
        """
        if not in_a_row:
            return
        last, count = in_a_row[-1], len(in_a_row)
        many = count >= _FAILURES and (none_is_left or isinstance(last, CallbackError))
        if many or (none_is_left and not self._stock.succeeded):
            last.add_note(f"Groups dropped in a row, with none that was complete: {count}.")
            raise last

    def _may_begin(self) -> bool:
        """Whether there is room for a group, and nothing speaks against one more."""
        return (
            not self._prompts.ended and len(self._failures) < _FAILURES and self._ledger.room() > 0
        )

    def _admit(self) -> None:
        """Begins groups of the prompts that arrived, and asks for more where there is room."""
        for group in self._pool.not_begun():  # loaded, or saved, perhaps while this goes on
            self._pool.run(group, self._plan.oldest_version)
        while self._stock.arrived:
            self._begin(self._stock.arrived.popleft())
        if (error := self._prompts.error) is not None:
            error.add_note("So failed `prompts`, which collect takes its prompts from.")
            raise error
        if self._may_begin():
            self._prompts.ask(self._ledger.room())

    def _begin(self, prompt: Prompt) -> None:
        try:
            group = self._stock.add(prompt)
        except InvalidRequestError as error:
            self._stock.refuse(prompt, error)
            self._failed(prompt, DropReason.FAILED, error, self._failures)
        except Exception as error:
            self._stock.refuse(prompt, error)
            raise
        else:
            self._pool.run(group, self._plan.oldest_version)

    async def _choose(self) -> bool:
        """Decides on what is complete; True ends the batch."""
        while (number := self._ledger.offered()) is not None:
            try:
                decision = await self._decision(self._pool.groups[number].snapshot())
            except CallbackError as error:
                prompt = self._pool.groups[number].prompt
                self._drop(number, DropReason.FAILED, error)
                self._failed(prompt, DropReason.FAILED, error, self._undecided)
                continue
            self._undecided.clear()
            if decision is Decision.TAKE:
                self._ledger.choose(number, self._clock())
            elif decision is Decision.POSTPONE:
                self._ledger.postpone(number)
            else:
                self._drop(number, DropReason.FILTERED)
            if self._stop is not None and await self._stops(self._stop):
                return True
        return False

    async def _stops(self, stop: Callable[[Progress], bool]) -> bool:
        """Whether the caller ends the batch here."""
        try:
            stopped = await self._hooks.call("stop", stop, self._progress(), of="the batch")
        except Exception as error:
            error.add_note("So failed `stop`, which collect was given.")
            raise
        if not isinstance(stopped, bool):
            raise TypeError(f"stop returned {stopped!r}, not True or False")
        return stopped

    async def _decision(self, group: Group) -> Decision:
        """What the caller says of a group that is complete.

        Raises:
            CallbackError: It raised, took too long, or said none.
        """
        if self._decide is None:
            return Decision.TAKE
        of = f"the group of prompt {group.prompt.id!r}"
        try:
            decision = await self._hooks.call("decide", self._decide, group, of=of)
        except CallbackError:
            raise
        except Exception as error:
            told = f"decide failed at the group of prompt {group.prompt.id!r}: {error!r}"
            raise CallbackError(told, callback="decide") from error
        if not isinstance(decision, Decision):
            told = (
                f"decide returned {decision!r:.80}, not a Decision, of prompt {group.prompt.id!r}"
            )
            raise CallbackError(told, callback="decide")
        return decision

    def _show(self) -> None:
        now = self._progress()
        self._bar.show(now.chosen, f"{now.sampling} sampling, {now.ready} ready")

    def _drop(self, number: int, why: DropReason, error: Exception | None = None) -> None:
        self._ledger.drop(number)
        self._stock.drop(number, why, error)

    def _progress(self) -> Progress:
        count = self._ledger.count
        return Progress(
            version=self._plan.version,
            target=self._plan.target,
            chosen=count(Life.CHOSEN),
            sampling=count(Life.SAMPLING),
            ready=count(Life.READY, Life.POSTPONED),
            seconds=self._clock() - self._begun,
        )

    async def _change(self) -> None:
        """Waits for a group to end, or for the tail's time to be up."""
        deadline = self._ledger.deadline()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline if deadline < math.inf else None):
                await self._pool.changed.wait()

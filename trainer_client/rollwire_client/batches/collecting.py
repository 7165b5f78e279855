"""One batch, from its opening to the groups that it hands out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from operator import itemgetter
from typing import TYPE_CHECKING

from rollwire_client.batches.data import (
    Batch,
    Decision,
    DropReason,
    Group,
    Part,
    Progress,
    Prompt,
)
from rollwire_client.batches.group import is_final, reason_of
from rollwire_client.batches.ledger import Ledger, Life
from rollwire_client.batches.pool import Pool
from rollwire_client.batches.steps import Steps
from rollwire_client.errors import CallbackError, ClosedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollwire_client.batches.bar import Bar
    from rollwire_client.batches.group import LiveGroup, Member, Recipe
    from rollwire_client.batches.ledger import Plan


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
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.pool = Pool(recipe)
        self.ledger = Ledger()
        self.gone: list[tuple[int, Group]] = []
        self.succeeded = False
        self.steps = Steps()

    def add(self, prompt: Prompt, members: list[Member] | None = None) -> LiveGroup:
        """A group that does not run yet; see ``Pool.add``."""
        group = self.pool.add(prompt, members)
        self.ledger.begin(group.number)
        return group

    def drop(self, number: int, why: DropReason, error: Exception | None = None) -> None:
        """Lets go of a group that the ledger has dropped."""
        self.gone.append((number, self.pool.remove(number).snapshot(why, error)))

    def refuse(self, prompt: Prompt, error: Exception) -> None:
        """Tells of a prompt that no group can be begun of."""
        after = next(reversed(self.pool.groups), 0)
        self.gone.append((after, Group(prompt, (), DropReason.FAILED, error)))


class Collecting:
    """A batch that is collected: await ``batch`` once.

    Args:
        plan: What it is to be.
        stock: What it is made of, and what it leaves.
        prompts: Where there is room for more.
        decide: See ``Batcher.collect``, as with ``stop``.
        stop: See there.
        bar: Shows how far it is.
        begun: When it was asked for, on the loop's clock.
    """

    def __init__(
        self,
        plan: Plan,
        stock: Stock,
        prompts: Iterator[Prompt],
        decide: Callable[[Group], Decision],
        stop: Callable[[Progress], bool],
        bar: Bar,
        begun: float,
    ) -> None:
        self._plan = plan
        self._stock = stock
        self._pool, self._ledger = stock.pool, stock.ledger
        self._prompts = prompts
        self._decide = decide
        self._stop = stop
        self._bar = bar
        self._clock = asyncio.get_running_loop().time
        self._begun = begun
        self._more = True  # prompts
        self._failures: list[Exception] = []  # of groups, since the last one that was complete
        self._undecided: list[Exception] = []  # of ``decide``, since it last said something

    async def batch(self) -> Batch:
        """What it hands out; left by an exception it hands out nothing, and loses nothing."""
        try:
            await self._run()
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
            over = self._choose()
            self._show()
            if over or self._ledger.is_over(self._clock()):
                return
            if self._may_begin():
                continue
            if not self._ledger.waits():
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
        """Groups that failed between batches, or were loaded, are sampled again."""
        for number, group in self._pool.groups.items():
            group.allow(self._plan.oldest_version)
            if self._ledger.entries[number].life is not Life.SAMPLING or group.running:
                continue
            passing = group.failure is not None and not is_final(group.failure)
            if passing or group.task is None:
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
            last.add_note(f"It is the last of {count} groups in a row that were dropped so.")
            raise last

    def _may_begin(self) -> bool:
        """Whether there is room for a group, and nothing speaks against one more."""
        room = self._more and self._ledger.room()
        return bool(room) and len(self._failures) < _FAILURES

    def _admit(self) -> None:
        while self._may_begin():
            if (prompt := next(self._prompts, None)) is None:
                self._more = False
                return
            if not isinstance(prompt, Prompt):
                raise TypeError(f"prompts gave {prompt!r:.80}, not a Prompt(id, token_ids)")
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

    def _choose(self) -> bool:
        """Decides on what is complete; True ends the batch."""
        while (number := self._ledger.offered()) is not None:
            try:
                decision = self._decision(self._pool.groups[number].snapshot())
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
            stopped = self._stop(self._progress())
            if not isinstance(stopped, bool):
                raise TypeError(f"stop returned {stopped!r}, not True or False")
            if stopped:
                return True
        return False

    def _decision(self, group: Group) -> Decision:
        """What the caller says of a group that is complete.

        Raises:
            CallbackError: It raised, or said none.
        """
        try:
            decision = self._decide(group)
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

"""The groups of a ``Batcher`` between their start and their batch.

    sampling ──▶ ready ──▶ chosen ──▶ handed out
                  ▲  │        │
                  │  ▼        │ the batch hands out nothing
               postponed      └──▶ ready

A group can be dropped wherever it is, unless it is chosen. A batch of ``target`` groups keeps
``started`` = target * over_sample groups going: its *candidates*, the oldest first. Groups beyond
those are prefetched for later batches, and become candidates as older ones leave.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import Carry, Drop, DropReason, Group, Prompt, Tail
from rollwire_client._batches.group import check_unique
from rollwire_client._batches.trainer_steps import TrainerSteps
from rollwire_client._concurrency import cancel_all

if TYPE_CHECKING:
    from rollwire_client._batches.group import GroupSampler, LiveGroup

_FIRST_SHARE = 0.8  # of the target: the time that these take is what patience multiplies
_DROP = Drop()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch is to be; see ``Batcher.collect``.

    Attributes:
        oldest_version: The oldest version that may sample for it; None: any.
    """

    target: int
    over_sample: float = 1.0
    prefetch: int = 0
    tail: Tail = _DROP
    version: int | None = None
    max_lag: int | None = None
    oldest_version: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.tail, Tail):
            raise TypeError(f"tail is {self.tail!r}, not Drop(…) or Carry(…)")
        if not 1 <= self.over_sample < math.inf:
            raise ValueError(f"over_sample is {self.over_sample!r}, not a number from 1 on")
        if self.max_lag is None:
            return
        if self.version is None:
            raise ValueError("max_lag needs the trainer's version: publish one, or pass version=…")
        if self.max_lag == 0 and (self.carried or self.prefetch):
            raise ValueError(
                "with max_lag=0 no batch can use what was sampled for an earlier one: drop the "
                "tail, leave prefetch out, or allow a lag of 1"
            )

    @property
    def started(self) -> int:
        """Groups that it keeps going."""
        return math.ceil(round(self.target * self.over_sample, 9))

    @property
    def carried(self) -> int:
        """How many of those at least are left to later batches."""
        return self.started - self.target if isinstance(self.tail, Carry) else 0

    def is_stale(self, lag: float) -> bool:
        return self.max_lag is not None and lag > self.max_lag


class GroupBuffer:
    """All groups that are neither handed out nor dropped, and the batch that is open, if one is.

    Each group is in ``groups``, the oldest first, and in the table of its state, in the order in
    which they came to it, so that no question about a batch has to look at all groups.
    """

    def __init__(self, sampler: GroupSampler) -> None:
        self.sampler = sampler
        self.groups: dict[int, LiveGroup] = {}
        self.sampling: dict[int, LiveGroup] = {}  # also before they start, or once they failed
        self.ready: dict[int, LiveGroup] = {}  # complete
        self.postponed: dict[int, LiveGroup] = {}  # complete, for the next batch to decide on
        self.chosen: dict[int, LiveGroup] = {}  # part of the open batch
        self.unstarted: list[LiveGroup] = []  # of those that are sampled
        self.steps = TrainerSteps()
        self.prompts: deque[Prompt] = deque()  # of which no groups are made yet
        self.dropped: dict[int, Group] = {}  # and not reported yet
        self.changed = asyncio.Event()  # a group has ended, a prompt has come, or ``close``
        self.closed = False
        self.completed = 0  # groups so far
        self._numbers = 0  # given so far
        self._keys: set[tuple[str, int]] = set()
        self._ended: list[tuple[LiveGroup, Exception | None]] = []
        self._cancelled: set[asyncio.Task[None]] = set()
        self._plan: BatchPlan  # of the open batch
        self._opened = 0.0
        self._first_share_at = math.inf
        self._newest_candidate: int | None = None  # None: to be found again

    # Groups: added, started, ended.

    def add(self, prompt: Prompt) -> LiveGroup:
        return self.add_group(self.sampler.new_group(prompt))

    def add_group(self, group: LiveGroup) -> LiveGroup:
        check_unique(group.prompt, self._keys)
        group.number = self._new_number()
        self.groups[group.number] = self.sampling[group.number] = group
        self.unstarted.append(group)
        self._newest_candidate = None
        return group

    def add_prompts(self) -> None:
        """Makes groups of the prompts that came after their batch had ended."""
        while self.prompts:
            prompt = self.prompts.popleft()
            try:
                self.add(prompt)
            except Exception as error:
                self.refuse(prompt, error)

    def start_all(self, oldest_version: int | None) -> None:
        """Samples all that is not, from what it has on, under that version or newer ones."""
        unstarted, self.unstarted = self.unstarted, []
        for group in unstarted:
            if group.number in self.sampling:
                name = f"rollwire {group.prompt.id}"
                group.oldest_version = oldest_version
                group.task = asyncio.create_task(self._sample(group), name=name)

    async def _sample(self, group: LiveGroup) -> None:
        error: Exception | None = None
        try:
            await self.sampler.sample(group)
        except Exception as raised:
            error = raised
        self._ended.append((group, error))
        self.changed.set()

    def take_ended(self) -> list[tuple[LiveGroup, Exception | None]]:
        """The groups whose samples have ended since the last call, with the error if one failed."""
        ended, self._ended = self._ended, []
        return [(group, error) for group, error in ended if group.number in self.sampling]

    def complete(self, group: LiveGroup) -> None:
        """All its samples are complete. If that is too old for the open batch, it is dropped."""
        self.ready[group.number] = self.sampling.pop(group.number)
        self.completed += 1
        group.completed = self.completed
        if self._plan.is_stale(self._lag(group)):
            self.drop(group, DropReason.STALE)

    def drop(self, group: LiveGroup, reason: DropReason, error: Exception | None = None) -> None:
        """Frees its place, and aborts what is under way of it."""
        self._remove(group)
        self.dropped[group.number] = group.snapshot(reason, error)

    def refuse(self, prompt: Prompt, error: Exception) -> None:
        """Counts as dropped what no group can be made of, also if it is no prompt at all."""
        if not isinstance(prompt, Prompt):
            prompt = Prompt(f"{prompt!r:.80}", ())
        self.dropped[self._new_number()] = Group(prompt, (), DropReason.FAILED, error)

    def take_dropped(self) -> tuple[Group, ...]:
        """Those that were dropped since the last call, the oldest first."""
        dropped, self.dropped = self.dropped, {}
        return tuple(dropped[number] for number in sorted(dropped))

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self.closed = True
        self.changed.set()
        tasks = [group.task for group in self.groups.values() if group.task is not None]
        await cancel_all([*tasks, *self._cancelled])

    # The batch that is open.

    def open(self, plan: BatchPlan, now: float) -> None:
        """Begins a batch, which decides on all complete groups again, in the order in which they
        completed. Groups that are too old for it are dropped.
        """
        self._plan, self._opened, self._first_share_at = plan, now, math.inf
        complete = [*self.ready.values(), *self.postponed.values(), *self.chosen.values()]
        complete.sort(key=attrgetter("completed"))
        self.ready = {group.number: group for group in complete}
        self.postponed, self.chosen = {}, {}
        self._newest_candidate = None
        for group in list(self.groups.values()):
            if plan.is_stale(self._lag(group)):
                self.drop(group, DropReason.STALE)

    def room(self) -> int:
        """How many groups are to be begun now.

        Groups that are left to later batches are handed out ``max_lag`` batches later at the
        latest if there are at most max_lag * target of them (the admission control of AReaL,
        arXiv:2505.24298, in groups). The batch's own target is never held up by that.
        """
        plan = self._plan
        most = plan.started + plan.prefetch
        if plan.max_lag is not None:
            later = plan.prefetch + plan.carried
            allowed = max(plan.max_lag * plan.target - len(self.postponed), 0)
            most -= max(later - allowed, 0)
        return max(most - (len(self.groups) - len(self.postponed)), 0)

    def next_ready(self) -> LiveGroup | None:
        """The group to decide on next: the candidate that was complete first."""
        plan = self._plan
        if len(self.chosen) >= (plan.started if plan.tail.patience > 1 else plan.target):
            return None
        return next((group for group in self.ready.values() if self._is_candidate(group)), None)

    def choose(self, group: LiveGroup, now: float) -> None:
        """Makes it part of the batch."""
        self.chosen[group.number] = self.ready.pop(group.number)
        if len(self.chosen) >= _FIRST_SHARE * self._plan.target:
            self._first_share_at = min(self._first_share_at, now)

    def postpone(self, group: LiveGroup) -> None:
        self.postponed[group.number] = self.ready.pop(group.number)
        self._newest_candidate = None

    def deadline(self) -> float:
        """Until when the batch waits for unfinished groups; infinity below its target."""
        if len(self.chosen) < self._plan.target:
            return math.inf
        return self._opened + self._plan.tail.patience * (self._first_share_at - self._opened)

    def is_over(self, now: float) -> bool:
        """Whether the batch has its target, and waits for no other group."""
        deadline = self.deadline()
        return now >= deadline or (deadline < math.inf and not self.samples_candidates())

    def samples_candidates(self) -> bool:
        """Whether a group that may become part of the batch is still sampled."""
        oldest = next(iter(self.sampling.values()), None)
        return oldest is not None and self._is_candidate(oldest)

    def close_batch(self) -> list[LiveGroup]:
        """Hands out the chosen groups. The other candidates are dropped, or carried."""
        candidates = self._candidates()
        finished = [group for group in candidates if group.number in self.chosen]
        for group in finished:
            self._remove(group)
        if not isinstance(self._plan.tail, Carry):
            for group in candidates:
                if group.number in self.groups:
                    self.drop(group, DropReason.TAIL)
        return finished

    def _lag(self, group: LiveGroup) -> float:
        """Steps that its oldest token is behind the trainer: minus infinity without a token, and
        infinity if weights without a version sampled one.
        """
        weights = (tag for sample in group.samples for tag in sample.weights)
        return max(map(self.steps.lag, weights), default=-math.inf)

    def _candidates(self) -> list[LiveGroup]:
        live = (group for group in self.groups.values() if group.number not in self.postponed)
        return list(islice(live, self._plan.started))

    def _is_candidate(self, group: LiveGroup) -> bool:
        if self._newest_candidate is None:
            candidates = self._candidates()
            self._newest_candidate = candidates[-1].number if candidates else 0
        return group.number <= self._newest_candidate

    def _new_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _remove(self, group: LiveGroup) -> None:
        for table in (self.groups, self.sampling, self.ready, self.postponed, self.chosen):
            table.pop(group.number, None)
        self._keys.discard((group.prompt.id, group.prompt.epoch))
        self._newest_candidate = None
        if group.task is not None and not group.task.done():
            group.task.cancel()
            self._cancelled.add(group.task)
            group.task.add_done_callback(self._cancelled.discard)

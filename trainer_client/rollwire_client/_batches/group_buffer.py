"""The groups of a ``Batcher`` between their start and their batch.

    SAMPLING ──▶ READY ──▶ CHOSEN ──▶ handed out
                  ▲  │        │
                  │  ▼        │ its batch was abandoned
            POSTPONED         └──▶ READY

A group can be dropped in any state but CHOSEN. A batch of ``target`` groups keeps ``started`` =
target * over_sample groups going: its *candidates*, the oldest first. Groups beyond those are
prefetched for later batches, and become candidates as older ones leave.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from rollwire_client._arguments import checked_version
from rollwire_client._batches.batch import Carry, Drop, DropReason, Group, Prompt, Tail
from rollwire_client._batches.group import GroupState
from rollwire_client._batches.trainer_steps import TrainerSteps
from rollwire_client._concurrency import cancel_all

if TYPE_CHECKING:
    from rollwire_client._batches.group import GroupSampler, LiveGroup

_SAMPLING, _READY, _POSTPONED, _CHOSEN = GroupState
_BEFORE = {_READY: {_SAMPLING, _POSTPONED, _CHOSEN}, _POSTPONED: {_READY}, _CHOSEN: {_READY}}
_FIRST_SHARE = 0.8  # of the target: the time that these take is what patience multiplies
_DROP = Drop()


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a batch is to be.

    Attributes:
        target: Groups, at least 1.
        over_sample: Times as many are kept going, at least 1.
        prefetch: Groups that are begun beyond those, for later batches.
        tail: What becomes of what is unfinished at its end.
        version: The trainer's step; None: nothing is too old.
        max_lag: Steps that the oldest token of a group may be behind; None: nothing is too old.
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
        checked_version("version", self.version)
        if self.target < 1 or self.prefetch < 0 or (self.max_lag is not None and self.max_lag < 0):
            raise ValueError(
                f"target is {self.target}, from 1 on; prefetch {self.prefetch} and max_lag "
                f"{self.max_lag}, from 0 on"
            )
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
        """Whether a group with this lag (see ``LiveGroup.lag``) is too old to train on."""
        return self.max_lag is not None and lag > self.max_lag


class GroupBuffer:
    """All groups that are neither handed out nor dropped, and the batch that is open, if one is.

    Attributes:
        sampler: Samples the groups.
        groups: By number: the oldest first.
        steps: Of the trainer; lag is counted in them.
        prompts: Were read from the caller's iterator, and have no group yet.
        changed: Set when a group's task has ended, when a prompt has come, and by ``close``.
        closed: No group is sampled any more.
    """

    def __init__(self, sampler: GroupSampler) -> None:
        self.sampler = sampler
        self.groups: dict[int, LiveGroup] = {}
        self.steps = TrainerSteps()
        self.prompts: deque[Prompt] = deque()
        self.changed = asyncio.Event()
        self.closed = False
        # By state, in the order in which they came to it: so that no question about a batch has to
        # look at all groups.
        self._in_state: dict[GroupState, dict[int, LiveGroup]] = {s: {} for s in GroupState}
        self._keys: set[tuple[str, int]] = set()
        self._added = 0
        self._completed = 0
        self._dropped: list[tuple[int, Group]] = []  # with the numbers that order them
        self._cancelled: set[asyncio.Task[None]] = set()
        self._plan: BatchPlan | None = None
        self._opened = 0.0
        self._first_share_at = math.inf
        self._newest_candidate: int | None = None  # None: to be found again

    # Groups: added, started, ended.

    def add(self, prompt: Prompt) -> LiveGroup:
        """A new group of a prompt, which is not started.

        Raises:
            Exception: See ``checked_prompt`` and ``add_group``.
        """
        return self.add_group(self.sampler.new_group(prompt))

    def add_group(self, group: LiveGroup) -> LiveGroup:
        """The group, which is not started.

        Raises:
            ValueError: The same prompt is under way in the same epoch: samples would be equal.
        """
        key = group.prompt.id, group.prompt.epoch
        if key in self._keys:
            raise ValueError(
                f"prompt {group.prompt.id!r} of epoch {group.prompt.epoch} is under way already: "
                f"the seeds of its samples would be equal; give each pass over the data its epoch"
            )
        self._added += 1
        group.number = self._added
        self.groups[group.number] = self._in_state[group.state][group.number] = group
        self._keys.add(key)
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

    def start(self, group: LiveGroup, oldest_version: int | None) -> None:
        """Samples it, from what it has on, under weights of that version or newer ones."""
        group.oldest_version, group.ended, group.error = oldest_version, False, None
        group.task = asyncio.create_task(self._sample(group), name=f"rollwire {group.prompt.id}")

    async def _sample(self, group: LiveGroup) -> None:
        try:
            await self.sampler.sample(group)
        except Exception as error:  # the next batch raises it, or drops the group
            group.error = error
        group.ended = True
        self.changed.set()

    def not_started(self) -> list[LiveGroup]:
        return [group for group in self._in_state[_SAMPLING].values() if group.task is None]

    def ended(self) -> list[LiveGroup]:
        """Those whose task has ended, and that are neither complete nor dropped yet."""
        return [group for group in self._in_state[_SAMPLING].values() if group.ended]

    def complete(self, group: LiveGroup) -> None:
        """All its samples are complete. If that is too old for the open batch, it is dropped."""
        self._move(group, _READY)
        self._completed += 1
        group.completed = self._completed
        if self._plan is not None and self._plan.is_stale(group.lag(self.steps)):
            self.drop(group, DropReason.STALE)

    def drop(self, group: LiveGroup, reason: DropReason, error: Exception | None = None) -> None:
        """Frees its place, and aborts what is under way of it."""
        self._remove(group)
        self._dropped.append((group.number, group.snapshot(reason, error)))

    def refuse(self, prompt: Prompt, error: Exception) -> None:
        """Counts as dropped what no group can be made of, also if it is no prompt at all."""
        newest = next(reversed(self.groups), 0)
        if not isinstance(prompt, Prompt):
            prompt = Prompt(f"{prompt!r:.80}", ())
        self._dropped.append((newest, Group(prompt, (), DropReason.FAILED, error)))

    def take_dropped(self) -> tuple[Group, ...]:
        """Those that were dropped since the last call, the oldest first."""
        dropped = sorted(self._dropped, key=itemgetter(0))
        self._dropped.clear()
        return tuple(group for _, group in dropped)

    @property
    def dropped_count(self) -> int:
        """How many were dropped since the last ``take_dropped``."""
        return len(self._dropped)

    @property
    def any_completed(self) -> bool:
        """Whether a group was ever complete."""
        return self._completed > 0

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self.closed = True
        self.changed.set()
        tasks = [group.task for group in self.groups.values() if group.task is not None]
        await cancel_all([*tasks, *self._cancelled])

    # The batch that is open.

    def open(self, plan: BatchPlan, now: float) -> None:
        """Begins a batch; groups that are too old for it are dropped."""
        if self._plan is not None:
            raise RuntimeError("a batch is open already")
        self._plan, self._opened, self._first_share_at = plan, now, math.inf
        self._reopen()
        for group in list(self.groups.values()):
            if plan.is_stale(group.lag(self.steps)):
                self.drop(group, DropReason.STALE)

    def room(self) -> int:
        """How many groups are to be begun now.

        Groups that are left to later batches are handed out ``max_lag`` batches later at the
        latest if there are at most max_lag * target of them (the admission control of AReaL,
        arXiv:2505.24298, in groups). The batch's own target is never held up by that.
        """
        plan = self._open_plan
        most = plan.started + plan.prefetch
        if plan.max_lag is not None:
            later = plan.prefetch + plan.carried
            allowed = max(plan.max_lag * plan.target - self.count(_POSTPONED), 0)
            most -= max(later - allowed, 0)
        return max(most - self.count(_SAMPLING, _READY, _CHOSEN), 0)

    def next_ready(self) -> LiveGroup | None:
        """The group to decide on next: the candidate that was complete first."""
        plan = self._open_plan
        if self.count(_CHOSEN) >= (plan.started if plan.tail.patience > 1 else plan.target):
            return None
        ready = self._in_state[_READY].values()
        return next((group for group in ready if self._is_candidate(group)), None)

    def choose(self, group: LiveGroup, now: float) -> None:
        """It is part of the batch."""
        self._move(group, _CHOSEN)
        if self.count(_CHOSEN) >= _FIRST_SHARE * self._open_plan.target:
            self._first_share_at = min(self._first_share_at, now)

    def postpone(self, group: LiveGroup) -> None:
        """It waits for the next batch."""
        self._move(group, _POSTPONED)

    def deadline(self) -> float:
        """Until when the batch waits for unfinished groups; infinity below its target."""
        if self.count(_CHOSEN) < self._open_plan.target:
            return math.inf
        patience = self._open_plan.tail.patience
        return self._opened + patience * (self._first_share_at - self._opened)

    def is_over(self, now: float) -> bool:
        """Whether the batch has its target, and waits for no other group."""
        deadline = self.deadline()
        return now >= deadline or (deadline < math.inf and not self.samples_candidates())

    def samples_candidates(self) -> bool:
        """Whether a group that may become part of the batch is still sampled."""
        oldest = next(iter(self._in_state[_SAMPLING].values()), None)
        return oldest is not None and self._is_candidate(oldest)

    def close_batch(self) -> list[LiveGroup]:
        """Ends the batch: the groups that it hands out. Its other candidates are dropped, unless
        the tail is carried.
        """
        plan = self._open_plan
        candidates = self._candidates()
        finished = [group for group in candidates if group.state is _CHOSEN]
        for group in finished:
            self._remove(group)
        if not isinstance(plan.tail, Carry):
            for group in candidates:
                if group.state is not _CHOSEN:
                    self.drop(group, DropReason.TAIL)
        self._plan = None
        return finished

    def abandon_batch(self) -> None:
        """Ends the batch without handing anything out; what was dropped stays dropped."""
        self._plan = None
        self._reopen()

    def count(self, *states: GroupState) -> int:
        return sum(len(self._in_state[state]) for state in states)

    @property
    def _open_plan(self) -> BatchPlan:
        if self._plan is None:
            raise RuntimeError("no batch is open")
        return self._plan

    def _candidates(self) -> list[LiveGroup]:
        live = [group for group in self.groups.values() if group.state is not _POSTPONED]
        return live[: self._open_plan.started]

    def _is_candidate(self, group: LiveGroup) -> bool:
        if self._newest_candidate is None:
            candidates = self._candidates()
            self._newest_candidate = candidates[-1].number if candidates else 0
        return group.number <= self._newest_candidate

    def _reopen(self) -> None:
        """All complete groups are to be decided on again, in the order of their ends."""
        for group in [*self._in_state[_POSTPONED].values(), *self._in_state[_CHOSEN].values()]:
            self._move(group, _READY)
        ready = sorted(self._in_state[_READY].values(), key=attrgetter("completed"))
        self._in_state[_READY] = {group.number: group for group in ready}
        self._newest_candidate = None

    def _move(self, group: LiveGroup, state: GroupState) -> None:
        if group.state not in _BEFORE[state]:
            raise ValueError(
                f"group {group.number} is {group.state.value}, not to be {state.value}"
            )
        if _POSTPONED in (group.state, state):
            self._newest_candidate = None
        del self._in_state[group.state][group.number]
        self._in_state[state][group.number] = group
        group.state = state

    def _remove(self, group: LiveGroup) -> None:
        del self.groups[group.number], self._in_state[group.state][group.number]
        self._keys.discard((group.prompt.id, group.prompt.epoch))
        self._newest_candidate = None
        if group.task is not None and not group.task.done():
            group.task.cancel()
            self._cancelled.add(group.task)
            group.task.add_done_callback(self._cancelled.discard)

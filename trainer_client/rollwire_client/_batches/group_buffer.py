"""Which groups there are, and which are whose: the books of a ``Batcher``, without clocks or tasks.

A group lives like this; what is taken or dropped is gone.

    SAMPLING ──▶ READY ──▶ CHOSEN ──▶ taken
                  ▲  │        │
                  │  ▼        │ its batch was abandoned
            POSTPONED         └──▶ READY

A batch of ``target`` groups keeps ``started`` = target * over_sample of them going: its
*candidates*, the oldest first. Those that are begun beyond that are *ahead*: they are for later
batches, and become candidates as older ones go.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from rollwire_client._arguments import checked_version
from rollwire_client._batches.batch import Carry, Drop, Tail


class Life(enum.Enum):
    """What a group is."""

    SAMPLING = "sampling"
    READY = "ready"
    POSTPONED = "postponed"
    CHOSEN = "chosen"
    TAKEN = "taken"
    DROPPED = "dropped"


class Event(enum.Enum):
    """What happens to it."""

    COMPLETE = "complete"
    """Its last sample came to its end."""
    CHOOSE = "choose"
    """It is to be part of the batch that is open."""
    POSTPONE = "postpone"
    """It is to wait for the next batch."""
    REOPEN = "reopen"
    """A batch is opened, or was abandoned."""
    TAKE = "take"
    """Its batch was handed out."""
    DROP = "drop"
    """It will never be."""


TRANSITIONS: dict[Life, dict[Event, Life]] = {
    Life.SAMPLING: {Event.COMPLETE: Life.READY, Event.DROP: Life.DROPPED},
    Life.READY: {
        Event.CHOOSE: Life.CHOSEN,
        Event.POSTPONE: Life.POSTPONED,
        Event.DROP: Life.DROPPED,
    },
    Life.POSTPONED: {Event.REOPEN: Life.READY, Event.DROP: Life.DROPPED},
    Life.CHOSEN: {Event.TAKE: Life.TAKEN, Event.REOPEN: Life.READY},
    Life.TAKEN: {},
    Life.DROPPED: {},
}

_LIVE = (Life.SAMPLING, Life.READY, Life.CHOSEN)  # for the batch that is open, or one after it

FIRST_SHARE = 0.8  # of the target: how long these take is what patience is measured by


_DROP = Drop()


@dataclass(frozen=True, slots=True)
class Plan:
    """What a batch is to be.

    Attributes:
        target: Groups, at least 1.
        over_sample: Times as many are kept going, at least 1.
        prefetch: Groups that are begun beyond those, for later batches.
        tail: What becomes of what is unfinished at its end.
        version: The trainer's step; None: nothing is too old.
        max_lag: Steps that the oldest token of a group may be behind; None: nothing is too old.
        oldest_version: That may sample for it; None: any.
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
            raise ValueError("max_lag needs the trainer's version: publish one, or say version=…")
        if self.max_lag == 0 and (self.outlives or self.prefetch):
            raise ValueError(
                "with max_lag=0 no batch can use what was sampled for an earlier one: drop the "
                "tail, leave prefetch out, or allow a lag of 1"
            )

    @property
    def started(self) -> int:
        """Groups that it keeps going."""
        return math.ceil(round(self.target * self.over_sample, 9))

    @property
    def outlives(self) -> int:
        """How many of those are for later batches, at least."""
        return self.started - self.target if isinstance(self.tail, Carry) else 0

    def is_stale(self, lag: float) -> bool:
        """Whether a group whose oldest token is so many steps behind is not to be trained on."""
        return self.max_lag is not None and lag > self.max_lag


@dataclass(slots=True)
class Entry:
    """A group.

    Attributes:
        life: What it is.
        lag: Steps that its oldest token is behind the trainer: minus infinity until there is one,
            and infinity if one is of weights without a version.
        completed: Counts the groups that were complete before it.
    """

    life: Life = Life.SAMPLING
    lag: float = -math.inf
    completed: int = 0


class Ledger:
    """The groups by number, which rises; and the batch that is open, if one is."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self._of: dict[Life, dict[int, None]] = {life: {} for life in Life}  # as they became it
        self._plan: Plan | None = None
        self._opened = 0.0
        self._first_share_at = math.inf
        self._completed = 0
        self._newest_candidate: int | None = None  # None: not known

    def count(self, *lives: Life) -> int:
        """Groups that are one of these."""
        return sum(len(self._of[life]) for life in lives)

    def open(self, plan: Plan, now: float) -> list[int]:
        """Begins a batch; the groups that are too old for it, which it has dropped."""
        if self._plan is not None:
            raise RuntimeError("a batch is open already")
        self._plan, self._opened, self._first_share_at = plan, now, math.inf
        self._reopen()
        stale = [n for n, entry in self.entries.items() if plan.is_stale(entry.lag)]
        for number in stale:
            self.drop(number)
        return stale

    def room(self) -> int:
        """How many groups are to be begun now.

        Groups that outlive the batch are handed out ``max_lag`` batches later at the latest, if
        there are at most max_lag * target of them (the admission control of AReaL,
        arXiv:2505.24298, in groups). A drop gives its place back by itself. The batch's own target
        is never held up by that.
        """
        plan = self._open_plan
        most = plan.started + plan.prefetch
        if plan.max_lag is not None:
            later = plan.prefetch + plan.outlives
            allowed = max(plan.max_lag * plan.target - self.count(Life.POSTPONED), 0)
            most -= max(later - allowed, 0)
        return max(most - self.count(*_LIVE), 0)

    def begin(self, number: int) -> None:
        """A group is begun."""
        if self.entries and number <= next(reversed(self.entries)):
            raise ValueError(f"group {number} is not the newest")
        self.entries[number] = Entry()
        self._of[Life.SAMPLING][number] = None
        self._newest_candidate = None

    def see(self, number: int, lag: float) -> None:
        """How far the oldest token that a group has is behind by now."""
        self.entries[number].lag = lag

    def complete(self, number: int, lag: float) -> bool:
        """A group is complete; False: it is too old for the batch that is open, and dropped."""
        entry = self._move(number, Event.COMPLETE)
        self._completed += 1
        entry.lag, entry.completed = lag, self._completed
        if self._plan is not None and self._plan.is_stale(lag):
            self.drop(number)
            return False
        return True

    def offered(self) -> int | None:
        """The group that is to be decided on next: the candidate that was complete first."""
        plan = self._open_plan
        if self.count(Life.CHOSEN) >= (plan.started if plan.tail.patience > 1 else plan.target):
            return None
        return next((n for n in self._of[Life.READY] if self._is_candidate(n)), None)

    def choose(self, number: int, now: float) -> None:
        """It is part of the batch."""
        self._move(number, Event.CHOOSE)
        if self.count(Life.CHOSEN) >= FIRST_SHARE * self._open_plan.target:
            self._first_share_at = min(self._first_share_at, now)

    def postpone(self, number: int) -> None:
        """It waits for the next batch."""
        self._move(number, Event.POSTPONE)

    def drop(self, number: int) -> None:
        """It is gone, and its place free."""
        self._end(number, Event.DROP)

    def deadline(self) -> float:
        """Until when what is unfinished is waited for; infinity while there is too little."""
        if self.count(Life.CHOSEN) < self._open_plan.target:
            return math.inf
        patience = self._open_plan.tail.patience
        return self._opened + patience * (self._first_share_at - self._opened)

    def is_over(self, now: float) -> bool:
        """Whether the batch has what it is to have, and waits for nothing."""
        deadline = self.deadline()
        return now >= deadline or (deadline < math.inf and not self.waits())

    def waits(self) -> bool:
        """Whether a group that may become part of the batch is under way."""
        oldest = next(iter(self._of[Life.SAMPLING]), None)
        return oldest is not None and self._is_candidate(oldest)

    def close(self) -> tuple[list[int], list[int]]:
        """Ends the batch: the groups that it hands out, and those that it drops."""
        plan = self._open_plan
        candidates = self._live()[: plan.started]
        taken = [n for n in candidates if self.entries[n].life is Life.CHOSEN]
        left = [n for n in candidates if self.entries[n].life is not Life.CHOSEN]
        dropped = [] if isinstance(plan.tail, Carry) else left
        for number in taken:
            self._end(number, Event.TAKE)
        for number in dropped:
            self.drop(number)
        self._plan = None
        return taken, dropped

    def abandon(self) -> None:
        """Ends the batch as if it had never been opened; what was dropped stays dropped."""
        self._plan = None
        self._reopen()

    @property
    def _open_plan(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("no batch is open")
        return self._plan

    def _live(self) -> list[int]:
        """All but those that are postponed, the oldest first."""
        return [n for n, entry in self.entries.items() if entry.life in _LIVE]

    def _is_candidate(self, number: int) -> bool:
        if self._newest_candidate is None:
            candidates = self._live()[: self._open_plan.started]
            self._newest_candidate = candidates[-1] if candidates else 0
        return number <= self._newest_candidate

    def _reopen(self) -> None:
        for number in [*self._of[Life.POSTPONED], *self._of[Life.CHOSEN]]:
            self._move(number, Event.REOPEN)
        ready = sorted(self._of[Life.READY], key=lambda n: self.entries[n].completed)
        self._of[Life.READY] = dict.fromkeys(ready)
        self._newest_candidate = None

    def _end(self, number: int, event: Event) -> None:
        self._move(number, event)
        del self._of[self.entries.pop(number).life][number]

    def _move(self, number: int, event: Event) -> Entry:
        entry = self.entries[number]
        life = TRANSITIONS[entry.life].get(event)
        if life is None:
            raise ValueError(f"group {number} is {entry.life.value}: no {event.value}")
        del self._of[entry.life][number]
        self._of[life][number] = None
        if (entry.life in _LIVE) != (life in _LIVE):
            self._newest_candidate = None
        entry.life = life
        return entry

"""The books: no interleaving hands out what is too old, or loses or doubles a group."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from rollwire_client._batches.batch import Carry, Drop
from rollwire_client._batches.group_buffer import TRANSITIONS, Event, Ledger, Life, Plan


class Books(RuleBasedStateMachine):
    """A trainer that does things in any order, and what it remembers of each group."""

    @initialize(size=st.integers(1, 4), max_lag=st.none() | st.integers(1, 3))
    def begin_run(self, size: int, max_lag: int | None) -> None:
        self.ledger = Ledger()
        self.target, self.max_lag = size, max_lag
        self.version = self.now = self.begun = 0
        self.plan: Plan | None = None
        self.taken: list[int] = []
        self.dropped: list[int] = []
        self.oldest: dict[int, float] = {}  # the version of its oldest token

    @precondition(lambda self: self.plan is None)
    @rule(
        over_sample=st.sampled_from([1.0, 1.25, 2.0]),
        prefetch=st.integers(0, 5),
        carries=st.booleans(),
        patience=st.sampled_from([1.0, 2.0]),
        steps=st.integers(0, 2),
    )
    def open(
        self, over_sample: float, prefetch: int, *, carries: bool, patience: float, steps: int
    ) -> None:
        self.version += steps
        tail = Carry(patience) if carries else Drop(patience)
        self.plan = Plan(
            self.target, over_sample, prefetch, tail, self.version, max_lag=self.max_lag
        )
        for number, oldest in self.oldest.items():
            if number in self.ledger.entries:
                self.ledger.see(number, self.version - oldest)
        self.dropped += self.ledger.open(self.plan, self.now)

    @precondition(lambda self: self.plan is not None and self.ledger.room() > 0)
    @rule()
    def begin(self) -> None:
        self.begun += 1
        self.ledger.begin(self.begun)

    @precondition(lambda self: self.ledger.count(Life.SAMPLING) > 0)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        sampling = [n for n, e in self.ledger.entries.items() if e.life is Life.SAMPLING]
        number = data.draw(st.sampled_from(sampling))
        oldest = data.draw(st.just(-math.inf) | st.integers(0, self.version).map(float))
        self.oldest[number] = oldest
        if not self.ledger.complete(number, self.version - oldest):
            self.dropped.append(number)

    @precondition(lambda self: self.plan is not None and self.ledger.offered() is not None)
    @rule(decision=st.sampled_from(["choose", "choose", "choose", "postpone", "drop"]))
    def decide(self, decision: str) -> None:
        number = self.ledger.offered()
        assert number is not None
        if decision == "choose":
            self.ledger.choose(number, self.now)
        elif decision == "postpone":
            self.ledger.postpone(number)
        else:
            self.ledger.drop(number)
            self.dropped.append(number)

    @precondition(lambda self: self.plan is not None)
    @rule(early=st.booleans())
    def close(self, *, early: bool) -> None:
        if not (early or self.ledger.is_over(self.now)):
            return
        taken, dropped = self.ledger.close()
        assert len(taken) <= self.plan.started
        assert self.plan.tail.patience > 1 or len(taken) <= self.target
        if self.max_lag is not None:
            assert all(self.version - self.oldest[n] <= self.max_lag for n in taken)
        if isinstance(self.plan.tail, Drop):
            ahead = [n for n in self.ledger.entries if n <= max([*taken, *dropped, 0])]
            postponed = self.ledger.count(Life.POSTPONED)
            assert len(ahead) <= postponed  # nothing else of the batch is left
        else:
            assert not dropped
        self.taken += taken
        self.dropped += dropped
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def abandon(self) -> None:
        self.ledger.abandon()
        self.plan = None

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "ledger"):
            return
        known = sorted([*self.taken, *self.dropped, *self.ledger.entries])
        assert known == list(range(1, self.begun + 1))

    @invariant()
    def a_batch_that_is_not_over_can_go_on(self) -> None:
        if getattr(self, "plan", None) is None or self.ledger.offered() is not None:
            return
        assert self.ledger.is_over(self.now) or self.ledger.room() or self.ledger.waits()

    @invariant()
    def what_outlives_a_batch_is_bounded(self) -> None:
        if getattr(self, "plan", None) is None or self.max_lag is None or not self.ledger.room():
            return
        live = self.ledger.count(Life.SAMPLING, Life.READY, Life.CHOSEN)
        most = self.target * (1 + self.max_lag)
        if isinstance(self.plan.tail, Drop):
            most += self.plan.started - self.target  # those are dropped with it
        assert live < most


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def filled(plan: Plan, *, complete: int) -> Ledger:
    """A batch that was opened at time 0, with as many groups as it wants, the first complete."""
    ledger = Ledger()
    ledger.open(plan, 0.0)
    for number in range(1, ledger.room() + 1):
        ledger.begin(number)
    for number in range(1, complete + 1):
        ledger.complete(number, 0.0)
    return ledger


def choose_all(ledger: Ledger, now: float) -> None:
    while (number := ledger.offered()) is not None:
        ledger.choose(number, now)


def test_a_fixed_batch_waits_for_all() -> None:
    ledger = filled(Plan(4), complete=3)
    choose_all(ledger, 1.0)
    assert (ledger.room(), ledger.is_over(1e9)) == (0, False)
    ledger.complete(4, 0.0)
    choose_all(ledger, 2.0)
    assert ledger.is_over(2.0)
    assert ledger.close() == ([1, 2, 3, 4], [])


def test_over_sampling_ends_at_the_target_and_drops_the_rest() -> None:
    ledger = filled(Plan(4, over_sample=1.5), complete=4)
    choose_all(ledger, 1.0)
    assert ledger.is_over(1.0)
    assert ledger.close() == ([1, 2, 3, 4], [5, 6])
    assert not ledger.entries


def test_what_is_carried_comes_first() -> None:
    plan = Plan(2, over_sample=2.0, tail=Carry())
    ledger = filled(plan, complete=0)
    for number in (2, 4):
        ledger.complete(number, 0.0)
    choose_all(ledger, 1.0)
    assert ledger.close() == ([2, 4], [])
    ledger.open(plan, 2.0)
    assert ledger.room() == 2
    for number in (5, 6):
        ledger.begin(number)
    for number in (6, 1, 3):
        ledger.complete(number, 0.0)
    assert ledger.offered() == 6  # the first to be complete
    choose_all(ledger, 3.0)
    assert ledger.close() == ([1, 6], [])
    assert list(ledger.entries) == [3, 5]


def test_patience_takes_those_that_make_it_in_time() -> None:
    """The first 80 % of 5 took 10 seconds: until 20, the others may come."""
    ledger = filled(Plan(5, over_sample=1.6, tail=Drop(patience=2.0)), complete=4)
    choose_all(ledger, 10.0)
    ledger.complete(5, 0.0)
    choose_all(ledger, 12.0)
    assert (ledger.deadline(), ledger.is_over(12.0)) == (20.0, False)
    ledger.complete(7, 0.0)
    choose_all(ledger, 15.0)
    assert not ledger.is_over(19.9)
    assert ledger.is_over(20.0)
    assert ledger.close() == ([1, 2, 3, 4, 5, 7], [6, 8])


def test_what_is_ahead_is_for_later_batches() -> None:
    ledger = filled(Plan(2, prefetch=2), complete=0)
    assert list(ledger.entries) == [1, 2, 3, 4]
    for number in (3, 4):
        ledger.complete(number, 0.0)
    assert ledger.offered() is None
    for number in (1, 2):
        ledger.complete(number, 0.0)
    choose_all(ledger, 1.0)
    assert ledger.close() == ([1, 2], [])
    ledger.open(Plan(2), 2.0)
    choose_all(ledger, 2.0)
    assert ledger.close() == ([3, 4], [])


def test_admission_keeps_to_the_lag() -> None:
    """What is begun ahead is handed out max_lag batches later at the latest."""
    ledger = filled(Plan(2, prefetch=100, version=5, max_lag=2), complete=0)
    assert len(ledger.entries) == 2 + 2 * 2


def test_a_group_that_is_too_old_gives_its_place_back() -> None:
    plan = Plan(2, over_sample=1.5, tail=Carry(), version=5, max_lag=1)
    ledger = filled(plan, complete=0)
    assert not ledger.complete(1, 2)
    assert ledger.complete(2, 1)
    assert ledger.room() == 1
    choose_all(ledger, 1.0)
    ledger.abandon()
    ledger.see(2, 2)
    ledger.see(3, 2)
    assert ledger.open(Plan(2, version=6, max_lag=1), 2.0) == [2, 3]


def test_weights_without_a_version_are_too_old_for_any_bound() -> None:
    assert Plan(1, version=1, max_lag=10).is_stale(math.inf)
    assert not Plan(1, version=1, max_lag=10).is_stale(-math.inf)  # nothing is sampled yet
    assert not Plan(1).is_stale(math.inf)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"target": 0}, "target is 0"),
        ({"target": 1, "over_sample": 0.5}, "over_sample is 0.5"),
        ({"target": 1, "over_sample": math.nan}, "over_sample is nan"),
        ({"target": 1, "prefetch": -1}, "prefetch -1"),
        ({"target": 1, "version": -1}, "version is -1"),
        ({"target": 1, "version": 2**63}, "version is"),
        ({"target": 1, "max_lag": 1}, "needs the trainer's version"),
        ({"target": 1, "max_lag": 0, "version": 1, "prefetch": 1}, "allow a lag of 1"),
        (
            {"target": 4, "max_lag": 0, "version": 1, "over_sample": 1.5, "tail": Carry()},
            "allow a lag of 1",
        ),
    ],
)
def test_a_plan_that_cannot_be(wrong: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Plan(**wrong)


def test_a_tail_that_is_none() -> None:
    with pytest.raises(TypeError, match="not Drop"):
        Plan(1, tail=Carry)


def test_over_sampling_is_exact() -> None:
    assert Plan(50, over_sample=1.1).started == 55


@pytest.mark.parametrize("patience", [0.5, math.nan])
def test_a_patience_that_cannot_be(patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        Drop(patience)


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(Life)
    reachable = {life for row in TRANSITIONS.values() for life in row.values()}
    assert reachable | {Life.SAMPLING} == set(Life)
    assert {event for row in TRANSITIONS.values() for event in row} == set(Event)


def test_what_cannot_happen_is_refused() -> None:
    ledger = filled(Plan(1), complete=1)
    with pytest.raises(ValueError, match="group 1 is ready: no complete"):
        ledger.complete(1, 0.0)
    with pytest.raises(ValueError, match="not the newest"):
        ledger.begin(1)
    with pytest.raises(RuntimeError, match="open already"):
        ledger.open(Plan(1), 0.0)
    ledger.abandon()
    with pytest.raises(RuntimeError, match="no batch is open"):
        ledger.room()

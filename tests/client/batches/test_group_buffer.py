"""Groups and batches: nothing hands out what is too old, or loses or doubles a group."""

from __future__ import annotations

import itertools
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
from rollwire_client import Carry, Drop, DropReason, Prompt, Sampling, WeightTag
from rollwire_client._batches.group import GroupSampler
from rollwire_client._batches.group_buffer import BatchPlan, GroupBuffer
from support.examples import examples


class NumberedBuffer:
    """A buffer whose groups are known by their numbers, and complete when the test says so."""

    def __init__(self) -> None:
        self.inner = GroupBuffer(GroupSampler(None, 1, 1, Sampling(), {}, None, 0))
        self._numbers = itertools.count(1)

    def open(self, plan: BatchPlan, now: float = 0.0) -> None:
        if plan.version is not None:
            self.inner.steps.reach(plan.version)
        self.inner.open(plan, now)

    def fill(self, most: int | None = None) -> None:
        room = self.inner.room()
        for _ in range(room if most is None else min(most, room)):
            number = next(self._numbers)
            self.inner.add(Prompt(str(number), [number]))

    def sample(self, number: int, version: int | None) -> None:
        """A token of this version."""
        weights = WeightTag(version, 0, "s", 0)
        output = self.inner.groups[number].samples[0].output
        output.begin_run(weights, 0, "s")
        output.token_ids.append(1)
        output.logprobs.append(0.0)

    def complete(self, *numbers: int) -> None:
        for number in numbers:
            self.inner.complete(self.inner.groups[number])

    def choose_all(self, now: float) -> None:
        while (group := self.inner.next_ready()) is not None:
            self.inner.choose(group, now)

    def close(self) -> tuple[list[int], list[int]]:
        """What is handed out, and what was dropped."""
        finished = [group.number for group in self.inner.close_batch()]
        return finished, [number for number, _ in self.dropped()]

    def dropped(self) -> list[tuple[int, DropReason | None]]:
        return [(int(group.prompt.id), group.dropped) for group in self.inner.take_dropped()]


class AnyOrder(RuleBasedStateMachine):
    """A trainer that does things in any order, and what it remembers of each group."""

    @initialize(size=st.integers(1, 4), max_lag=st.none() | st.integers(1, 3))
    def begin_run(self, size: int, max_lag: int | None) -> None:
        self.buffer = NumberedBuffer()
        self.target, self.max_lag = size, max_lag
        self.version = self.now = self.begun = 0
        self.plan: BatchPlan | None = None
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
        self.plan = BatchPlan(
            self.target, over_sample, prefetch, tail, self.version, max_lag=self.max_lag
        )
        self.buffer.open(self.plan, self.now)

    @precondition(lambda self: self.plan is not None and self.buffer.inner.room() > 0)
    @rule()
    def begin(self) -> None:
        self.begun += 1
        self.buffer.fill(1)

    @precondition(lambda self: self.buffer.inner.sampling)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(list(self.buffer.inner.sampling)))
        oldest = data.draw(st.none() | st.integers(0, self.version))
        if oldest is not None:
            self.buffer.sample(number, oldest)
        self.oldest[number] = math.inf if oldest is None else oldest
        self.buffer.complete(number)

    @precondition(lambda self: self.plan is not None and self.buffer.inner.next_ready() is not None)
    @rule(decision=st.sampled_from(["choose", "choose", "choose", "postpone", "drop"]))
    def decide(self, decision: str) -> None:
        group = self.buffer.inner.next_ready()
        assert group is not None
        if decision == "choose":
            self.buffer.inner.choose(group, self.now)
        elif decision == "postpone":
            self.buffer.inner.postpone(group)
        else:
            self.buffer.inner.drop(group, DropReason.FILTERED)

    @precondition(lambda self: self.plan is not None)
    @rule(early=st.booleans())
    def close(self, *, early: bool) -> None:
        if not (early or self.buffer.inner.is_over(self.now)):
            return
        self.count_dropped()
        taken, dropped = self.buffer.close()
        assert len(taken) <= self.plan.started
        assert self.plan.tail.patience > 1 or len(taken) <= self.target
        if self.max_lag is not None:
            assert all(self.version - self.oldest[n] <= self.max_lag for n in taken)
        if isinstance(self.plan.tail, Drop):
            ahead = [n for n in self.buffer.inner.groups if n <= max([*taken, *dropped, 0])]
            postponed = len(self.buffer.inner.postponed)
            assert len(ahead) <= postponed  # nothing else of the batch is left
        else:
            assert not dropped
        self.taken += taken
        self.dropped += dropped
        self.plan = None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def abandon(self) -> None:
        self.plan = None

    @rule(seconds=st.integers(1, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.count_dropped()
        known = sorted([*self.taken, *self.dropped, *self.buffer.inner.groups])
        assert known == list(range(1, self.begun + 1))

    @invariant()
    def a_batch_that_is_not_over_can_go_on(self) -> None:
        if getattr(self, "plan", None) is None or self.buffer.inner.next_ready() is not None:
            return
        buffer = self.buffer.inner
        assert buffer.is_over(self.now) or buffer.room() or buffer.samples_candidates()

    @invariant()
    def what_outlives_a_batch_is_bounded(self) -> None:
        if getattr(self, "plan", None) is None or self.max_lag is None:
            return
        if not self.buffer.inner.room():
            return
        most = self.target * (1 + self.max_lag)
        if isinstance(self.plan.tail, Drop):
            most += self.plan.started - self.target  # those are dropped with it
        buffer = self.buffer.inner
        assert len(buffer.sampling) + len(buffer.ready) + len(buffer.chosen) < most

    def count_dropped(self) -> None:
        self.dropped += [number for number, _ in self.buffer.dropped()]


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=examples(60), stateful_step_count=60)


def filled(plan: BatchPlan, *, complete: int) -> NumberedBuffer:
    """A batch that was opened at time 0, with as many groups as it wants, the first complete."""
    buffer = NumberedBuffer()
    buffer.open(plan)
    buffer.fill()
    buffer.complete(*range(1, complete + 1))
    return buffer


def test_a_fixed_batch_waits_for_all() -> None:
    buffer = filled(BatchPlan(4), complete=3)
    buffer.choose_all(1.0)
    assert (buffer.inner.room(), buffer.inner.is_over(1e9)) == (0, False)
    buffer.complete(4)
    buffer.choose_all(2.0)
    assert buffer.inner.is_over(2.0)
    assert buffer.close() == ([1, 2, 3, 4], [])


def test_over_sampling_ends_at_the_target_and_drops_the_rest() -> None:
    buffer = filled(BatchPlan(4, over_sample=1.5), complete=4)
    buffer.choose_all(1.0)
    assert buffer.inner.is_over(1.0)
    assert buffer.close() == ([1, 2, 3, 4], [5, 6])
    assert not buffer.inner.groups


def test_what_is_carried_comes_first() -> None:
    plan = BatchPlan(2, over_sample=2.0, tail=Carry())
    buffer = filled(plan, complete=0)
    buffer.complete(2, 4)
    buffer.choose_all(1.0)
    assert buffer.close() == ([2, 4], [])
    buffer.open(plan, 2.0)
    assert buffer.inner.room() == 2
    buffer.fill()
    buffer.complete(6, 1, 3)
    first = buffer.inner.next_ready()
    assert first is not None
    assert first.number == 6  # the first to be complete
    buffer.choose_all(3.0)
    assert buffer.close() == ([1, 6], [])
    assert list(buffer.inner.groups) == [3, 5]


def test_patience_takes_those_that_make_it_in_time() -> None:
    """The first 80 % of 5 took 10 seconds: until 20, the others may come."""
    buffer = filled(BatchPlan(5, over_sample=1.6, tail=Drop(patience=2.0)), complete=4)
    buffer.choose_all(10.0)
    buffer.complete(5)
    buffer.choose_all(12.0)
    assert (buffer.inner.deadline(), buffer.inner.is_over(12.0)) == (20.0, False)
    buffer.complete(7)
    buffer.choose_all(15.0)
    assert not buffer.inner.is_over(19.9)
    assert buffer.inner.is_over(20.0)
    assert buffer.close() == ([1, 2, 3, 4, 5, 7], [6, 8])


def test_what_is_ahead_is_for_later_batches() -> None:
    buffer = filled(BatchPlan(2, prefetch=2), complete=0)
    assert list(buffer.inner.groups) == [1, 2, 3, 4]
    buffer.complete(3, 4)
    assert buffer.inner.next_ready() is None
    buffer.complete(1, 2)
    buffer.choose_all(1.0)
    assert buffer.close() == ([1, 2], [])
    buffer.open(BatchPlan(2), 2.0)
    buffer.choose_all(2.0)
    assert buffer.close() == ([3, 4], [])


def test_admission_keeps_to_the_lag() -> None:
    """What is begun ahead is handed out max_lag batches later at the latest."""
    buffer = filled(BatchPlan(2, prefetch=100, version=5, max_lag=2), complete=0)
    assert len(buffer.inner.groups) == 2 + 2 * 2


def test_a_group_that_is_too_old_gives_its_place_back() -> None:
    plan = BatchPlan(2, over_sample=1.5, tail=Carry(), version=5, max_lag=1)
    buffer = filled(plan, complete=0)
    for number, version in ((1, 3), (2, 4), (3, 4)):
        buffer.sample(number, version)
    buffer.complete(1, 2)
    assert buffer.dropped() == [(1, DropReason.STALE)]
    assert buffer.inner.room() == 1
    buffer.choose_all(1.0)
    buffer.open(BatchPlan(2, version=6, max_lag=1), 2.0)
    assert buffer.dropped() == [(2, DropReason.STALE), (3, DropReason.STALE)]


def test_weights_without_a_version_are_too_old_for_any_bound() -> None:
    buffer = filled(BatchPlan(2, version=1, max_lag=10), complete=0)
    buffer.sample(1, None)
    buffer.complete(1, 2)  # nothing is sampled of the second
    assert buffer.dropped() == [(1, DropReason.STALE)]
    buffer = filled(BatchPlan(1), complete=0)
    buffer.sample(1, None)
    buffer.complete(1)
    assert buffer.dropped() == []


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"target": 1, "over_sample": 0.5}, "over_sample is 0.5"),
        ({"target": 1, "over_sample": math.nan}, "over_sample is nan"),
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
        BatchPlan(**wrong)


def test_a_tail_that_is_none() -> None:
    with pytest.raises(TypeError, match="not Drop"):
        BatchPlan(1, tail=Carry)


def test_over_sampling_is_exact() -> None:
    assert BatchPlan(50, over_sample=1.1).started == 55


@pytest.mark.parametrize("patience", [0.5, math.nan])
def test_a_patience_that_cannot_be(patience: float) -> None:
    with pytest.raises(ValueError, match="patience"):
        Drop(patience)

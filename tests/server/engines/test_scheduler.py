"""Plans, tried against a cache that only remembers which token each entry is of."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.engines.embedded.scheduler import MIN_SHARED_TOKENS, Scheduler
from support.examples import examples

if TYPE_CHECKING:
    from rollwire_server.engines.embedded.batch import StepPlan

SLOTS, CONTEXT, PREFILL, PROMPT_ROWS = 4, 64, 12, 5

# Few different tokens, so that many sequences begin alike.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SLOTS, CONTEXT)
        self.entries: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]  # token, revision
        self.revision = 0
        self.max_kv_lag: int | None = None  # of the last commit
        self.keys = itertools.count()
        self.arrived: list[int] = []
        self.live: set[int] = set()

    @rule(prompt=prompts, prefix=st.lists(st.integers(0, 1), max_size=3), told=st.booleans())
    def submit(self, prompt: list[int], prefix: list[int], *, told: bool) -> None:
        key = next(self.keys)
        sampling = SamplingParams(max_new_tokens=len(prefix) + 1 + key % 5)
        self.scheduler.waiting.append(
            SequenceSpec(key, prompt, sampling, prefix, prompt_logprobs=told)
        )
        self.live.add(key)

    @rule(keys=st.lists(st.integers(0, 20), max_size=3))
    def abort(self, keys: list[int]) -> None:
        self.scheduler.remove(keys)
        self.live -= set(keys)

    @rule(max_kv_lag=st.none() | st.integers(0, 4))
    def commit(self, max_kv_lag: int | None) -> None:
        self.revision += 1
        self.max_kv_lag = max_kv_lag
        scheduler = self.scheduler
        before = int(scheduler.cached[scheduler.live].sum())
        dropped = scheduler.commit(self.revision, max_kv_lag)
        assert dropped == before - int(scheduler.cached[scheduler.live].sum())

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        scheduler = self.scheduler
        before = scheduler.cached.copy()
        plan = scheduler.schedule(PREFILL, PROMPT_ROWS, self.revision)
        assert len(plan.decoding) or plan.chunks, "whatever is live gets on"
        self._check_budget(plan)
        for copy in plan.copies:
            assert copy.tokens >= MIN_SHARED_TOKENS
            assert before[copy.source] >= copy.tokens
            self.entries[copy.target] = self.entries[copy.source][: copy.tokens]
        for slot in plan.decoding.tolist():
            self._compute(slot, int(scheduler.length[slot]) - 1, int(scheduler.length[slot]))
        for chunk in plan.chunks:
            self._compute(chunk.slot, chunk.start, chunk.end)
        wanted = scheduler.logit_rows(plan)
        scheduler.mark_computed(plan)
        for slot in wanted.slots[wanted.samples].tolist():
            assert scheduler.cached[slot] == scheduler.length[slot]
            if self.max_kv_lag is not None:
                attended = self.entries[slot][: scheduler.length[slot]]
                assert min(r for _, r in attended) >= self.revision - self.max_kv_lag
            scheduler.tokens[slot, scheduler.length[slot]] = token
            scheduler.length[slot] += 1
            if scheduler.length[slot] >= scheduler.max_length[slot]:
                self.live.remove(scheduler.at(slot).spec.key)
                scheduler.release(slot)

    def _check_budget(self, plan: StepPlan) -> None:
        rows = {c.slot: c.end - c.start for c in plan.chunks}
        assert sum(rows.values()) <= PREFILL
        assert all(rows.values())
        told = [s for s in rows if self.scheduler.at(s).wants_prompt_logprobs]
        assert sum(rows[s] for s in told) <= PROMPT_ROWS
        assert not set(rows) & set(plan.decoding.tolist())

    def _compute(self, slot: int, start: int, end: int) -> None:
        """Writes entries right behind those that are there, each once."""
        entries = self.entries[slot]
        assert start <= len(entries)
        assert self.scheduler.cached[slot] == start
        new = [(int(t), self.revision) for t in self.scheduler.tokens[slot, start:end]]
        self.entries[slot] = entries[:start] + new

    @invariant()
    def entries_are_of_their_tokens_and_no_older_than_told(self) -> None:
        scheduler = self.scheduler
        for slot in scheduler.live.nonzero()[0].tolist():
            cached = int(scheduler.cached[slot])
            assert cached < scheduler.length[slot]
            entries = self.entries[slot][:cached]
            assert [t for t, _ in entries] == scheduler.tokens[slot, :cached].tolist()
            if entries:
                assert min(r for _, r in entries) == scheduler.revision[slot]

    @invariant()
    def sequences_start_in_their_order(self) -> None:
        started = [s.spec.key for s in self.scheduler.running if s is not None]
        waiting = [s.key for s in self.scheduler.waiting]
        assert waiting == sorted(waiting)
        assert all(a < b for a in started for b in waiting)
        assert self.live == {*started, *waiting}


Schedules.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40)
TestSchedules = Schedules.TestCase


def test_a_shared_beginning_is_copied_once_it_is_there() -> None:
    scheduler = Scheduler(4, 200)
    shared = list(range(50))
    for key in range(3):
        scheduler.waiting.append(SequenceSpec(key, [*shared, 100 + key], SamplingParams(5)))
    first = scheduler.schedule(30, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in first.chunks] == [(0, 0, 30)]
    scheduler.mark_computed(first)
    second = scheduler.schedule(30, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in second.chunks] == [(0, 30, 51)]
    scheduler.mark_computed(second)
    scheduler.length[0] += 1
    third = scheduler.schedule(30, 1000, 0)
    assert [(c.source, c.target, c.tokens) for c in third.copies] == [(0, 1, 50), (0, 2, 50)]
    assert (third.decoding.tolist(), third.chunks) == (
        [0, 1, 2],
        [],
    )  # one token is missing of each
    assert np.array_equal(scheduler.revision[:3], [0, 0, 0])


def test_a_group_shares_its_prompt_though_older_sequences_begin_alike() -> None:
    scheduler = Scheduler(4, 200)
    scheduler.waiting.append(SequenceSpec(0, [*range(12), 99, 98], SamplingParams(1)))
    scheduler.mark_computed(scheduler.schedule(100, 1000, 0))
    scheduler.release(0)
    for key in (1, 2, 3):
        scheduler.waiting.append(SequenceSpec(key, list(range(60)), SamplingParams(5)))
    first = scheduler.schedule(100, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in first.chunks] == [(0, 12, 60)]
    scheduler.mark_computed(first)
    scheduler.length[0] += 1
    second = scheduler.schedule(100, 1000, 0)
    assert (second.decoding.tolist(), second.chunks) == ([0, 1, 2], [])


def test_a_commit_takes_old_entries_from_what_has_not_begun() -> None:
    scheduler = Scheduler(2, 200)
    scheduler.waiting.append(SequenceSpec(0, list(range(40)), SamplingParams(1)))
    scheduler.mark_computed(scheduler.schedule(100, 1000, 0))
    scheduler.release(0)
    scheduler.waiting.append(SequenceSpec(1, [5] * 50, SamplingParams(1)))
    scheduler.waiting.append(SequenceSpec(2, [*range(40), 7, 7, 7], SamplingParams(1)))
    scheduler.mark_computed(scheduler.schedule(1, 1000, 0))  # the second one waits for its turn
    assert scheduler.cached.tolist() == [40, 1]
    assert scheduler.commit(1, None) == 40
    assert scheduler.cached.tolist() == [0, 1]

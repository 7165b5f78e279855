"""Plans, tried against a cache that only remembers which token each entry is of."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.engines.embedded.slots import MIN_SHARED_TOKENS, Plan, SlotTable

SLOTS, CONTEXT, PREFILL, PROMPT_ROWS = 4, 64, 12, 5

# Few different tokens, so that many sequences begin alike.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=30)


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(SLOTS, CONTEXT)
        self.entries: list[list[tuple[int, int]]] = [[] for _ in range(SLOTS)]  # token, revision
        self.revision = 0
        self.keys = itertools.count()
        self.arrived: list[int] = []
        self.live: set[int] = set()

    @rule(prompt=prompts, prefix=st.lists(st.integers(0, 1), max_size=3), told=st.booleans())
    def submit(self, prompt: list[int], prefix: list[int], *, told: bool) -> None:
        key = next(self.keys)
        sampling = SamplingParams(max_new_tokens=len(prefix) + 1 + key % 5)
        self.table.waiting.append(SequenceSpec(key, prompt, sampling, prefix, prompt_logprobs=told))
        self.live.add(key)

    @rule(keys=st.lists(st.integers(0, 20), max_size=3))
    def abort(self, keys: list[int]) -> None:
        self.table.remove(keys)
        self.live -= set(keys)

    @rule(keep=st.booleans())
    def commit(self, *, keep: bool) -> None:
        self.revision += 1
        if not keep:
            used = int(self.table.cached[self.table.live].sum())
            assert self.table.recompute() == used
        else:
            self.table.keep()

    @precondition(lambda self: self.live)
    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        table = self.table
        before = table.cached.copy()
        plan = table.plan(PREFILL, PROMPT_ROWS, self.revision)
        assert len(plan.decoding) or plan.chunks, "whatever is live gets on"
        self._check_budget(plan)
        for copy in plan.copies:
            assert copy.tokens >= MIN_SHARED_TOKENS
            assert before[copy.source] >= copy.tokens
            self.entries[copy.target] = self.entries[copy.source][: copy.tokens]
        for slot in plan.decoding.tolist():
            self._compute(slot, int(table.length[slot]) - 1, int(table.length[slot]))
        for chunk in plan.chunks:
            self._compute(chunk.slot, chunk.start, chunk.end)
        wanted = table.logit_rows(plan)
        table.computed(plan)
        for slot in wanted.slots[wanted.samples].tolist():
            assert table.cached[slot] == table.length[slot]
            table.tokens[slot, table.length[slot]] = token
            table.length[slot] += 1
            if table.length[slot] >= table.limit[slot]:
                self.live.remove(table.at(slot).spec.key)
                table.release(slot)

    def _check_budget(self, plan: Plan) -> None:
        rows = {c.slot: c.end - c.start for c in plan.chunks}
        assert sum(rows.values()) <= PREFILL
        assert all(rows.values())
        told = [s for s in rows if self.table.at(s).wants_prompt_logprobs]
        assert sum(rows[s] for s in told) <= PROMPT_ROWS
        assert not set(rows) & set(plan.decoding.tolist())

    def _compute(self, slot: int, start: int, end: int) -> None:
        """Writes entries right behind those that are there, each once."""
        entries = self.entries[slot]
        assert start <= len(entries)
        assert self.table.cached[slot] == start
        new = [(int(t), self.revision) for t in self.table.tokens[slot, start:end]]
        self.entries[slot] = entries[:start] + new

    @invariant()
    def entries_are_of_their_tokens_and_no_older_than_told(self) -> None:
        table = self.table
        for slot in table.live.nonzero()[0].tolist():
            cached = int(table.cached[slot])
            assert cached < table.length[slot]
            entries = self.entries[slot][:cached]
            assert [t for t, _ in entries] == table.tokens[slot, :cached].tolist()
            if entries:
                assert min(r for _, r in entries) == table.revision[slot]

    @invariant()
    def sequences_start_in_their_order(self) -> None:
        started = [s.spec.key for s in self.table.running if s is not None]
        waiting = [s.key for s in self.table.waiting]
        assert waiting == sorted(waiting)
        assert all(a < b for a in started for b in waiting)
        assert self.live == {*started, *waiting}


Slots.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlots = Slots.TestCase


def test_a_shared_beginning_is_copied_once_it_is_there() -> None:
    table = SlotTable(4, 200)
    shared = list(range(50))
    for key in range(3):
        table.waiting.append(SequenceSpec(key, [*shared, 100 + key], SamplingParams(5)))
    first = table.plan(30, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in first.chunks] == [(0, 0, 30)]
    table.computed(first)
    second = table.plan(30, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in second.chunks] == [(0, 30, 51)]
    table.computed(second)
    table.length[0] += 1
    third = table.plan(30, 1000, 0)
    assert [(c.source, c.target, c.tokens) for c in third.copies] == [(0, 1, 50), (0, 2, 50)]
    assert (third.decoding.tolist(), third.chunks) == (
        [0, 1, 2],
        [],
    )  # one token is missing of each
    assert np.array_equal(table.revision[:3], [0, 0, 0])


def test_a_group_shares_its_prompt_though_older_sequences_begin_alike() -> None:
    table = SlotTable(4, 200)
    table.waiting.append(SequenceSpec(0, [*range(12), 99, 98], SamplingParams(1)))
    table.computed(table.plan(100, 1000, 0))
    table.release(0)
    for key in (1, 2, 3):
        table.waiting.append(SequenceSpec(key, list(range(60)), SamplingParams(5)))
    first = table.plan(100, 1000, 0)
    assert [(c.slot, c.start, c.end) for c in first.chunks] == [(0, 12, 60)]
    table.computed(first)
    table.length[0] += 1
    second = table.plan(100, 1000, 0)
    assert (second.decoding.tolist(), second.chunks) == ([0, 1, 2], [])


def test_a_commit_takes_old_entries_from_what_has_not_begun() -> None:
    table = SlotTable(2, 200)
    table.waiting.append(SequenceSpec(0, list(range(40)), SamplingParams(1)))
    table.computed(table.plan(100, 1000, 0))
    table.release(0)
    table.waiting.append(SequenceSpec(1, [5] * 50, SamplingParams(1)))
    table.waiting.append(SequenceSpec(2, [*range(40), 7, 7, 7], SamplingParams(1)))
    table.computed(table.plan(1, 1000, 0))  # the second one waits for its turn
    assert table.cached.tolist() == [40, 1]
    table.keep()
    assert table.cached.tolist() == [0, 1]

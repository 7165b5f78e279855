"""The SGLang engine's bookkeeping: what is sent when, and what outputs become."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rollwire.types import WeightTag
from rollwire_server.engines.base import EndReason, RoutedExperts
from rollwire_server.engines.sglang.sequences import (
    BESIDE_TOKENS,
    SHARED_TOKENS,
    SchedulerOutput,
    SequenceTable,
)
from support.engines import spec

if TYPE_CHECKING:
    from rollwire_server.engines.base import SequenceSpec, Step
    from rollwire_server.engines.sglang.sequences import SchedulerRequest

TAG = WeightTag(7, 3, "server", 0)
LONG_PROMPT = tuple(range(SHARED_TOKENS))


def sequences_of(*specs: SequenceSpec) -> SequenceTable:
    sequences = SequenceTable(100)
    for one in specs:
        sequences.add(one)
    return sequences


def send_all(sequences: SequenceTable, revision: int = 3) -> list[SchedulerRequest]:
    """What goes to SGLang now."""
    sent = []
    while (request := sequences.send_next(revision)) is not None:
        sent.append(request)
    return sent


def chunk(
    rid: str, *tokens: int, ended: str | None = None, logprob: float = -1.0
) -> SchedulerOutput:
    return SchedulerOutput(rid, list(tokens), [logprob] * len(tokens), [], [], 0, ended)


def test_a_group_follows_the_first_of_it_and_others_do_not_wait() -> None:
    group = [spec(LONG_PROMPT) for _ in range(3)]
    other = spec((1, 2, 3))
    sequences = sequences_of(*group, other)
    first, apart = send_all(sequences)
    assert (first.input_ids, apart.input_ids) == ([*LONG_PROMPT], [1, 2, 3])
    sequences.process([chunk(first.rid, 5)], TAG)
    assert [request.input_ids for request in send_all(sequences)] == [[*LONG_PROMPT]] * 2
    sequences.add(spec(LONG_PROMPT))
    sequences.add(spec(LONG_PROMPT))
    assert len(send_all(sequences, revision=4)) == 1, "under other weights it is computed anew"


@pytest.mark.parametrize("way", ["aborted", "ended"])
def test_a_group_does_not_wait_for_one_that_is_gone(way: str) -> None:
    first, second = spec(LONG_PROMPT), spec(LONG_PROMPT)
    sequences = sequences_of(first, second)
    (request,) = send_all(sequences)
    if way == "aborted":
        assert sequences.remove([first.key]) == [request.rid]
    else:
        step, _ = sequences.process([chunk(request.rid, ended="abort")], TAG)
        assert [end.reason for end in step.ends] == [EndReason.STEP_FAILED]
    assert len(send_all(sequences)) == 1


def routing(tokens: int) -> RoutedExperts:
    return RoutedExperts(0, tokens, 2, 2, bytes(i // 4 for i in range(tokens * 4)), 1)


def told(step: Step, key: int) -> list[tuple[int, int, int, int]]:
    """First position, last position, revision, oldest revision of keys: of rows, which must be
    those of their positions.
    """
    parts = step.extras[key].routed_experts
    for part in parts:
        positions = range(part.start_position, part.start_position + part.num_tokens)
        assert list(part.experts[::4]) == list(positions)
        assert len(part.experts) == 4 * part.num_tokens
    return [
        (
            p.start_position,
            p.start_position + p.num_tokens - 1,
            p.weights.revision,
            p.oldest_kv_revision,
        )
        for p in parts
        if p.weights is not None
    ]


def test_experts_are_told_by_the_weights_that_chose_them() -> None:
    asked = spec((1, 2, 3), 20, routed_experts=True)
    sequences = sequences_of(asked)
    (first,) = send_all(sequences)
    assert first.spec.routed_experts
    sequences.process([chunk(first.rid, 5, 5)], TAG)
    later = WeightTag(8, 4, "server", 0)
    sequences.requeue(later.revision, max_kv_lag=None)
    sequences.process([chunk(first.rid, 6)], later)
    last = WeightTag(9, 5, "server", 0)
    assert sequences.requeue(last.revision, max_kv_lag=0) == ([first.rid], 6)
    (second,) = send_all(sequences, last.revision)
    ended = replace(chunk(first.rid, 7, ended="abort"), routed_experts=routing(6))
    step, _ = sequences.process([ended], last)
    assert not step.keys
    # 6 was an input after it was given up.
    assert told(step, asked.key) == [(0, 3, 3, 3), (4, 4, 4, 3)]
    intact = replace(chunk(second.rid, *range(10, 27), ended="length"), routed_experts=routing(22))
    step, _ = sequences.process([intact], last)
    assert told(step, asked.key) == [(0, 21, 5, 5)]


@pytest.mark.parametrize("recalled", [True, False])
def test_experts_of_what_ended_before_its_first_token_are_not_told(*, recalled: bool) -> None:
    asked = spec((1, 2, 3), 20, routed_experts=True)
    sequences = sequences_of(asked)
    (request,) = send_all(sequences)
    if recalled:  # by a commit, while its prompt was computed
        sequences.requeue(4, max_kv_lag=None)
    ended = replace(chunk(request.rid, ended="abort"), routed_experts=routing(3))
    step, _ = sequences.process([ended], TAG)
    assert not any(extras.routed_experts for extras in step.extras.values())
    assert [end.reason for end in step.ends] == ([] if recalled else [EndReason.STEP_FAILED])


def test_experts_of_what_nobody_waits_for_are_not_told() -> None:
    asked = spec((1, 2, 3), 20, routed_experts=True)
    sequences = sequences_of(asked)
    (request,) = send_all(sequences)
    sequences.process([chunk(request.rid, 5)], TAG)
    sequences.remove([asked.key])
    ended = replace(chunk(request.rid, ended="abort"), routed_experts=routing(3))
    step, _ = sequences.process([ended], TAG)
    assert not step.extras


def test_no_id_begins_with_another() -> None:
    sequences = sequences_of(*(spec((1, 2)) for _ in range(300)))
    ids = [request.rid for request in send_all(sequences)]
    assert len(set(ids)) == 300
    assert len({len(rid) for rid in ids}) == 1


def test_a_chunk_is_cut_at_what_ends_the_sequence() -> None:
    stopping = spec((1, 2), 20, stop_token_ids=frozenset({9}))
    full = spec((1, 2), 2)
    broken = spec((1, 2), 20)
    sequences = sequences_of(stopping, full, broken)
    a, b, c = send_all(sequences)
    nan = chunk(c.rid, 4, logprob=float("nan"))
    step, to_end = sequences.process([chunk(a.rid, 5, 9, 6), chunk(b.rid, 7, 8), nan], TAG)
    assert list(zip(step.keys, step.token_ids, strict=True)) == [
        (stopping.key, 5), (stopping.key, 9), (full.key, 7), (full.key, 8)
    ]  # fmt: skip
    reasons = [EndReason.STOP, EndReason.LENGTH, EndReason.NOT_FINITE]
    assert [end.reason for end in step.ends] == reasons
    assert to_end == [a.rid, b.rid, c.rid]
    assert len(sequences) == 0


def test_what_was_given_up_is_ended_until_it_says_so_and_reports_nothing() -> None:
    one = spec((1, 2))
    sequences = sequences_of(one)
    (request,) = send_all(sequences)
    sequences.process([chunk(request.rid, 5)], TAG)
    assert sequences.remove([one.key]) == [request.rid]
    assert sequences.kv_tokens() == 3
    step, to_end = sequences.process([chunk(request.rid, 6)], TAG)
    assert (step.keys, step.ends, to_end) == ([], [], [request.rid])
    sequences.process([chunk(request.rid, 7, ended="abort")], TAG)
    assert (sequences.kv_tokens(), sequences.ending) == (0, {})


def test_after_a_commit_sequences_go_on_from_their_tokens_oldest_first() -> None:
    started, waiting = spec((1, 2), 20, seed=4), spec((3, 4), 20)
    sequences = sequences_of(started, waiting)
    a, b = send_all(sequences)
    sequences.process([chunk(a.rid, 5, 6)], TAG)
    assert sequences.requeue(4, max_kv_lag=0) == ([a.rid, b.rid], 4)
    again, fresh = send_all(sequences, revision=4)
    assert (again.input_ids, again.max_new_tokens) == ([1, 2, 5, 6], 18)
    assert (fresh.input_ids, fresh.max_new_tokens) == ([3, 4], 20)
    assert again.cache_key == fresh.cache_key != a.cache_key
    assert {a.rid, b.rid}.isdisjoint({again.rid, fresh.rid})


def test_what_keeps_its_keys_and_values_owns_up_to_them() -> None:
    started, waiting = spec((1, 2), 20), spec((3, 4), 20)
    sequences = sequences_of(started, waiting)
    a, b = send_all(sequences, revision=2)
    sequences.process([chunk(a.rid, 5)], TAG)
    assert sequences.requeue(3, max_kv_lag=None) == ([b.rid], 0)
    (fresh,) = send_all(sequences, revision=3)
    step, _ = sequences.process([chunk(a.rid, 6), chunk(fresh.rid, 7)], TAG)
    assert step.weights == TAG
    assert step.oldest_kv_revisions == [2, 3]


def test_only_those_with_the_oldest_keys_are_sent_again() -> None:
    old, young, waiting = spec((1, 2), 20), spec((3, 4), 20), spec((5, 6), 20)
    sequences = sequences_of(old)
    (a,) = send_all(sequences, revision=2)
    sequences.process([chunk(a.rid, 5, 6)], replace(TAG, revision=2))
    assert sequences.requeue(3, max_kv_lag=1) == ([], 0)
    sequences.add(young)
    sequences.add(waiting)
    b, c = send_all(sequences, revision=3)
    sequences.process([chunk(a.rid, 7), chunk(b.rid, 8)], TAG)
    assert sequences.requeue(4, max_kv_lag=1) == ([a.rid, c.rid], 5)
    again, fresh = send_all(sequences, revision=4)
    assert (again.input_ids, fresh.input_ids) == ([1, 2, 5, 6, 7], [5, 6])
    later = replace(TAG, revision=4)
    step, _ = sequences.process([chunk(again.rid, 9), chunk(b.rid, 9), chunk(fresh.rid, 9)], later)
    assert step.oldest_kv_revisions == [4, 3, 4]


@pytest.mark.parametrize(("max_kv_lag", "together"), [(0, 5), (1, 2)])
def test_long_ones_are_sent_again_in_turns_while_others_keep_their_keys(
    max_kv_lag: int, together: int
) -> None:
    sequences = SequenceTable(BESIDE_TOKENS)
    for i in range(4):
        sequences.add(spec((i,) * (BESIDE_TOKENS // 3), 20))
    first = send_all(sequences, revision=2)
    sequences.process([chunk(request.rid, 5) for request in first], replace(TAG, revision=2))
    sequences.requeue(4, max_kv_lag)
    sequences.add(spec((9,), 20))
    again = send_all(sequences, revision=4)
    assert len(again) == together
    sequences.process([chunk(again[0].rid, 6)], replace(TAG, revision=4))
    assert len(send_all(sequences, revision=4)) == (0 if together == 5 else 1)
    sequences.remove([again[1].spec.key])
    left = [request.spec.prompt[0] for request in send_all(sequences, revision=4)]
    assert left == ([] if together == 5 else [3, 9])


def test_one_that_is_refused_ends_with_why() -> None:
    asked = spec((1, 2))
    sequences = sequences_of(asked)
    (request,) = send_all(sequences)
    end = sequences.refuse(request.rid, "too long")
    assert end is not None
    assert (end.key, end.reason, end.message) == (asked.key, EndReason.STEP_FAILED, "too long")
    assert (len(sequences), sequences.sent) == (0, 0)


@pytest.mark.parametrize("how", ["aborted", "recalled"])
def test_one_that_is_refused_once_it_was_given_up_is_not_waited_for(how: str) -> None:
    asked = spec((1, 2))
    sequences = sequences_of(asked)
    (request,) = send_all(sequences)
    if how == "aborted":
        sequences.remove([asked.key])
    else:
        sequences.requeue(4, max_kv_lag=0)
    assert sequences.refuse(request.rid, "too long") is None
    assert not sequences.ending

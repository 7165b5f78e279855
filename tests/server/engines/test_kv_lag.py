"""Which sequences commits compute again: none gets too old keys, and not all wait at once."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from rollwire_server.engines.kv_lag import sequences_to_recompute


def test_none_keeps_all_and_0_keeps_none() -> None:
    assert sequences_to_recompute([7, 3, 9], [1, 1, 1], 10, None) == []
    assert sequences_to_recompute([7, 3, 9], [1, 1, 1], 10, 0) == [1, 0, 2]


def test_a_batch_that_began_together_is_spread_over_the_commits_to_come_shortest_first() -> None:
    assert sequences_to_recompute([4] * 6, [30, 20, 60, 10, 50, 40], 5, 2) == [3, 1]


def test_few_sequences_wait_for_the_bound() -> None:
    assert sequences_to_recompute([4, 4, 4], [9, 9, 9], 5, 4) == []
    assert sequences_to_recompute([4, 9, 9], [9, 9, 9], 9, 4) == [0]


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=40), max_kv_lag=st.integers(0, 8))
def test_sequences_that_never_end_share_the_commits_evenly(
    lengths: list[int], max_kv_lag: int
) -> None:
    oldest = [5] * len(lengths)
    share = math.ceil(len(oldest) / (max_kv_lag + 1))
    for revision in range(6, 6 + 4 * (max_kv_lag + 1)):
        chosen = sequences_to_recompute(oldest, lengths, revision, max_kv_lag)
        assert len(chosen) == len(set(chosen)) <= share
        for i in chosen:
            oldest[i] = revision
        assert min(oldest) >= revision - max_kv_lag

"""Which running sequences a commit computes again, so that their keys and values age no further."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def sequences_to_recompute(
    oldest: Sequence[int], lengths: Sequence[int], revision: int, max_kv_lag: int | None
) -> list[int]:
    """Chooses among running sequences at the commit of ``revision``.

    Chosen are all whose keys or values would be more than ``max_kv_lag`` commits old, and as many
    more as it takes for no later commit to exceed its share of the sequences, 1 / (max_kv_lag + 1).
    Without the second the sequences of a batch, which begin together, would all wait at one commit.

    Args:
        oldest: The revision of each sequence's oldest key or value.
        lengths: How many tokens each has.
        revision: That of the new weights.
        max_kv_lag: 0 chooses all, None chooses none.

    Returns:
        Indices, those with the oldest keys first. Of equal ones the shortest come first: they cost
        the least, and probably have the longest to live.
    """
    if max_kv_lag is None:
        return []
    order = sorted(range(len(oldest)), key=lambda i: (oldest[i], lengths[i]))
    share = -(-len(order) // (max_kv_lag + 1))
    count = 0
    for place, i in enumerate(order, start=1):
        # The first ``place`` must all be computed again by then; each commit takes its share.
        commits_left = max(0, oldest[i] + max_kv_lag + 1 - revision)
        count = max(count, place - share * commits_left)
    return order[:count]

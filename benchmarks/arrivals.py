"""What an update costs the sequences under way, by when their tokens came."""

from __future__ import annotations

import itertools

FIRST_SECONDS = 180
FIRST_TOKENS = 20

# After a commit, until decoding is as it was: long prefixes are computed again for seconds.
SETTLE_SECONDS = {"keep": 1.0, "recompute": 10.0}


class Arrivals:
    """When tokens of all streams came, and how many."""

    def __init__(self) -> None:
        self.all: list[tuple[float, int]] = []

    def tokens(self, start: float, end: float) -> int:
        """That came between two moments."""
        return sum(count for at, count in self.all if start <= at < end)

    def flowing(self, streams: int) -> bool:
        """Whether sampling is under way, past what its first steps compile."""
        return sum(count for _, count in self.all) >= FIRST_TOKENS * streams

    def lost(self, began: float, end: float, window: float) -> float:
        """Seconds of undisturbed decoding that the tokens missing between two moments take. What is
        undisturbed, the ``window`` before and that after tell: the longer sequences are, the slower
        they grow, whatever else happens.
        """
        around = self.tokens(began - window, began) + self.tokens(end, end + window)
        rate = around / (2 * window)
        return (end - began) - self.tokens(began, end) / rate

    def longest_gap(self, start: float, end: float) -> float:
        """Seconds without any token, at most."""
        times = [at for at, count in self.all if count and start - 0.1 <= at <= end + 1]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)

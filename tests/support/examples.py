"""How many examples Hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

FULL = 100  # what Hypothesis itself tries


def examples(count: int) -> int:
    """So many in a full run, and fewer under the profile of a fast one."""
    return max(1, count * settings().max_examples // FULL)

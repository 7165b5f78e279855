"""What an outcome is worth: goals reached and missed."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rollwire_demo.check import TOLERANCE
from rollwire_demo.history import GOAL

if TYPE_CHECKING:
    from rollwire_demo.run import Outcome

START = 0.3  # what is above it at the first step needs no learning
VERSIONS = 20
CROSSED = 100


@dataclass(frozen=True, slots=True)
class Finding:
    """A row of the table at the end.

    Attributes:
        what, result, goal: In words; a goal may be none.
        good: Whether the goal is reached; None if there is none.
    """

    what: str
    result: str
    goal: str = ""
    good: bool | None = None


def judge(outcome: Outcome) -> list[Finding]:
    """The findings, in the order in which they are shown."""
    history, check = outcome.history, outcome.check
    start, end = history.first_reward, history.last_reward
    versions, crossed = len(history.steps), history.crossed
    paused = [1e3 * step.paused_seconds for step in history.steps] or [0.0]
    return [
        Finding("reward at the start", f"{start:.3f}", f"< {START}", start < START),
        Finding("reward at the end", f"{end:.3f}", f"> {GOAL}", end > GOAL),
        Finding("versions published", f"{versions:,}", f"≥ {VERSIONS}", versions >= VERSIONS),
        Finding(
            "sequences that crossed an update",
            f"{crossed:,} of {len(history.points):,}",
            f"≥ {CROSSED}",
            crossed >= CROSSED,
        ),
        Finding(
            "worst log-probability error",
            f"{check.worst_error:.1e}" if check.tokens else "not checked",
            f"≤ {TOLERANCE:.0e}",
            check.tokens > 0 and not check.problems,
        ),
        Finding("log-probabilities checked", f"{check.tokens:,}, {check.versions:,} versions"),
        Finding("paused by an update", f"median {median(paused):.0f}, worst {max(paused):.0f} ms"),
        Finding("tokens a second", f"{history.tokens / max(history.seconds, 1e-3):,.0f}"),
        Finding("time", f"{outcome.seconds:.0f} s, learning {history.seconds:.0f} s"),
    ]

"""What happened, and which goals it reached: for the display, the plot and the check."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING

from rollwire_demo.task import LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client import PublishReport, Trajectory

    from rollwire_demo.task import ScoredAnswer

GOAL = 0.9  # of the mean reward of a batch
GOAL_STEPS = 5  # in a row that hold it
START_REWARD = 0.3  # more than this at the first step would need no learning
LEAST_VERSIONS = 20
LEAST_CROSSED = 100
TOLERANCE = 1e-4  # of log-probabilities in fp32: batches and kernels sum in other orders
CHECKED_PER_STEP = 2
RECENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step of the trainer.

    Attributes:
        version: That it published, learned from what older ones had sampled.
        seconds: Since training began.
        reward: Mean over the batch.
        tokens: In the batch.
        paused_seconds: Of the server that its commit stopped longest.
    """

    version: int
    seconds: float
    reward: float
    tokens: int
    paused_seconds: float


@dataclass(frozen=True, slots=True)
class Point:
    """A sequence in the plot: the mean version of its tokens, and its reward."""

    version: float
    reward: float
    crossed: bool


class TrainingHistory:
    """Grows by one step at a time.

    Attributes:
        steps: In order.
        points: One a sequence.
        latest: The sequence to show: a recent one that crossed an update.
        sample: Sequences to check, some of every step.
        digests: Of what was published, by version.
    """

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.points: list[Point] = []
        self.latest: ScoredAnswer | None = None
        self.sample: list[Trajectory] = []
        self.digests: dict[int | None, int] = {}
        self._rewards_by_version: dict[int, list[float]] = defaultdict(list)
        self._began = time.monotonic()

    def begin(self) -> None:
        """Training begins now."""
        self._began = time.monotonic()

    def add(self, version: int, answers: Sequence[ScoredAnswer], report: PublishReport) -> None:
        """Records that ``version``, learned from ``answers``, was published."""
        crossed = [answer for answer in answers if answer.crossed]
        if crossed:
            self.latest = crossed[0]
        self.sample += [answer.trajectory for answer in crossed[:CHECKED_PER_STEP]]
        self.digests[version] = report.digest
        for answer in answers:
            versions = [v or 0 for v in answer.trajectory.versions]
            self.points.append(Point(fmean(versions), answer.reward, answer.crossed))
            for sampled_by, reward in zip(versions, answer.rewards, strict=True):
                self._rewards_by_version[sampled_by].append(reward)
        self.steps.append(
            StepRecord(
                version=version,
                seconds=time.monotonic() - self._began,
                reward=fmean(answer.reward for answer in answers),
                tokens=len(answers) * LENGTH,
                paused_seconds=max(server.paused_seconds for server in report.servers),
            )
        )

    @property
    def crossed(self) -> int:
        """Sequences with tokens of more than one version."""
        return sum(point.crossed for point in self.points)

    @property
    def goal_held(self) -> bool:
        """Whether the goal was reached, and not lost again at once."""
        last = self.steps[-GOAL_STEPS:]
        return len(last) == GOAL_STEPS and all(step.reward > GOAL for step in last)

    @property
    def last_reward(self) -> float:
        """Mean over the last batches."""
        return fmean(step.reward for step in self.steps[-GOAL_STEPS:]) if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """From the begin of training to the last step."""
        return self.steps[-1].seconds if self.steps else 0.0

    @property
    def recent_tokens_per_second(self) -> float:
        """Trained on lately."""
        recent = [s for s in self.steps if s.seconds > self.seconds - RECENT_SECONDS]
        return sum(s.tokens for s in recent) / max(min(RECENT_SECONDS, self.seconds), 1e-3)

    def reward_by_version(self) -> dict[int, float]:
        """Mean reward of the tokens that each version sampled; 0 is the initial checkpoint."""
        rewards = self._rewards_by_version
        return {version: fmean(rewards[version]) for version in sorted(rewards)}


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What the check found.

    Attributes:
        sequences, tokens, versions: How many were checked.
        worst_error: The largest difference between the log-probability that a server gave a token
            and the one that the version of its tag gives it; infinite if one is not a number.
        problems: What is wrong, a line each; empty if nothing is.
    """

    sequences: int
    tokens: int
    versions: int
    worst_error: float
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What came of it; ``seconds`` of all together."""

    history: TrainingHistory
    check: CheckResult
    seconds: float


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A row of the table at the end; ``reached`` is None where there is no goal."""

    what: str
    result: str
    goal: str = ""
    reached: bool | None = None


def goals(result: DemoResult) -> list[ResultRow]:
    """The rows of the table, in order."""
    history, check = result.history, result.check
    start = history.steps[0].reward if history.steps else 0.0
    end, versions, crossed = history.last_reward, len(history.steps), history.crossed
    tokens = sum(step.tokens for step in history.steps)
    paused = [1e3 * step.paused_seconds for step in history.steps] or [0.0]
    return [
        ResultRow("reward at the start", f"{start:.3f}", f"< {START_REWARD}", start < START_REWARD),
        ResultRow("reward at the end", f"{end:.3f}", f"> {GOAL}", end > GOAL),
        ResultRow(
            "versions published", f"{versions:,}", f"≥ {LEAST_VERSIONS}", versions >= LEAST_VERSIONS
        ),
        ResultRow(
            "sequences that crossed an update",
            f"{crossed:,} of {len(history.points):,}",
            f"≥ {LEAST_CROSSED}",
            crossed >= LEAST_CROSSED,
        ),
        ResultRow(
            "worst log-probability error",
            f"{check.worst_error:.1e}" if check.tokens else "not checked",
            f"≤ {TOLERANCE:.0e}",
            check.tokens > 0 and not check.problems,
        ),
        ResultRow("log-probabilities checked", f"{check.tokens:,}, {check.versions:,} versions"),
        ResultRow(
            "paused by an update", f"median {median(paused):.0f}, worst {max(paused):.0f} ms"
        ),
        ResultRow("tokens a second", f"{tokens / max(history.seconds, 1e-3):,.0f}"),
        ResultRow("time", f"{result.seconds:.0f} s, learning {history.seconds:.0f} s"),
    ]

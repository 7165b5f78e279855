"""What happened so far: a record of each step, and what the summary, plot and check need."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from rollwire_demo.task import LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client import PublishReport, Trajectory

    from rollwire_demo.rollouts import Rollout

GOAL = 0.9  # of the mean reward of a batch
HELD_STEPS = 5  # in a row
CHECKED_PER_STEP = 2
RECENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the trainer.

    Attributes:
        version: That it published, from what older ones had sampled.
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


class History:
    """Grows by one step at a time.

    Attributes:
        steps: In order.
        points: One a sequence.
        latest: The sequence shown: a recent one that crossed an update.
        sample: Sequences to check, some of every step.
        digests: Of what was published, by version.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.points: list[Point] = []
        self.latest: Rollout | None = None
        self.sample: list[Trajectory] = []
        self.digests: dict[int | None, int] = {}
        self._by_version: dict[int, list[float]] = defaultdict(list)
        self._began = 0.0

    def begin(self) -> None:
        """Training begins now."""
        self._began = time.monotonic()

    def add(self, version: int, rollouts: Sequence[Rollout], report: PublishReport) -> None:
        """Records that ``version``, learned from ``rollouts``, was published."""
        crossed = [rollout for rollout in rollouts if rollout.crossed]
        if crossed:
            self.latest = crossed[0]
        self.sample += [rollout.trajectory for rollout in crossed[:CHECKED_PER_STEP]]
        self.digests[version] = report.digest
        for rollout in rollouts:
            versions = [v or 0 for v in rollout.trajectory.versions]
            self.points.append(Point(fmean(versions), rollout.reward, rollout.crossed))
            for sampled_by, reward in zip(versions, rollout.rewards, strict=True):
                self._by_version[sampled_by].append(reward)
        self.steps.append(
            Step(
                version=version,
                seconds=time.monotonic() - self._began,
                reward=fmean(rollout.reward for rollout in rollouts),
                tokens=len(rollouts) * LENGTH,
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
        last = self.steps[-HELD_STEPS:]
        return len(last) == HELD_STEPS and all(step.reward > GOAL for step in last)

    @property
    def first_reward(self) -> float:
        """Of the first batch."""
        return self.steps[0].reward if self.steps else 0.0

    @property
    def last_reward(self) -> float:
        """Of the last batches."""
        return fmean(step.reward for step in self.steps[-HELD_STEPS:]) if self.steps else 0.0

    @property
    def seconds(self) -> float:
        """From the begin of training to the last step."""
        return self.steps[-1].seconds if self.steps else 0.0

    @property
    def tokens(self) -> int:
        """In all batches."""
        return sum(step.tokens for step in self.steps)

    @property
    def recent_tokens_per_second(self) -> float:
        """Trained on lately."""
        recent = [s for s in self.steps if s.seconds > self.seconds - RECENT_SECONDS]
        return sum(s.tokens for s in recent) / max(min(RECENT_SECONDS, self.seconds), 1e-3)

    def reward_by_version(self) -> dict[int, float]:
        """Mean reward of the tokens that each version sampled; 0 is the initial checkpoint."""
        return {version: fmean(self._by_version[version]) for version in sorted(self._by_version)}

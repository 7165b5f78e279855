"""What the trainer learns from: sequences, and what each of their tokens was worth."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from rollwire_client import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rollwire_client import Group, Trajectory

    from rollwire_demo.task import Cipher


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished sequence.

    Attributes:
        trajectory: What the servers sampled.
        rewards: Of each of its tokens.
    """

    trajectory: Trajectory
    rewards: Sequence[float]

    @property
    def reward(self) -> float:
        """Of the sequence, 0 to 1."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def crossed(self) -> bool:
        """Whether its tokens are of more than one version."""
        return len(set(self.trajectory.versions)) > 1


def prompts(task: Cipher) -> Iterator[Prompt]:
    """Of the task, for ever."""
    for number in count():
        yield Prompt(str(number), task.prompt())


def rewarded(task: Cipher, groups: Iterable[Group]) -> list[Rollout]:
    """The sequences of all groups, one after the other."""
    return [
        Rollout(
            sample.trajectory, task.rewards(group.prompt.token_ids, sample.trajectory.token_ids)
        )
        for group in groups
        for sample in group.samples
    ]

"""What batches are made of: prompts, groups of samples, and what became of them."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._data import Sampling
    from rollwire_client._trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a group is sampled of.

    Attributes:
        id: Names it in the trainer's data.
        token_ids: At least one: any sequence of integers.
        epoch: Which pass over the data this is. The draws of the same id in the same epoch are the
            same again.
        sampling: How to sample this one; without a seed. None: as the batcher says.
        info: The caller's own, such as the right answer, for its reward function. A buffer that is
            saved writes it as JSON.
    """

    id: str
    token_ids: Sequence[int]
    epoch: int = 0
    sampling: Sampling | None = None
    info: Any = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One member of a group.

    Attributes:
        trajectory: What was sampled; all of it where ``trajectory.complete``.
        reward: As the reward function gave it; None without one, and where it is not complete.
    """

    trajectory: Trajectory
    reward: float | None


class DropReason(enum.Enum):
    """Why a group was not handed out, and will not be."""

    TAIL = "tail"
    """The batch had enough before it was complete."""
    STALE = "stale"
    """Some of it was sampled under weights older than ``max_lag`` allows."""
    FILTERED = "filtered"
    """The caller's ``decide`` said so."""
    CUT = "cut"
    """The ``timeout`` of a sample was up. Another in its place would favour the short."""
    FAILED = "failed"
    """One of its samples could not be had, or ``decide`` failed at it: ``error`` says why."""
    UNSCORED = "unscored"
    """The reward of one of its samples could not be had: ``error`` says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of a prompt.

    Attributes:
        prompt: Of all of them.
        samples: One for each member, in the order of their seeds.
        dropped: Why it was dropped; None where it was not.
        error: What went wrong, where it was dropped for an error.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    dropped: DropReason | None = None
    error: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether each of its samples came to its own end."""
        return all(sample.trajectory.complete for sample in self.samples)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """Of each sample."""
        return tuple(sample.reward for sample in self.samples)

    @property
    def versions(self) -> frozenset[int | None]:
        """The weight versions that sampled any of its tokens."""
        return frozenset(
            segment.weights.version
            for sample in self.samples
            for segment in sample.trajectory.segments
        )


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """Groups with the same fate, and what they are like: how a batch's bias is seen.

    Attributes:
        groups: In the order in which they were begun.
    """

    groups: tuple[Group, ...] = ()

    def __repr__(self) -> str:
        """How many, and why: not their tokens."""
        reasons = Counter(group.dropped.value for group in self.groups if group.dropped)
        told = [f"{count} {reason}" for reason, count in sorted(reasons.items())]
        length = "" if self.mean_length is None else f", mean_length={self.mean_length:.0f}"
        return f"Part(groups={len(self.groups)}{''.join(f', {why}' for why in told)}{length})"

    def of(self, reason: DropReason) -> Part:
        """Those that were dropped for this reason, with the lengths and rewards of these alone."""
        return Part(tuple(group for group in self.groups if group.dropped is reason))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Output tokens of each sample so far."""
        return tuple(len(sample.trajectory.token_ids) for sample in self._samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        """Of the samples that have one."""
        return tuple(sample.reward for sample in self._samples if sample.reward is not None)

    @property
    def mean_length(self) -> float | None:
        """Tokens; None without samples."""
        return fmean(self.lengths) if self.lengths else None

    @property
    def mean_reward(self) -> float | None:
        """None without rewards."""
        return fmean(self.rewards) if self.rewards else None

    @property
    def _samples(self) -> list[Sample]:
        return [sample for group in self.groups for sample in group.samples]


@dataclass(frozen=True, slots=True)
class Batch:
    """What ``Batcher.collect`` hands out, and what it did not.

    Attributes:
        version: The trainer's step that it was collected for.
        finished: Handed out here, and nowhere else.
        carried: Under way, or complete and put off: what is there of it so far. A later batch hands
            it out, or says that it was dropped.
        dropped: Since the batch before; ``dropped.of(DropReason.FAILED)`` and its siblings tell the
            reasons apart.
        seconds: From the call to its end.
    """

    version: int | None
    finished: Part
    carried: Part
    dropped: Part
    seconds: float

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those to train on."""
        return self.finished.groups


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What ``Batcher.evaluate`` sampled: all of it, under one policy.

    Attributes:
        version: Of the weights; None for those without one, or if there is no token.
        digest: Of the weights; None if there is no token.
        samples: One group for each prompt, in their order, but for those in ``failed``.
        seconds: Taken.
        failed: Prompts whose group could not be had, such as one that is longer than the context;
            each says why. What ``samples`` are like says nothing of these.
    """

    version: int | None
    digest: int | None
    samples: Part
    seconds: float
    failed: Part = Part()


class Decision(enum.Enum):
    """What becomes of a group that is complete."""

    TAKE = "take"
    """It is part of this batch."""
    POSTPONE = "postpone"
    """It is asked about again in the next batch."""
    DROP = "drop"
    """Nobody is to train on it; another prompt takes its place."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is.

    Attributes:
        version: The trainer's step that it is collected for.
        target: Groups that it is to have.
        chosen: Groups that it has.
        sampling: Groups that are under way, for later batches too.
        ready: Groups that are complete and have no place in it, or not yet.
        seconds: Since the call.
    """

    version: int | None
    target: int
    chosen: int
    sampling: int
    ready: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tail:
    """What becomes of groups that are unfinished when a batch has its target: ``Drop``, ``Carry``.

    Attributes:
        patience: They are waited for until this many times the time that the first 80 % of the
            target took, and are part of the batch if they make it; 1.0 does not wait.
    """

    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.patience >= 1:
            raise ValueError(f"patience is {self.patience!r}, not a number from 1 on")


@dataclass(frozen=True, slots=True)
class Drop(Tail):
    """They are aborted. What a trainer sees of over-sampling is then shorter than what the policy
    samples: ``Batch.dropped`` says by how much.
    """


@dataclass(frozen=True, slots=True)
class Carry(Tail):
    """They go on, under each new policy, and are the first candidates of the next batch (partial
    rollout).
    """

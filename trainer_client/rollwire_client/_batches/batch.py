"""The data of batches: prompts, groups of samples, and what became of them."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client._data import Sampling
    from rollwire_client._fleet.session import Conversation
    from rollwire_client._trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a group.

    Attributes:
        id: Name of the prompt in the trainer's data.
        token_ids: At least one; any sequence of integers.
        epoch: Number of the pass over the data. The same id and epoch give the same random draws.
        sampling: How to sample this prompt, without a seed. None: the batcher's ``sampling``.
        info: The caller's own data for the reward function, such as the right answer. It must be
            JSON if the buffer is saved.
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
        trajectory: The tokens so far; the whole sample if ``trajectory.complete``. Of a
            conversation: the last turn, without its ``finish`` until the conversation has ended.
        reward: Reward of a complete sample; None without a reward function.
        conversation: The whole conversation, with a ``rollout`` function; else None.
    """

    trajectory: Trajectory
    reward: float | None
    conversation: Conversation | None = None

    @property
    def turns(self) -> tuple[Trajectory, ...]:
        """What was sampled: the turns of a conversation, else the trajectory."""
        return (self.trajectory,) if self.conversation is None else self.conversation.turns


class DropReason(enum.Enum):
    """Why a group was dropped."""

    TAIL = "tail"
    """The batch had its target before this group was complete."""
    STALE = "stale"
    """A token was sampled under weights older than ``max_lag`` allows."""
    FILTERED = "filtered"
    """The caller's ``decide`` dropped it."""
    CUT = "cut"
    """A sample reached its ``timeout``. Drawing another one would favour short samples."""
    FAILED = "failed"
    """A sample could not be completed, or ``decide`` failed for the group; see ``error``."""
    UNSCORED = "unscored"
    """A sample has no reward; see ``error``."""


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one prompt.

    Attributes:
        prompt: The prompt of all samples.
        samples: In the order of their seeds.
        dropped: Why the group was dropped; None if it was not.
        error: The error for which it was dropped, if there was one.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    dropped: DropReason | None = None
    error: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether every sample is complete."""
        return all(sample.trajectory.complete for sample in self.samples)

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """The reward of each sample."""
        return tuple(sample.reward for sample in self.samples)

    @property
    def versions(self) -> frozenset[int | None]:
        """The weight versions that sampled its tokens; None: weights without a version."""
        return frozenset(
            segment.weights.version
            for sample in self.samples
            for turn in sample.turns
            for segment in turn.segments
        )


@dataclass(frozen=True, slots=True, repr=False)
class Part:
    """The finished, carried or dropped groups of a batch; comparing them shows the batch's bias.

    Attributes:
        groups: In the order in which they were started.
    """

    groups: tuple[Group, ...] = ()

    def __repr__(self) -> str:
        """Short: counts and reasons, no tokens."""
        reasons = Counter(group.dropped.value for group in self.groups if group.dropped)
        counts = [f", {count} {reason}" for reason, count in sorted(reasons.items())]
        length = "" if self.mean_length is None else f", mean_length={self.mean_length:.0f}"
        return f"Part(groups={len(self.groups)}{''.join(counts)}{length})"

    def of(self, reason: DropReason) -> Part:
        """The groups that were dropped for this reason."""
        return Part(tuple(group for group in self.groups if group.dropped is reason))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The sampled tokens of each sample."""
        return tuple(sum(len(turn.token_ids) for turn in sample.turns) for sample in self._samples)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the samples that have one."""
        return tuple(sample.reward for sample in self._samples if sample.reward is not None)

    @property
    def mean_length(self) -> float | None:
        """In tokens; None without samples."""
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
    """What ``Batcher.collect`` returns.

    Attributes:
        version: The trainer's step for which the batch was collected.
        finished: The groups of the batch; no other batch has them.
        carried: Groups that are unfinished, or complete and left to a later batch, in their present
            state. A later batch returns them or reports them as dropped.
        dropped: Groups that were dropped since the previous batch;
            ``dropped.of(DropReason.FAILED)`` has those of one reason.
        seconds: Duration of the call.
    """

    version: int | None
    finished: Part
    carried: Part
    dropped: Part
    seconds: float

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups to train on."""
        return self.finished.groups


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What ``Batcher.evaluate`` returns: whole samples under one policy.

    Attributes:
        version: Version of the weights; None if they have none, or if no token was sampled.
        digest: Digest of the weights; None if no token was sampled.
        samples: One group for each prompt, in their order, without those in ``failed``.
        seconds: Duration of the call.
        failed: Groups that could not be completed, each with its error, such as a prompt that is
            longer than the context.
    """

    version: int | None
    digest: int | None
    samples: Part
    seconds: float
    failed: Part = Part()


class Decision(enum.Enum):
    """What to do with a complete group."""

    TAKE = "take"
    """Make it part of this batch."""
    POSTPONE = "postpone"
    """Decide again in the next batch."""
    DROP = "drop"
    """Drop it; another prompt takes its place."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a batch is.

    Attributes:
        version: The trainer's step for which the batch is collected.
        target: Groups that the batch should have.
        chosen: Groups that it has.
        sampling: Groups that are still sampled, including those for later batches.
        ready: Complete groups that are not part of the batch, or not yet.
        seconds: Seconds since the call.
    """

    version: int | None
    target: int
    chosen: int
    sampling: int
    ready: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Tail:
    """What happens to unfinished groups once a batch has its target: ``Drop`` or ``Carry``.

    Attributes:
        patience: The batch first waits for them, until it has taken this many times as long as the
            first 80 % of its target. Groups that are complete by then are part of it. 1.0 does not
            wait.
    """

    patience: float = 1.0

    def __post_init__(self) -> None:
        if not self.patience >= 1:
            raise ValueError(f"patience is {self.patience!r}, not a number from 1 on")


@dataclass(frozen=True, slots=True)
class Drop(Tail):
    """Aborts unfinished groups. This favours short samples: ``Batch.dropped`` shows how much."""


@dataclass(frozen=True, slots=True)
class Carry(Tail):
    """Continues unfinished groups under each new policy; they come first in the next batch."""

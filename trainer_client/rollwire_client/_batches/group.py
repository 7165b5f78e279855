"""How a group is sampled: each of its samples is a sequence that goes on whatever fails."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import logging
import math
import operator
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire.reasons import ErrorScope

from rollwire_client._batches.batch import DropReason, Group, Prompt, Sample
from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import (
    CallbackError,
    ClosedError,
    QueueFullError,
    RefusedError,
    RolloutFailedError,
    RollwireError,
    ServerFailedError,
    TimedOutError,
)
from rollwire_client._rpc.conversion import checked_token_ids
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from rollwire_client._batches.callbacks import RewardCaller
    from rollwire_client._batches.trainer_steps import TrainerSteps
    from rollwire_client._data import Sampling
    from rollwire_client._fleet.rollout import Rollout
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._rpc.conversion import RolloutOptions
    from rollwire_client._trajectory import Trajectory

logger = logging.getLogger(__name__)

_QUEUE_FULL_DELAY = 0.1  # seconds between two rollouts, in case ``Retries.seconds`` is near zero
_NEVER_REFILLED = (RefusedError, TimedOutError, ClosedError)


@dataclass(slots=True)
class LiveSample:
    """A sample that is under way or complete.

    Attributes:
        index: Its place in the group.
        output: What was sampled.
        reward: Of the complete sample; None before that, and without a reward function.
        refills: How often it was begun anew, which changes its seed.
        rollout: Samples it.
    """

    index: int
    output: TrajectoryBuilder
    reward: float | None = None
    refills: int = 0
    rollout: Rollout | None = None

    def restart(self) -> None:
        """Discards what was sampled; the next draws are others."""
        self.refills += 1
        self.rollout = None
        self.output = TrajectoryBuilder(self.output.prompt_ids)


class GroupState(enum.Enum):
    """Where a group is on its way into a batch; see ``GroupBuffer``."""

    SAMPLING = "sampling"  # also before its task is started, and after that failed
    READY = "ready"  # complete
    POSTPONED = "postponed"  # complete, and not to be decided on before the next batch
    CHOSEN = "chosen"  # part of the open batch


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that is neither handed out nor dropped.

    Attributes:
        prompt: Of all samples.
        samples: In the order of their seeds.
        number: Its place among all groups of the batcher, by age.
        state: Set by ``GroupBuffer``.
        completed: How many groups were complete by the time that it was.
        oldest_version: Its next tokens may be of this weight version or newer ones; None: any.
        task: Samples it; None before it is started.
        ended: Whether the task came to an end by itself: with ``error`` or, if that is None, with
            all samples complete.
        session_id: Sends its samples to the same server, as they share a prefix.
    """

    prompt: Prompt
    samples: list[LiveSample]
    number: int = 0
    state: GroupState = GroupState.SAMPLING
    completed: int = 0
    oldest_version: int | None = None
    task: asyncio.Task[None] | None = None
    ended: bool = False
    error: Exception | None = None
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def snapshot(self, dropped: DropReason | None = None, error: Exception | None = None) -> Group:
        samples = tuple(
            Sample(sample.output.trajectory(), sample.reward) for sample in self.samples
        )
        return Group(self.prompt, samples, dropped, error)

    def lag(self, steps: TrainerSteps) -> float:
        """Steps that its oldest token is behind the trainer: minus infinity without a token, and
        infinity if weights without a version sampled one.
        """
        lags = [steps.lag(weights) for sample in self.samples for weights in sample.output.weights]
        return max(lags, default=-math.inf)

    def lower_oldest_version(self, version: int | None) -> None:
        """Lets older weights sample its next tokens, as after a rollback."""
        if self.oldest_version is None or self.oldest_version == version:
            return
        if version is None or version < self.oldest_version:
            self.oldest_version = version
            for sample in self.samples:
                if sample.rollout is not None:
                    sample.rollout.lower_min_version(version)


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples groups.

    Attributes:
        pool: The servers that sample.
        run_seed: The trainer's seed.
        group_size: Samples of each prompt.
        sampling: Of prompts without one of their own; has no seed.
        options: Of the rollouts.
        reward: Scores complete samples; None: they have no reward.
        refills: How often in a row a sample that failed is begun again.
    """

    pool: ServerPool
    run_seed: int
    group_size: int
    sampling: Sampling
    options: RolloutOptions
    reward: RewardCaller | None
    refills: int

    def new_group(self, prompt: Prompt) -> LiveGroup:
        """A group of which nothing is sampled yet.

        Raises:
            Exception: See ``checked_prompt``.
        """
        prompt = checked_prompt(prompt)
        samples = [
            LiveSample(i, TrajectoryBuilder(prompt.token_ids)) for i in range(self.group_size)
        ]
        return LiveGroup(prompt, samples)

    async def sample(self, group: LiveGroup) -> None:
        """Samples all members to their ends; each goes on from what it has.

        Raises:
            Exception: What a sample met: one that ends the group at once, which ends the other
                samples too; another one when all samples have ended, the first of them.
        """
        tasks = [asyncio.create_task(self._complete(group, sample)) for sample in group.samples]
        running, errors = set(tasks), list[Exception]()
        try:
            while running and not any(ends_group(error) for error in errors):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                found = [_error(task, group) for task in tasks if task in done]
                errors += [error for error in found if error is not None]
        finally:
            await cancel_all(tasks)
        for error in sorted(errors, key=ends_group, reverse=True):
            raise error

    async def _complete(self, group: LiveGroup, sample: LiveSample) -> None:
        failures = 0
        while not (trajectory := sample.output.trajectory()).complete:
            tokens = len(trajectory.token_ids)
            try:
                await self._run_rollout(group, sample)
            except _NEVER_REFILLED:
                raise
            except RollwireError as error:
                if _queue_was_full(error):  # servers are busy or paused: not this sample's failure
                    await asyncio.sleep(_QUEUE_FULL_DELAY)
                    continue
                server_failed = _server_failed(error)
                progressed = len(sample.output.token_ids) > tokens and not server_failed
                failures = 1 if progressed else failures + 1
                if failures > self.refills:
                    raise
                logger.warning("%s; sample %d of %s again", error, sample.index, group.prompt.id)
                if server_failed:  # the same draws would fail again
                    sample.restart()
            else:
                if not sample.output.trajectory().complete:
                    failures += 1
                    if failures > self.refills:
                        raise _ended_by_others(sample.output.trajectory())
        if sample.reward is None and self.reward is not None:
            sample.reward = await self.reward.score(group.prompt, trajectory)

    async def _run_rollout(self, group: LiveGroup, sample: LiveSample) -> None:
        prompt = group.prompt
        seed = sample_seed(self.run_seed, prompt.id, prompt.epoch, sample.index, sample.refills)
        options: RolloutOptions = {**self.options, "session_id": group.session_id}
        if group.oldest_version is not None:
            options["min_weight_version"] = group.oldest_version
        sampling = replace(prompt.sampling or self.sampling, seed=seed)
        sample.rollout = self.pool.rollout(sample.output, sampling, options)
        await sample.rollout.run()


def checked_prompt(prompt: Prompt) -> Prompt:
    """The prompt with plain integers.

    Raises:
        TypeError, ValueError: It is no Prompt, its id or epoch cannot be, or its sampling has a
            seed.
        InvalidRequestError: Its token ids are none.
    """
    if not isinstance(prompt, Prompt):
        raise TypeError(f"prompts gave {prompt!r:.80}, not a Prompt(id, token_ids)")
    if not isinstance(prompt.id, str):
        raise TypeError(f"the id of a prompt is {prompt.id!r}, not text")
    prompt.id.encode()  # a buffer file must be able to hold it
    epoch = operator.index(prompt.epoch)
    if not -(1 << 63) <= epoch < 1 << 63:
        raise ValueError(f"the epoch of prompt {prompt.id!r} is {epoch}, from -2^63 to 2^63 - 1")
    if prompt.sampling is not None and prompt.sampling.seed is not None:
        raise ValueError(f"the sampling of prompt {prompt.id!r} has a seed: leave it out")
    return replace(prompt, epoch=epoch, token_ids=checked_token_ids(prompt.token_ids))


def sample_seed(run_seed: int, prompt_id: str, epoch: int, index: int, refills: int = 0) -> int:
    """A 64-bit seed: different for each sample of a run, and the same whenever it is computed."""
    text = json.dumps([run_seed, prompt_id, epoch, index, refills]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def ends_group(error: Exception) -> bool:
    """Whether the error is of this group alone. Others every group would meet: those are raised by
    ``collect``, and the group goes on in the next one.
    """
    return not isinstance(error, RollwireError) or error.scope is ErrorScope.SEQUENCE


def drop_reason(error: Exception) -> DropReason:
    if isinstance(error, TimedOutError):
        return DropReason.CUT
    unscored = isinstance(error, CallbackError) and error.callback == "reward"
    return DropReason.UNSCORED if unscored else DropReason.FAILED


def _error(task: asyncio.Task[None], group: LiveGroup) -> Exception | None:
    try:
        task.result()
    except Exception as error:
        return error
    except asyncio.CancelledError as error:
        cancelled = RuntimeError(f"a sample of prompt {group.prompt.id!r} was cancelled")
        cancelled.__cause__ = error
        return cancelled
    return None


def _server_failed(error: RollwireError) -> bool:
    """Whether a server failed at the sequence, so that going on from its tokens does not help."""
    if isinstance(error, RolloutFailedError):
        return error.of_servers
    return isinstance(error, ServerFailedError)


def _queue_was_full(error: RollwireError) -> bool:
    causes = error.causes if isinstance(error, RolloutFailedError) else ()
    return bool(causes) and isinstance(causes[-1], QueueFullError)


def _ended_by_others(trajectory: Trajectory) -> RolloutFailedError:
    reason = trajectory.finish.reason.value if trajectory.finish else "cut"
    error = RolloutFailedError(f"sequence {trajectory.request_id} was {reason} again and again", ())
    error.trajectory = trajectory
    return error

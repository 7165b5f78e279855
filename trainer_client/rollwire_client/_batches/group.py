"""A group that is being sampled: its members, each a sequence that goes on whatever happens."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire.reasons import ErrorScope

from rollwire_client._batches.batch import DropReason, Group, Prompt, Sample
from rollwire_client._batches.seeds import seed_of
from rollwire_client._concurrency.tasks import cancel_all
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
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from rollwire.types import WeightTag

    from rollwire_client._batches.callbacks import Scorer
    from rollwire_client._batches.training_steps import Steps
    from rollwire_client._data import Sampling
    from rollwire_client._fleet.rollout import Rollout
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._rpc.request import RolloutOptions
    from rollwire_client._trajectory import Trajectory

logger = logging.getLogger(__name__)

_NO_ROOM_DELAY = 0.1  # seconds between two rollouts, where ``Retries.seconds`` are next to none
_NEVER_REFILLED = (RefusedError, TimedOutError, ClosedError)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How groups are sampled.

    Attributes:
        pool: The servers that sample.
        run: The trainer's seed.
        size: Samples of each prompt.
        sampling: Without a seed.
        options: Of the rollouts.
        scorer: Gives a complete sample its reward; None: there are none.
        refills: How often in a row a sample that failed is begun again.
    """

    pool: ServerPool
    run: int
    size: int
    sampling: Sampling
    options: RolloutOptions
    scorer: Scorer | None
    refills: int


@dataclass(slots=True)
class Member:
    """One sample.

    Attributes:
        index: Which of the group.
        draft: What was sampled so far.
        reward: Once it is complete, if there is one.
        refills: How often it was begun anew, which changes its seed.
    """

    index: int
    draft: TrajectoryBuilder
    reward: float | None = None
    refills: int = 0
    _rollout: Rollout | None = None

    def trajectory(self) -> Trajectory:
        """What there is of it now."""
        self._flush()
        return self.draft.trajectory()

    def weights(self) -> list[WeightTag]:
        """What sampled its tokens."""
        self._flush()
        return self.draft.weights

    def follow(self, rollout: Rollout, draft: TrajectoryBuilder) -> None:
        """It is sampled by ``rollout`` from now on."""
        self._rollout, self.draft = rollout, draft

    def allow(self, least: int | None) -> None:
        """Its next tokens may be of version ``least`` too."""
        if self._rollout is not None:
            self._rollout.allow(least)

    def begin_anew(self) -> None:
        """Forgets what was sampled; the next draws are others."""
        self.refills += 1
        self._rollout = None
        self.draft = TrajectoryBuilder(self.draft.request_id, self.draft.prompt_ids)

    def _flush(self) -> None:
        if self._rollout is not None:
            self._rollout.flush()


@dataclass(slots=True)
class LiveGroup:
    """A group that is sampled, or complete and not handed out yet.

    Attributes:
        number: Rises from group to group.
        prompt: Of its members.
        members: In the order of their seeds.
        oldest_version: That its next tokens may be of; None: any.
        session_id: Its members share a prefix.
        task: Samples it.
        failure: What ended its task before it was complete.
    """

    number: int
    prompt: Prompt
    members: list[Member]
    oldest_version: int | None = None
    task: asyncio.Task[None] | None = None
    failure: Exception | None = None
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def snapshot(self, dropped: DropReason | None = None, error: Exception | None = None) -> Group:
        """What there is of it now."""
        samples = tuple(Sample(member.trajectory(), member.reward) for member in self.members)
        return Group(self.prompt, samples, dropped, error)

    def lag(self, steps: Steps) -> float:
        """Of its oldest token, as ``ledger.Entry`` has it."""
        lags = [steps.lag(weights) for member in self.members for weights in member.weights()]
        return max(lags, default=-math.inf)

    def allow(self, oldest_version: int | None) -> None:
        """Its next tokens may be of that version too: the trainer went back to it."""
        if self.oldest_version is None or self.oldest_version == oldest_version:
            return
        if oldest_version is None or oldest_version < self.oldest_version:
            self.oldest_version = oldest_version
            for member in self.members:
                member.allow(oldest_version)

    @property
    def running(self) -> bool:
        """Whether it is being sampled."""
        return self.task is not None and not self.task.done()


def servers_failed(error: Exception) -> bool:
    """Whether trying elsewhere, or later, does not help."""
    if isinstance(error, RolloutFailedError):
        return error.of_servers
    return isinstance(error, ServerFailedError)


def _found_no_room(error: RollwireError) -> bool:
    causes = error.causes if isinstance(error, RolloutFailedError) else ()
    return bool(causes) and isinstance(causes[-1], QueueFullError)


def is_final(error: Exception) -> bool:
    """Whether it ends a group, as it is of that group; after others, which every group would meet,
    the group goes on.
    """
    return not isinstance(error, RollwireError) or error.scope is ErrorScope.SEQUENCE


def reason_of(error: Exception) -> DropReason:
    """Why a group is dropped that ended with ``error``."""
    if isinstance(error, TimedOutError):
        return DropReason.CUT
    unscored = isinstance(error, CallbackError) and error.callback == "reward"
    return DropReason.UNSCORED if unscored else DropReason.FAILED


async def sample_group(group: LiveGroup, recipe: Recipe) -> None:
    """Samples all members to their ends; each goes on from what it has.

    Raises:
        Exception: What a member came to: at once one that is final, which ends the others too; else
            the first, once all have ended.
    """
    tasks = [asyncio.create_task(_sample(group, member, recipe)) for member in group.members]
    running, errors = set(tasks), list[Exception]()
    try:
        while running and not any(is_final(error) for error in errors):
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            outcomes = [_outcome(task, group) for task in tasks if task in done]
            errors += [error for error in outcomes if error is not None]
    finally:
        await cancel_all(tasks)
    for error in sorted(errors, key=is_final, reverse=True):
        raise error


def _outcome(task: asyncio.Task[None], group: LiveGroup) -> Exception | None:
    try:
        task.result()
    except Exception as error:
        return error
    except asyncio.CancelledError as error:
        told = RuntimeError(f"a sample of prompt {group.prompt.id!r} was cancelled")
        told.__cause__ = error
        return told
    return None


async def _sample(group: LiveGroup, member: Member, recipe: Recipe) -> None:
    failures = 0
    while not (trajectory := member.trajectory()).complete:
        tokens = len(trajectory.token_ids)
        try:
            await _attempt(group, member, recipe)
        except _NEVER_REFILLED:
            raise
        except RollwireError as error:
            if _found_no_room(error):  # the servers are busy with others, or paused: no failure
                await asyncio.sleep(_NO_ROOM_DELAY)
                continue
            went_on = len(member.draft.token_ids) > tokens and not servers_failed(error)
            failures = 1 if went_on else failures + 1
            if failures > recipe.refills:
                raise
            logger.warning("%s; sample %d of %s again", error, member.index, group.prompt.id)
            if servers_failed(error):  # the same draws would fail again
                member.begin_anew()
        else:
            if not member.trajectory().complete:
                failures += 1
                if failures > recipe.refills:
                    raise _ended_by_others(member.trajectory())
    if member.reward is None and recipe.scorer is not None:
        member.reward = await recipe.scorer.score(group.prompt, trajectory)


def _ended_by_others(trajectory: Trajectory) -> RolloutFailedError:
    reason = trajectory.finish.reason.value if trajectory.finish else "cut"
    error = RolloutFailedError(f"sequence {trajectory.request_id} was {reason} again and again", ())
    error.trajectory = trajectory
    return error


async def _attempt(group: LiveGroup, member: Member, recipe: Recipe) -> None:
    prompt = group.prompt
    seed = seed_of(recipe.run, prompt.id, prompt.epoch, member.index, member.refills)
    options: RolloutOptions = {**recipe.options, "session_id": group.session_id}
    if group.oldest_version is not None:
        options["min_weight_version"] = group.oldest_version
    draft, rollout = recipe.pool.begin(
        prompt.token_ids,
        replace(prompt.sampling or recipe.sampling, seed=seed),
        options,
        prefix=member.trajectory(),
        waiter=(group.session_id, member.index),
    )
    member.follow(rollout, draft)
    async for _ in rollout.chunks(whole=True):
        pass

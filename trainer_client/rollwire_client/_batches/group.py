"""How groups are sampled, a sequence or a conversation for each of their samples."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import operator
import uuid
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire.reasons import ErrorScope

from rollwire_client._batches.batch import DropReason, Group, Prompt, Sample
from rollwire_client._batches.callbacks import without_exits
from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import (
    CallbackError,
    ClosedError,
    RefusedError,
    RolloutFailedError,
    RollwireError,
    ServerFailedError,
    TimedOutError,
)
from rollwire_client._fleet.rollout import QUEUE_FULL_DELAY, queue_was_full
from rollwire_client._fleet.session import Session, TurnSettings, end, rollout_of
from rollwire_client._rpc.conversion import checked_token_ids
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rollwire.types import WeightTag

    from rollwire_client._batches.callbacks import RolloutFunction, SampleResult
    from rollwire_client._data import Sampling
    from rollwire_client._fleet.rollout import Rollout
    from rollwire_client._fleet.server_pool import ServerPool
    from rollwire_client._rpc.conversion import RolloutOptions
    from rollwire_client._trajectory import Trajectory

logger = logging.getLogger(__name__)

_CANCEL_TIMEOUT = 10.0  # seconds for cancelled samples to end
_NEVER_REFILLED = (RefusedError, TimedOutError, ClosedError)


@dataclass(slots=True)
class LiveSample:
    """A sample that is under way or complete: one sequence, or a conversation in ``session``."""

    index: int
    output: TrajectoryBuilder
    reward: float | None = None
    refills: int = 0  # how often it was begun anew, which changes its seed
    rollout: Rollout | None = None
    session: Session | None = None
    returned: bool = False  # the caller's function, so that the conversation has ended

    def trajectory(self) -> Trajectory:
        """See ``Sample.trajectory``."""
        turns = self.session.conversation().turns if self.session is not None else ()
        if not turns:
            return self.output.trajectory()
        return turns[-1] if self.returned else replace(turns[-1], finish=None)

    def snapshot(self) -> Sample:
        conversation = self.session.conversation() if self.session is not None else None
        return Sample(self.trajectory(), self.reward, conversation)

    @property
    def weights(self) -> list[WeightTag]:
        """Those that sampled its tokens."""
        if self.session is None:
            return self.output.weights
        turns = self.session.conversation().turns
        weights = [segment.weights for turn in turns for segment in turn.segments]
        turn = rollout_of(self.session)
        return weights if turn is None else [*weights, *turn.output.weights]

    def lower_min_version(self, version: int | None) -> None:
        rollout = self.rollout if self.session is None else rollout_of(self.session)
        if rollout is not None:
            rollout.lower_min_version(version)


@dataclass(slots=True, eq=False)
class LiveGroup:
    """A group that is neither handed out nor dropped.

    Attributes:
        samples: In the order of their seeds.
        number: Its place among all groups of the batcher, by age.
        completed: How many groups were complete by the time that it was.
        oldest_version: Its next tokens may be of this weight version or newer ones; None: any.
        task: Samples it; None before it is started.
        session_id: Sends its samples to the same server, as they share a prefix.
    """

    prompt: Prompt
    samples: list[LiveSample]
    number: int = 0
    completed: int = 0
    oldest_version: int | None = None
    task: asyncio.Task[None] | None = None
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def snapshot(self, dropped: DropReason | None = None, error: Exception | None = None) -> Group:
        samples = tuple(sample.snapshot() for sample in self.samples)
        return Group(self.prompt, samples, dropped, error)

    def lower_oldest_version(self, version: int | None) -> None:
        """Lets older weights sample its next tokens, as after a rollback."""
        if self.oldest_version is not None and (version is None or version < self.oldest_version):
            self.oldest_version = version
            for sample in self.samples:
                sample.lower_min_version(version)


@dataclass(frozen=True, slots=True)
class GroupSampler:
    """Samples groups as a ``Batcher`` was told to; see its arguments."""

    pool: ServerPool
    run_seed: int
    group_size: int
    sampling: Sampling
    options: RolloutOptions
    score: Callable[[Prompt, SampleResult], Awaitable[float]] | None
    refills: int
    rollout: RolloutFunction | None = None

    def new_group(self, prompt: Prompt) -> LiveGroup:
        prompt = checked_prompt(prompt)
        samples = [
            LiveSample(i, TrajectoryBuilder(prompt.token_ids)) for i in range(self.group_size)
        ]
        return LiveGroup(prompt, samples)

    async def sample(self, group: LiveGroup) -> None:
        """Samples all members to their ends; each continues from what it has.

        An error that ends the group ends the other samples too; another one is raised when all
        samples have ended.
        """
        tasks = [asyncio.create_task(self._complete(group, sample)) for sample in group.samples]
        running, errors = set(tasks), list[Exception]()
        try:
            while running and not any(ends_group(error) for error in errors):
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                found = [_error(task, group) for task in tasks if task in done]
                errors += [error for error in found if error is not None]
        finally:
            await self._cancel(tasks, group)
        if errors:
            raise max(errors, key=ends_group)

    async def _cancel(self, tasks: list[asyncio.Task[None]], group: LiveGroup) -> None:
        """Waits no longer than bounded for a function of the caller that does not end."""
        left = set(await cancel_all(tasks, _CANCEL_TIMEOUT))
        for task, sample in zip(tasks, group.samples, strict=True):
            if task not in left:
                continue
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            if sample.session is not None:
                end(sample.session)
            logger.warning(
                "the rollout of prompt %r, sample %d, has not ended %g s after it was cancelled: "
                "nothing waits for it any more; its task stays in the event loop until it ends",
                group.prompt.id, sample.index, _CANCEL_TIMEOUT,
            )  # fmt: skip

    async def _complete(self, group: LiveGroup, sample: LiveSample) -> None:
        failures = 0
        while not sample.trajectory().complete:
            tokens = len(sample.output.token_ids)
            try:
                await self._run(group, sample)
            except _NEVER_REFILLED:
                raise
            except RollwireError as error:
                if queue_was_full(error):  # servers are busy or paused: not this sample's failure
                    await asyncio.sleep(QUEUE_FULL_DELAY)
                    continue
                server_failed = _server_failed(error)
                progressed = len(sample.output.token_ids) > tokens and not server_failed
                failures = 1 if progressed else failures + 1
                if failures > self.refills:
                    raise
                if failures == 1:  # the first in a row says enough
                    logger.warning(
                        "%s; sample %d of prompt %r is sampled again, up to %d times in a row",
                        error, sample.index, group.prompt.id, self.refills,
                    )  # fmt: skip
                if server_failed:  # the same draws would fail again
                    sample.refills += 1
                    sample.rollout = None
                    sample.output = TrajectoryBuilder(sample.output.prompt_ids)
            else:
                if not sample.trajectory().complete:
                    failures += 1
                    if failures > self.refills:
                        raise _ended_by_others(sample.trajectory())
        if sample.reward is None and self.score is not None:
            result = sample.snapshot()
            sample.reward = await self.score(group.prompt, result.conversation or result.trajectory)

    async def _run(self, group: LiveGroup, sample: LiveSample) -> None:
        turns = SampleTurns(self, group, sample)
        if self.rollout is not None:
            try:
                await self._converse(self.rollout, turns)
            finally:
                _raise_if_cancelled()
            return
        sampling, options = turns.apply(None, {"session_id": group.session_id}, ())
        sample.rollout = self.pool.rollout(sample.output, sampling, options)
        await sample.rollout.run()

    async def _converse(self, rollout: RolloutFunction, turns: SampleTurns) -> None:
        """Has the caller's function hold the conversation, from its beginning."""
        prompt, sample = turns.group.prompt, turns.sample
        sample.returned = False
        session = sample.session = Session(prompt.token_ids, self.pool, turns)
        self.pool.router.share(turns.group.session_id, session.id)
        try:
            await without_exits(rollout(session, prompt))
        except RollwireError:
            raise
        except Exception as error:
            raise CallbackError(
                f"the rollout of prompt {prompt.id!r} raised {error!r}", callback="rollout"
            ) from error
        problem = ""
        if rollout_of(session) is not None:
            problem = "returned while a turn was under way: await its turns"
        elif not session.conversation().turns:
            problem = "sampled nothing"
        if problem:
            raise CallbackError(
                f"the rollout of prompt {prompt.id!r} {problem}", callback="rollout"
            )
        end(session)
        sample.returned = True


@dataclass(frozen=True, slots=True)
class SampleTurns(TurnSettings):
    """How a sample is sampled, or the turns of its conversation."""

    sampler: GroupSampler
    group: LiveGroup
    sample: LiveSample

    def apply(
        self, sampling: Sampling | None, options: RolloutOptions, turn: tuple[int, ...]
    ) -> tuple[Sampling, RolloutOptions]:
        sampler, prompt, sample = self.sampler, self.group.prompt, self.sample
        sampling = sampling or prompt.sampling or sampler.sampling
        if sampling.seed is not None:
            raise ValueError("the sampling of a turn has a seed: leave it out, as it gets its own")
        seed = sample_seed(
            sampler.run_seed, prompt.id, prompt.epoch, sample.index, sample.refills, turn
        )
        own: RolloutOptions = {**sampler.options, **options}
        if self.group.oldest_version is not None:
            own["min_weight_version"] = self.group.oldest_version
        return replace(sampling, seed=seed), own


def checked_prompt(prompt: Prompt) -> Prompt:
    """The prompt with plain integers; InvalidRequestError if its token ids are none."""
    if not isinstance(prompt, Prompt):
        raise TypeError(f"prompts gave {prompt!r:.80}, not a Prompt(id, token_ids)")
    if not isinstance(prompt.id, str):
        raise TypeError(f"the id of a prompt is {prompt.id!r}, not text")
    prompt.id.encode()  # a buffer file must be able to hold it
    epoch = operator.index(prompt.epoch)
    if not -(1 << 63) <= epoch < 1 << 63:
        raise ValueError(
            f"the epoch of prompt {prompt.id!r} is {epoch}, not from -2^63 to 2^63 - 1"
        )
    if prompt.sampling is not None and prompt.sampling.seed is not None:
        raise ValueError(f"the sampling of prompt {prompt.id!r} has a seed: leave it out")
    return replace(prompt, epoch=epoch, token_ids=checked_token_ids(prompt.token_ids))


def check_unique(prompt: Prompt, known: set[tuple[str, int]]) -> None:
    """Adds the prompt to those that are known."""
    key = prompt.id, prompt.epoch
    if key in known:
        raise ValueError(
            f"prompt {prompt.id!r} of epoch {prompt.epoch} is under way already: the seeds of its "
            "samples would be equal; give each pass over the data its own epoch"
        )
    known.add(key)


def sample_seed(
    run_seed: int,
    prompt_id: str,
    epoch: int,
    index: int,
    refills: int = 0,
    turn: tuple[int, ...] = (),
) -> int:
    text = json.dumps([run_seed, prompt_id, epoch, index, refills, *turn]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def ends_group(error: Exception) -> bool:
    """Whether the error is of this group alone. Others every group would meet: ``collect`` raises
    those, and the group continues in the next batch.
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


def _raise_if_cancelled() -> None:
    """The caller's function may have caught it, as a bare ``except`` does."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _server_failed(error: RollwireError) -> bool:
    """Whether a server failed at the sequence, so that continuing from its tokens does not help."""
    if isinstance(error, RolloutFailedError):
        return error.of_servers
    return isinstance(error, ServerFailedError)


def _ended_by_others(trajectory: Trajectory) -> RolloutFailedError:
    reason = trajectory.finish.reason.value if trajectory.finish else "cut"
    error = RolloutFailedError(f"sequence {trajectory.request_id} was {reason} again and again", ())
    error.trajectory = trajectory
    return error

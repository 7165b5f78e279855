"""Groups of samples by the batch, from a fleet whose sequences end at very different times.

    async with Fleet(addresses) as fleet, Batcher(fleet, seed=1, sampling=sampling) as batcher:
        for version in …:
            await (await publisher.publish(version, tensors)).committed
            batch = await batcher.collect(prompts, target=32, over_sample=1.25, tail=Carry())
            learn(batch.groups)
            batcher.save(folder / "buffer")  # what is carried, beside the policy

Between two calls, groups that were carried or begun ahead go on in the background.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollwire.types import version_text

from rollwire_client._arguments import checked_version, integer, seconds
from rollwire_client._batches import checkpoint
from rollwire_client._batches.batch import Drop, Tail
from rollwire_client._batches.batch_collector import BatchCollector
from rollwire_client._batches.callbacks import CallbackRunner, RewardCaller
from rollwire_client._batches.evaluation import evaluate
from rollwire_client._batches.group import GroupSampler
from rollwire_client._batches.group_buffer import BatchPlan, GroupBuffer
from rollwire_client._batches.progress_bar import ProgressBar
from rollwire_client._batches.prompt_source import PromptSource, read_all
from rollwire_client._batches.trainer_steps import TrainerSteps
from rollwire_client._errors import StalenessError
from rollwire_client._rpc.request import DEFAULT_SAMPLING, RolloutOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from rollwire_client._batches.batch import Batch, Decision, Evaluation, Group, Progress, Prompt
    from rollwire_client._batches.callbacks import Reward
    from rollwire_client._data import Sampling
    from rollwire_client._fleet.fleet import Fleet

_OWN_OPTIONS = ("request_id", "session_id", "min_weight_version", "max_weight_version")
_POLL = 0.05  # seconds between two checks of what the servers serve


class Batcher:
    """Samples groups and hands them out in batches; an async context manager, within the fleet's.

    Every prompt that it takes is handed out once, reported as dropped, or still carried.

    Args:
        fleet: Its servers sample.
        seed: Of the run. Together with a prompt's id and epoch and the number of the sample it
            fixes the draws.
        group_size: Samples of each prompt.
        sampling: How to sample; without a seed.
        reward: Called with the prompt and the trajectory of a complete sample; returns a finite
            number. A plain function is called in a thread of its own (not the main thread, which
            signals need), one call at a time; a coroutine function runs in the event loop. A group
            with a sample that gets no reward is dropped as ``UNSCORED``.
        max_lag: Groups with a token from more than this many steps before the trainer's version are
            never handed out. A publish through the fleet is one step, also if its version jumps or
            falls, and so is going on from a saved buffer. None: no bound.
        refills: How often in a row a failed sample is sampled again, alone: from its tokens on if
            the fleet gave it up (a new token starts the count again), or anew with other draws if a
            server failed at it. A ``reward`` that raised is called again as often.
        callback_timeout: Seconds that one call of ``reward``, ``decide`` or ``stop`` may take, and
            ``prompts`` to return the next one, before it is given up; None: no limit. The log says
            when one takes long.
        weights_timeout: Seconds that ``collect`` waits for weights that are new enough.
        options: Of the rollouts, such as ``logprob_basis`` and ``timeout``.
        bar: Show a progress bar if standard error is a terminal.

    Attributes:
        version: The trainer's step of the latest batch.
        handed_out, dropped: Groups so far.

    Raises:
        TypeError, ValueError: An argument is not valid.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        seed: int,
        group_size: int = 8,
        sampling: Sampling = DEFAULT_SAMPLING,
        reward: Reward | None = None,
        max_lag: int | None = None,
        refills: int = 2,
        callback_timeout: float | None = 600.0,
        weights_timeout: float = 60.0,
        options: RolloutOptions | None = None,
        bar: bool = True,
    ) -> None:
        options = RolloutOptions() if options is None else options
        if own := [name for name in _OWN_OPTIONS if name in options]:
            raise ValueError(f"{', '.join(own)}: the batcher's own, leave it out")
        _check_unseeded(sampling)
        seed = integer("seed", seed, minimum=-(1 << 63), maximum=(1 << 63) - 1)
        group_size = integer("group_size", group_size, minimum=1)
        refills = integer("refills", refills)
        if max_lag is not None:
            max_lag = integer("max_lag", max_lag)
        if callback_timeout is not None:
            callback_timeout = seconds("callback_timeout", callback_timeout, minimum=0.001)
        self.version: int | None = None
        self.handed_out = 0
        self.dropped = 0
        self._pool = fleet._pool  # noqa: SLF001 - the library's own
        self._reward = None if reward is None else RewardCaller(reward, callback_timeout, refills)
        self._sampler = GroupSampler(
            self._pool, seed, group_size, sampling, options, self._reward, refills
        )
        self._buffer = GroupBuffer(self._sampler)
        self._reader = CallbackRunner("rollwire-prompts", callback_timeout)
        self._hooks = CallbackRunner("rollwire-hooks", callback_timeout)
        self._max_lag = max_lag
        self._weights_timeout = seconds("weights_timeout", weights_timeout)
        self._bar = bar
        self._collecting = False
        self._published = 0  # so many publishes through the fleet are among the steps

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is under way, on the servers too; it can still be saved. Idempotent."""
        if self._pool.forked:  # what is under way is the parent's
            return
        await self._buffer.close()
        for callbacks in (self._reader, self._hooks, self._reward):
            if callbacks is not None:
                callbacks.close()

    @property
    def taken(self) -> int:
        """Prompts read so far: handed out, dropped, or under way. A data set goes on after them."""
        buffer = self._buffer
        live = len(buffer.groups) + len(buffer.prompts)
        return self.handed_out + self.dropped + buffer.dropped_count + live

    async def collect(
        self,
        prompts: Iterable[Prompt],
        target: int,
        *,
        version: int | None = None,
        over_sample: float = 1.0,
        tail: Tail = Drop(),  # noqa: B008 - it cannot change
        prefetch: int = 0,
        decide: Callable[[Group], Decision] | None = None,
        stop: Callable[[Progress], bool] | None = None,
    ) -> Batch:
        """The next batch; it ends when ``target`` groups are complete.

        By default it is a fixed batch: ``target`` prompts are started, and all are waited for.
        Carried groups come first. If the call is cancelled or raises, it hands nothing out, and the
        next call goes on with the groups that there are.

        A group that cannot be completed (its prompt cannot be sampled, or its reward cannot be
        computed) is dropped as ``FAILED`` or ``UNSCORED``, with a warning in the log, and another
        takes its place. An error that every group would meet is raised instead, and the groups are
        kept. Eight groups in a row that are dropped so, without a complete one in between, count as
        such an error: the last one is raised.

        Args:
            prompts: Read as there is room for new groups, and no further: give an iterator, so that
                the next call goes on where this one ended. It is read in a thread of its own.
            target: Groups. There are fewer if the prompts run out or ``stop`` ends the batch, and
                up to target * over_sample with a tail that has patience.
            version: The trainer's step. Default: the version that was published last.
            over_sample: Keeps this many times the target going.
            tail: What becomes of the unfinished groups: ``Drop()`` or ``Carry()``.
            prefetch: Groups that are started beyond those, for later batches: so servers have work
                while the last groups of this batch end, and while the trainer learns.
            decide: Called with each complete group, in the order of their ends: whether it is part
                of the batch. Default: all are. Like ``stop``, it is called in a thread of its own,
                unless it is a coroutine function.
            stop: Called after each decision; True ends the batch with the groups that it has.

        Raises:
            ValueError: The arguments contradict each other, or the version fell though no server
                was rolled back to it.
            StalenessError: No server serves weights new enough for ``max_lag``.
            RolloutFailedError: No server was ready for a sequence within ``Retries.seconds``, again
                and again; what was sampled is kept.
            InvalidRequestError, CallbackError, RolloutFailedError, ServerFailedError,
                TimedOutError: It ended eight groups in a row, or all that there were.
            RollwireError: Every group would meet it, such as a refused token; what was sampled is
                kept.
            ClosedError: The fleet or the batcher is closed.
            CallbackError: ``prompts`` or ``stop`` took too long.
            Exception: What ``prompts`` or ``stop`` raised.
        """
        started = asyncio.get_running_loop().time()
        target = integer("target", target, minimum=1)
        prefetch = integer("prefetch", prefetch)
        version = self._trainer_version(version)
        plan = BatchPlan(target, over_sample, prefetch, tail, version, self._max_lag)
        plan = self._advance_steps(plan)
        self._pool.check_open()
        if self._collecting:
            raise RuntimeError("a batch is being collected: one at a time")
        self._collecting = True
        try:
            await self._await_weights(plan)
            self.version = plan.version
            source = PromptSource(iter(prompts), self._reader, self._buffer)
            title = "batch" if plan.version is None else f"batch of version {plan.version}"
            with ProgressBar(title, target, enabled=self._bar) as bar:
                collector = BatchCollector(
                    plan, self._buffer, source, self._hooks, decide, stop, bar, started
                )
                batch = await collector.collect()
        finally:
            self._collecting = False
        self.handed_out += len(batch.finished.groups)
        self.dropped += len(batch.dropped.groups)
        return batch

    async def evaluate(
        self,
        prompts: Iterable[Prompt],
        *,
        samples: int = 1,
        sampling: Sampling | None = None,
        version: int | None = None,
    ) -> Evaluation:
        """Samples all prompts to their ends under one policy, beside the batches.

        A group that cannot be completed is in ``Evaluation.failed``, with a warning in the log; the
        others go on.

        Args:
            prompts: Different ones, a finite number: all are read first.
            samples: Of each prompt.
            sampling: How to sample. Default: as in batches.
            version: Of the weights. Default: the one that was published last; before any, what the
                servers serve, which must be the same everywhere.

        Raises:
            WeightVersionError: Something else was published meanwhile, or the servers disagree.
            RollwireError: All prompts failed: the error of the first. Or one that ends them all,
                such as that no server comes to serve the version within ``Retries.seconds``.
            ValueError, Exception: As ``collect``.
        """
        samples = integer("samples", samples, minimum=1)
        if sampling is not None:
            _check_unseeded(sampling)
        version = checked_version("version", version)
        self._pool.check_open()
        policy = self._pool.policy.current
        if version is None and policy is not None:
            version = policy.version
        sampler = replace(
            self._sampler, group_size=samples, sampling=sampling or self._sampler.sampling
        )
        taken = await read_all(iter(prompts), self._reader)
        return await evaluate(sampler, taken, version, bar=self._bar)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the groups that are under way, with their tokens so far, and the counters.

        The file is replaced as a whole. Save it together with the trainer's checkpoint and the
        position in the data set: each prompt that was read is in the file, or was reported.

        Raises:
            TypeError: The ``info`` of a prompt cannot be JSON.
            OSError: The file cannot be written.
        """
        self._buffer.add_prompts()
        contents = checkpoint.BufferContents(
            version=self.version,
            handed_out=self.handed_out,
            dropped=self.dropped + self._buffer.dropped_count,
            steps=self._buffer.steps.saved(),
            groups=list(self._buffer.groups.values()),
        )
        checkpoint.write(Path(path), self._sampler, contents)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Takes over what another process saved; its groups go on in the next batch.

        Raises:
            BufferFileError: The file is no buffer, is damaged, or is of a batcher with another seed
                or group size; this batcher is unchanged.
            OSError: The file cannot be read.
            RuntimeError: This batcher has groups already.
        """
        if self._buffer.groups or self._collecting:
            raise RuntimeError("this batcher has groups of its own: load into a new one")
        contents = checkpoint.read(Path(path), self._sampler)
        for group in contents.groups:
            self._buffer.add_group(group)
        self.version = contents.version
        self.handed_out, self.dropped = contents.handed_out, contents.dropped
        self._buffer.steps = TrainerSteps(contents.steps, contents.version)
        self._published = 0

    def _trainer_version(self, version: int | None) -> int | None:
        version = checked_version("version", version)
        if version is None:
            policy = self._pool.policy.current
            version = policy.version if policy is not None else None
        if self.version is not None and version is None:
            raise ValueError(
                f"the trainer has no version, and was at {self.version}: a batcher goes with one "
                "run, whose versions rise; publish first, or say version=…"
            )
        return version

    def _advance_steps(self, plan: BatchPlan) -> BatchPlan:
        """Counts the plan's version as a step; the plan with the oldest version that it takes."""
        steps = self._buffer.steps
        published, self._published = self._pool.policy.published_since(self._published)
        for weights in published:
            steps.add_published(weights)
        if plan.version is None:
            return plan
        if steps.version is not None and plan.version < steps.version:
            steps.follow_rollback([m.info for m in self._pool.servers if m.info is not None])
        steps.reach(plan.version)
        if plan.max_lag is None:
            return plan
        return replace(plan, oldest_version=steps.oldest_version(plan.max_lag))

    async def _await_weights(self, plan: BatchPlan) -> None:
        """Returns once a server serves weights that are new enough for the plan."""
        oldest, steps = plan.oldest_version, self._buffer.steps
        if oldest is None:
            return
        clock = asyncio.get_running_loop().time
        give_up = clock() + self._weights_timeout
        while True:
            served = [m.info.weights for m in self._pool.servers if m.info is not None]
            if any(not plan.is_stale(steps.lag(weights)) for weights in served):
                return
            if clock() >= give_up:
                texts = ", ".join(sorted({version_text(w.version) for w in served})) or "nothing"
                raise StalenessError(
                    f"the trainer is at version {plan.version}, and max_lag is {plan.max_lag}; the "
                    f"servers serve {texts}, and version {oldest} did not come within "
                    f"{self._weights_timeout:g} s: publish the policy, or allow more lag"
                )
            await asyncio.sleep(_POLL)


def _check_unseeded(sampling: Sampling) -> None:
    if sampling.seed is not None:
        raise ValueError("sampling has a seed, which all samples would share: say seed=…")

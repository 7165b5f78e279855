"""``Batcher``: what a trainer uses, and the steps between two batches."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import math
import sys
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rollwire.types import version_text

from rollwire_client._arguments import checked_version, integer, seconds
from rollwire_client._batches import buffer_file
from rollwire_client._batches.batch import Drop, Tail
from rollwire_client._batches.batch_collector import BatchCollector, PromptSource
from rollwire_client._batches.callbacks import CallbackRunner, is_async, score
from rollwire_client._batches.evaluation import evaluate
from rollwire_client._batches.group import GroupSampler
from rollwire_client._batches.group_buffer import BatchPlan, GroupBuffer
from rollwire_client._batches.trainer_steps import TrainerSteps
from rollwire_client._errors import StalenessError
from rollwire_client._rpc.conversion import DEFAULT_SAMPLING, RolloutOptions

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Iterator

    from rollwire_client._batches.batch import Batch, Decision, Evaluation, Group, Progress, Prompt
    from rollwire_client._batches.callbacks import Reward, RolloutFunction
    from rollwire_client._data import Sampling
    from rollwire_client._fleet.fleet import Fleet

_OWN_OPTIONS = ("request_id", "session_id", "min_weight_version", "max_weight_version")
_WEIGHTS_TIMEOUT = 60.0  # seconds for a server to serve weights that are new enough
_POLL = 0.05  # seconds between two checks of that


class Batcher:
    """Samples groups and returns them in batches. An async context manager, within the fleet's.

    Each prompt that it reads is returned once, reported as dropped, or still carried.
    Between two batches, groups that were carried or begun ahead continue in the background.

    Args:
        fleet: The fleet that samples.
        seed: Seed of the run. The random draws of a sample depend on this seed, the prompt's id and
            epoch, and the number of the sample.
        group_size: Number of samples of each prompt.
        sampling: How to sample, without a seed.
        rollout: A coroutine function that holds the conversation of one sample. It is called with a
            ``Session`` that has the prompt's tokens, and the ``Prompt``; it has turns sampled and
            appends tokens, such as a tool's output, until it returns. A turn without ``sampling``
            is sampled as the prompt or the batcher says; each has a seed and the ``options``, so
            that ``timeout`` is of one turn. The last turn must be complete. A conversation that
            fails or is interrupted, by ``close`` or for a saved buffer, begins again from its
            prompt. How long it may take is its own affair. Default: a sample is one sequence.
        reward: Called with the prompt and the trajectory of a complete sample, or with a
            ``rollout`` its ``Conversation``; returns a finite number. A plain function is called in
            a worker thread, one call at a time; a coroutine function runs in the event loop. A
            group with a sample that gets no reward is dropped as ``UNSCORED``.
        max_lag: Groups with a token that was sampled more than this many steps before the trainer's
            version are dropped. Each publish through the fleet is one step, whatever its version,
            and so is a restart from a saved buffer. None: no bound.
        refills: How often in a row a failed sample is sampled again. If the fleet gave it up, it
            continues from its tokens, and a new token resets the count. If a server failed at it,
            it begins again with other draws. A ``reward`` that raised is called again as often.
        callback_timeout: Seconds that a call of ``reward``, ``decide`` or ``stop``, or reading the
            next prompt, may take; None: no limit. The log says when one takes long.
        options: Options of the rollouts, such as ``logprob_basis`` and ``timeout``.
        bar: Whether to show a progress bar if standard error is a terminal.

    Attributes:
        version: The trainer's step of the latest batch.
        handed_out, dropped: Numbers of groups so far.

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
        rollout: RolloutFunction | None = None,
        reward: Reward | None = None,
        max_lag: int | None = None,
        refills: int = 2,
        callback_timeout: float | None = 600.0,
        options: RolloutOptions | None = None,
        bar: bool = True,
    ) -> None:
        options = RolloutOptions() if options is None else options
        if own := [name for name in _OWN_OPTIONS if name in options]:
            raise ValueError(f"{', '.join(own)}: the batcher's own, leave it out")
        _check_unseeded(sampling)
        if rollout is not None and not is_async(rollout):
            raise TypeError(f"rollout is {rollout!r:.80}, not a coroutine function (async def)")
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
        self._rewards = CallbackRunner("rollwire-reward", callback_timeout)
        self._reader = CallbackRunner("rollwire-prompts", callback_timeout)
        self._hooks = CallbackRunner("rollwire-hooks", callback_timeout)
        scored = None if reward is None else partial(score, self._rewards, reward, refills)
        self._sampler = GroupSampler(
            self._pool, seed, group_size, sampling, options, scored, refills, rollout
        )
        self._buffer = GroupBuffer(self._sampler)
        self._max_lag = max_lag
        self._bar = bar
        self._collecting = False
        self._published = 0  # so many publishes through the fleet are among the steps

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the rollouts under way, on the servers too. ``save`` still works. Idempotent.

        A ``rollout`` function that does not end within ten seconds of its cancellation is left in
        the event loop, with a warning in the log.
        """
        if self._pool.affinity.forked:  # what is under way is the parent's
            return
        await self._buffer.close()
        for runner in (self._rewards, self._reader, self._hooks):
            runner.close()

    @property
    def taken(self) -> int:
        """Number of prompts read so far. After ``load``, continue the data set after them."""
        buffer = self._buffer
        live = len(buffer.groups) + len(buffer.prompts)
        return self.handed_out + self.dropped + len(buffer.dropped) + live

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
        """Collects the next batch. It ends when ``target`` groups are complete.

        By default the batch starts ``target`` prompts and waits for all of them. Carried groups
        come first. If the call is cancelled or raises, it returns nothing, and the next call
        continues with the same groups.

        A group that cannot be completed (its prompt cannot be sampled, or its reward cannot be
        computed) is dropped as ``FAILED`` or ``UNSCORED``, with a warning in the log, and another
        group takes its place. An error that every group would meet is raised instead, and the
        groups are kept. If eight groups in a row are dropped in this way, without a complete one in
        between, the last error is raised.

        Args:
            prompts: Read only as far as there is room for new groups. Pass an iterator, so that the
                next call continues after the last prompt. It is read in a worker thread.
            target: Number of groups. The batch has fewer if the prompts run out or ``stop`` ends
                it, and up to target * over_sample if the tail has patience.
            version: The trainer's step. Default: the version that was published last.
            over_sample: How many times ``target`` groups are kept under way.
            tail: What happens to the unfinished groups: ``Drop()`` or ``Carry()``.
            prefetch: Number of further groups that are started for later batches, so that servers
                have work while this batch ends and while the trainer learns.
            decide: Called with each complete group, in the order in which they complete; says
                whether the group is part of the batch. Default: every group is. Like ``stop``, it
                runs in a worker thread unless it is a coroutine function.
            stop: Called after each decision; True ends the batch with the groups that it has.

        Raises:
            ValueError: The arguments contradict each other, or the version fell although no server
                was rolled back to it.
            StalenessError: No server serves weights new enough for ``max_lag``.
            RolloutFailedError: No server was ready for a sequence within ``Retries.seconds``, again
                and again; the tokens so far are kept.
            InvalidRequestError, CallbackError, RolloutFailedError, ServerFailedError,
                TimedOutError: It ended eight groups in a row, or all groups that there were.
            RollwireError: Every group would meet it, such as a refused token; the tokens so far are
                kept.
            ClosedError: The fleet or the batcher is closed.
            CallbackError: ``prompts`` or ``stop`` took too long.
            Exception: What ``prompts`` or ``stop`` raised.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
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
            buffer = self._buffer
            source = PromptSource(iter(prompts), self._reader, buffer.prompts, buffer.changed)
            title = "batch" if plan.version is None else f"batch of version {plan.version}"
            with _progress_bar(title, target, enabled=self._bar) as show:
                collector = BatchCollector(
                    plan, buffer, source, self._hooks, decide, stop, show, clock, started
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
        """Samples all prompts to their ends under one policy; batches are not affected.

        A group that cannot be completed is in ``Evaluation.failed``, with a warning in the log; the
        others continue.

        Args:
            prompts: A finite number of different prompts; all are read first.
            samples: Number of samples of each prompt.
            sampling: How to sample. Default: as in batches.
            version: Version of the weights. Default: the one that was published last. If none was
                published, the weights that the servers serve, which must all be the same.

        Raises:
            WeightVersionError: Another version was published meanwhile, or the servers disagree.
            RollwireError: All prompts failed; this is the error of the first. Or an error that ends
                all of them, such as no server with this version within ``Retries.seconds``.
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
        taken: deque[Prompt] = deque()
        await PromptSource(iter(prompts), self._reader, taken, asyncio.Event()).read(math.inf)
        with _progress_bar("evaluation", len(taken), enabled=self._bar) as show:
            return await evaluate(sampler, taken, version, show)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the groups that are under way, with their tokens so far, and the counters.

        The file is replaced atomically. Save it together with the trainer's checkpoint and the
        position in the data set: each prompt that was read is in the file, or in a batch before.

        Raises:
            TypeError: The ``info`` of a prompt cannot be JSON.
            OSError: The file cannot be written.
        """
        self._buffer.add_prompts()
        contents = buffer_file.BufferContents(
            version=self.version,
            handed_out=self.handed_out,
            dropped=self.dropped + len(self._buffer.dropped),
            steps=self._buffer.steps.saved(),
            groups=list(self._buffer.groups.values()),
        )
        buffer_file.write(Path(path), self._sampler, contents)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads the groups that another process saved; they continue in the next batch.

        Raises:
            BufferFileError: The file is no buffer, is damaged, or was saved by a batcher with
                another seed or group size; this batcher is unchanged.
            OSError: The file cannot be read.
            RuntimeError: This batcher has groups already.
        """
        if self._buffer.groups or self._collecting:
            raise RuntimeError("this batcher has groups of its own: load into a new one")
        contents = buffer_file.read(Path(path), self._sampler)
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
                f"the trainer has no version, and was at {self.version}: a batcher is for "
                "one run, whose versions rise; publish first, or pass version=…"
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
        give_up = clock() + _WEIGHTS_TIMEOUT
        while True:
            served = [m.info.weights for m in self._pool.servers if m.info is not None]
            if any(not plan.is_stale(steps.lag(weights)) for weights in served):
                return
            if clock() >= give_up:
                texts = ", ".join(sorted({version_text(w.version) for w in served})) or "nothing"
                raise StalenessError(
                    f"the trainer is at version {plan.version}, and max_lag is {plan.max_lag}; the "
                    f"servers serve {texts}, and none reached version {oldest} within "
                    f"{_WEIGHTS_TIMEOUT:g} s: publish the policy, or allow more lag"
                )
            await asyncio.sleep(_POLL)


def _check_unseeded(sampling: Sampling) -> None:
    if sampling.seed is not None:
        raise ValueError(
            "sampling has a seed, which all samples would share: pass seed=… to the batcher"
        )


@contextlib.contextmanager
def _progress_bar(title: str, total: int, *, enabled: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields what shows how many are done, and a note: on standard error if that is a terminal and
    rich is installed (it comes with ``rollwire[cli]``), else nowhere.
    """
    if not (enabled and sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # else it would go to the terminal, not to its file
    ) as progress:
        task = progress.add_task(title, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)

"""Rollouts and weights for ``trl.experimental.async_grpo.AsyncGRPOTrainer``: its two protocols."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from rollwire.types import FinishReason, LogprobBasis
from trl.trainer.utils import print_prompt_completions_sample

from rollwire_client._arguments import update_text
from rollwire_client._batches.batch import Carry, Prompt
from rollwire_client._batches.batcher import Batcher
from rollwire_client._data import Sampling, checked_share
from rollwire_client._errors import PublishError
from rollwire_client.integrations.trl._conversation import Conversations, Task
from rollwire_client.integrations.trl._scoring import Scorer
from rollwire_client.sync import SyncFleet, SyncPublisher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from torch import Tensor
    from trl.experimental.async_grpo import AsyncGRPOConfig

    from rollwire_client._batches.batch import Batch, Group, Sample
    from rollwire_client._data import PublishReport, Require
    from rollwire_client._fleet.fleet import Fleet

logger = logging.getLogger(__name__)

_UNSCORED = 16  # complete groups that wait for their rewards
_METRICS = 4096  # entries that the trainer has not read
_FULL_DELAY = 0.05  # seconds between two tries to put a sample into a full queue
_BEAT = 1.0  # seconds between two signs of life of the event loop
_STOP_SECONDS = 30.0
_UNCHANGED = (
    4  # steps within which a trainer, which fetches batches ahead, has learned from samples
)


class AsyncRollouts:
    """Rollouts and weights of an ``AsyncGRPOTrainer``: pass it as both.

        rollouts = AsyncRollouts(
            SyncFleet(["10.0.0.1:7000", "10.0.0.2:7000"]), args=args, dataset=dataset,
            reward_funcs=reward, processing_class=tokenizer,
        )
        AsyncGRPOTrainer(…, args=args, rollout_worker=rollouts, weight_transfer=rollouts).train()

    Groups are sampled while the trainer learns. A publish ends no sequence: sequences continue
    under the new policy, and each token has the log-probability of the policy that sampled it. The
    version of a sample is that of its oldest token; groups older than ``args.max_staleness`` are
    dropped.

    Everything runs in this process, in the fleet's event loop; reward functions and tools that are
    not async run in threads. The trainer opens and closes it.

    Args:
        fleet: A fleet that is not open.
        args: The trainer's.
        dataset: Rows with a ``prompt``, a list of messages. Reward functions get its other columns.
            It is read again and again.
        reward_funcs: One or more, as for the trainer.
        processing_class: The tokenizer.
        tools: Functions that the model may call.
        require: Which servers must commit a policy: "all", "any", or a share of them. The others
            get no sequences until they have caught up.
        logprob_basis: The distribution of the servers' log-probabilities. The default is that of
            TRL's loss; it differs from ``SAMPLED`` only where sampling is truncated.
        callback_timeout: Seconds that a reward function or a tool may take.
        **publisher: Arguments of ``Publisher``, such as ``kv_policy``.

    Attributes:
        rollout_buffer, metrics_queue: What the trainer reads.
        version: The version that was published last; None before the first.
        report: The report of the last publish; None before the first.

    Raises:
        ValueError, TypeError: An argument cannot be used.
    """

    def __init__(
        self,
        fleet: SyncFleet,
        *,
        args: AsyncGRPOConfig,
        dataset: Iterable[dict[str, Any]],
        reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
        processing_class: Any,
        tools: Sequence[Callable[..., Any]] = (),
        require: Require = "any",
        logprob_basis: LogprobBasis = LogprobBasis.TEMPERATURE,
        callback_timeout: float = 600.0,
        **publisher: Any,
    ) -> None:
        if not isinstance(fleet, SyncFleet):
            raise TypeError(f"fleet is {fleet!r:.80}, not a SyncFleet(…)")
        checked_share(require)
        _check_args(args)
        self.rollout_buffer = _CountingQueue(args.queue_maxsize, self._teaches)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(_METRICS)
        self.version: int | None = None
        self.report: PublishReport | None = None
        self._args: Any = args
        self._fleet = fleet
        self._publisher = SyncPublisher(fleet, **publisher)
        self._require = require
        self._logprob_basis = logprob_basis
        self._dataset = dataset
        self._conversations = Conversations(
            processing_class,
            list(tools),
            args.chat_template_kwargs or {},
            args.max_tool_calling_iterations,
            callback_timeout,
        )
        functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
        self._scorer = Scorer(functions, self._conversations, callback_timeout)
        self._newest = -1  # the highest version that servers have committed
        # At each publish since the policy last changed: the samples that the trainer had taken.
        self._taken: list[int] = []
        self._model_version = 0  # the trainer's own count of its policies
        self._ahead = 0  # how much versions are above the trainer's own count of them
        self._running: Future[None] | None = None
        self._idle = threading.Event()  # nothing runs in the event loop
        self._idle.set()
        self._alive_at = 0.0  # when the event loop last said so

    # TRL's WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Opens the fleet.

        Raises:
            UnavailableError: No server is up.
        """
        self._fleet.__enter__()
        newest = self._fleet.newest_version()
        self._newest = -1 if newest is None else newest

    def pause(self) -> None:
        """Does nothing: servers pause themselves, for the commit only."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Publishes the policy.

        Raises:
            PublishError: Too few servers have committed it, or the policy has not changed for some
                publishes although the trainer has taken samples with advantages.
            RollwireError: See ``Publisher.publish_and_wait``.
        """
        version = self._newest + 1
        report = self._publisher.publish_and_wait(version, _Once(iterator), require=self._require)
        for server in report.failed:
            logger.warning(
                "%s does not serve version %s: %s", server.address, version, server.error
            )
        self._check_digest(report)
        self.version = self._newest = version
        self.report = report

    def _check_digest(self, report: PublishReport) -> None:
        if self.report is None or report.digest != self.report.digest:
            self._taken.clear()
        self._taken.append(self.rollout_buffer.taken)
        if len(self._taken) <= _UNCHANGED:
            return
        if lessons := self._taken[-1 - _UNCHANGED] - self._taken[0]:
            raise PublishError(
                f"{update_text(report.version)} was published, and is equal to the "
                f"{len(self._taken) - 1} before it bit for bit, though the trainer had taken "
                f"{lessons} samples to learn from: what is trained does not reach the servers, or "
                "its changes are too small for their dtype"
            )

    def resume(self) -> None:
        """Does nothing: see ``pause``."""

    def destroy(self) -> None:
        """Closes the fleet. Idempotent."""
        self._fleet.close()

    # TRL's RolloutWorkerProtocol

    def start(self) -> None:
        """Begins to sample.

        Raises:
            RuntimeError: It has begun already.
        """
        if self._running is not None:
            raise RuntimeError("these rollouts have begun already: make new ones for each train()")
        self._alive_at = time.monotonic()
        self._running = self._fleet.submit(self._run)

    def stop(self) -> None:
        """Ends the sequences under way, on the servers too. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            self._idle.wait(_STOP_SECONDS)

    def update_model_version(self, model_version: int) -> None:
        """The trainer's own count of its policies, for the version that was published last."""
        self._model_version = model_version
        if self.version is not None:
            self._ahead = self.version - model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raises if no sample will come any more.

        Raises:
            RuntimeError: It has ended, for the error that is its cause, or the event loop does not
                run.
        """
        if self._running is None or self._running.cancelled():
            raise RuntimeError("the rollouts are not under way: not started, or stopped")
        if self._running.done():
            error = self._running.exception()
            raise RuntimeError(f"the rollouts have ended: {error}") from error
        silent = time.monotonic() - self._alive_at
        if silent > stale_after_s:
            raise RuntimeError(
                f"the fleet's event loop has not run for {silent:.0f} s: an async reward function "
                "or tool blocks it"
            )

    def _teaches(self, sample: Any) -> bool:
        """Whether the trainer can learn from a sample that it takes: it drops what is too old."""
        age = self._model_version - sample.model_version
        return bool(sample.advantage) and age <= self._args.max_staleness

    async def _run(self, fleet: Fleet) -> None:
        self._idle.clear()
        try:
            await self._sample(fleet)
        finally:
            self._idle.set()

    async def _sample(self, fleet: Fleet) -> None:
        groups: asyncio.Queue[Group] = asyncio.Queue(_UNSCORED)
        context = [
            info.context_length
            for info in (await fleet.info()).values()
            if not isinstance(info, Exception)
        ]
        self._conversations.context_length = min(context, default=None)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._beat())
                tasks.create_task(self._collect(fleet, groups))
                tasks.create_task(self._deliver(groups))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _beat(self) -> None:
        while True:
            self._alive_at = time.monotonic()
            await asyncio.sleep(_BEAT)

    async def _collect(self, fleet: Fleet, groups: asyncio.Queue[Group]) -> None:
        args = self._args
        sampling = Sampling(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k or 0,
            min_p=args.min_p or 0.0,
            max_new_tokens=args.max_completion_length,
            stop_token_ids=(self._conversations.tokenizer.eos_token_id,),
        )
        at_once = max(args.max_inflight_tasks // args.num_generations, 1)
        prompts = self._prompts()
        async with Batcher(
            fleet,
            seed=args.seed,
            group_size=args.num_generations,
            sampling=sampling,
            rollout=self._conversations.hold if self._conversations.tools else None,
            max_lag=args.max_staleness or None,  # without any staleness the trainer drops them
            options={"logprob_basis": self._logprob_basis},
            bar=False,
        ) as batcher:
            while True:
                # The first group that is complete; the others go on.
                batch = await batcher.collect(prompts, 1, over_sample=float(at_once), tail=Carry())
                self._count(batch)
                for group in batch.groups:
                    await groups.put(group)

    def _prompts(self) -> Iterator[Prompt]:
        number = 0
        for epoch in itertools.count():
            first = number
            for row in self._dataset:
                token_ids = self._conversations.render(row["prompt"])
                task = Task(number, row)
                yield Prompt(str(number - first), token_ids, epoch=epoch, info=task)
                number += 1
            if number == first:
                raise ValueError("the dataset has no rows")

    async def _deliver(self, groups: asyncio.Queue[Group]) -> None:
        while True:
            group = await groups.get()
            versions = [version for version in group.versions if version is not None]
            samples = await self._scorer.samples(group, min(versions) - self._ahead)
            if self._args.log_completions:
                self._print(samples)
            for sample in samples:
                while True:
                    sample.enqueued_at = time.time()
                    try:
                        self.rollout_buffer.put_nowait(sample)
                        break
                    except queue.Full:  # a thread that waited in ``put`` could not be ended
                        await asyncio.sleep(_FULL_DELAY)

    def _print(self, samples: list[Any]) -> None:
        print_prompt_completions_sample(
            prompts=[sample.prompt for sample in samples],
            completions=[sample.completion for sample in samples],
            rewards={"reward": [sample.metrics["reward"] for sample in samples]},
            advantages=[sample.advantage for sample in samples],
            step=samples[0].group_id,
            num_samples=self._args.num_completions_to_print,
        )

    def _count(self, batch: Batch) -> None:
        """Reports what became of the groups since the last batch."""
        samples = [sample for group in batch.groups for sample in group.samples]
        lengths = batch.finished.lengths
        crossed = sum(_crossed(sample) for sample in samples)
        cut = sum(_was_cut(sample) for sample in samples)
        with contextlib.suppress(queue.Full):  # the trainer does not log
            self.metrics_queue.put_nowait(
                {
                    "completions/mean_length": (float(sum(lengths)), float(len(samples))),
                    "completions/clipped_ratio": (float(cut), float(len(samples))),
                    "rollout/crossed_update_frac": (float(crossed), float(len(samples))),
                    "rollout/dropped_groups_total": float(len(batch.dropped.groups)),
                }
            )


class _CountingQueue(queue.Queue[Any]):
    """Counts the samples that are taken and have something to teach."""

    def __init__(self, size: int, teaches: Callable[[Any], bool]) -> None:
        super().__init__(size)
        self.taken = 0
        self._teaches = teaches

    def get(self, block: bool = True, timeout: float | None = None) -> Any:  # noqa: FBT001, FBT002
        sample = super().get(block, timeout)
        self.taken += self._teaches(sample)
        return sample


class _Once:
    """A source of tensors whose iterator can be read only once.

    When a transport group fails, the publisher reads from the start again. Then it gets the tensors
    that were given so far from here. Of a sharded trainer these would be whole copies: there the
    publish fails.
    """

    def __init__(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        self._iterator = iterator
        self._given: list[tuple[str, Tensor]] = []
        self._keeps = AcceleratorState().distributed_type is not DistributedType.FSDP

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._given:
            yield name, tensor.detach()
        for name, tensor in self._iterator:  # is not closed where this ends early
            if self._keeps:
                self._given.append((name, tensor))
            yield name, tensor.detach()


def _crossed(sample: Sample) -> bool:
    """Whether more than one policy sampled it."""
    tags = {segment.weights.digest for turn in sample.turns for segment in turn.segments}
    return len(tags) > 1


def _was_cut(sample: Sample) -> bool:
    finish = sample.trajectory.finish
    return finish is not None and finish.reason is FinishReason.LENGTH


def _check_args(args: Any) -> None:
    """Raises TypeError or ValueError for arguments that rollwire's servers cannot follow."""
    from trl.experimental.async_grpo import AsyncGRPOConfig

    if not isinstance(args, AsyncGRPOConfig):
        raise TypeError(f"args is a {type(args).__name__}, not an AsyncGRPOConfig")
    if args.repetition_penalty != 1.0:
        raise ValueError(
            f"repetition_penalty is {args.repetition_penalty}: rollwire's servers have none"
        )
    if args.token_budget is None:
        raise ValueError(
            "token_budget is None: the trainer would ask a server of vLLM's for it. Set it to the "
            "context length of the servers, or to 0 for batches of a fixed number of samples"
        )

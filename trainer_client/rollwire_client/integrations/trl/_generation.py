"""Generation for ``trl.GRPOTrainer``: rollwire's servers sample, each new policy is published."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Self, TypeVar

from accelerate.utils import broadcast_object_list
from rollwire.types import LogprobBasis, WeightTag
from transformers import TrainerCallback

from rollwire_client._arguments import update_text
from rollwire_client._data import Sampling, checked_share
from rollwire_client._errors import (
    PublishError,
    RolloutFailedError,
    RollwireError,
    WeightVersionError,
)
from rollwire_client._publishing.sharded.ranks import Ranks
from rollwire_client.integrations.trl._policy import check_model, fingerprint, policy_tensors
from rollwire_client.sync import SyncFleet, SyncPublisher

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor
    from trl import GRPOTrainer

    from rollwire_client._data import PublishReport, Require
    from rollwire_client._publishing.publish_handle import PublishHandle
    from rollwire_client._trajectory import Trajectory

T = TypeVar("T")

logger = logging.getLogger(__name__)


class RollwireGeneration:
    """Within it, a ``GRPOTrainer`` samples from rollwire's servers; a context manager.

        trainer = GRPOTrainer(model=…, reward_funcs=…, args=GRPOConfig(…), train_dataset=…)
        with RollwireGeneration(trainer, SyncFleet(["10.0.0.1:7000", "10.0.0.2:7000"])):
            trainer.train()

    The trainer does all that it does with vLLM: tools, evaluation, and the correction of its loss
    by the log-probabilities that the servers report. It publishes its policy before it samples, at
    each new step and whenever ``train`` is called. Adapters are merged into what is published, and
    weights are cast to the servers' dtype. The version is the trainer's step, or one more than the
    servers' if that is higher, as after a restart.

    Under torchrun or ``accelerate launch`` every process enters it. Each samples for its own
    prompts; the policy is sent from the first, and the others keep step with it.

    Args:
        trainer: The trainer, made without ``use_vllm``.
        fleet: A fleet that is not open. It is opened and closed with this.
        require: Which servers must commit a policy: "all", "any", or a share of them. The others
            get no sequences until they have caught up.
        logprob_basis: The distribution of the servers' log-probabilities. The default is that of
            TRL's loss; it differs from ``SAMPLED`` only where sampling is truncated.
        **publisher: Arguments of ``Publisher``, such as ``backend``.

    Attributes:
        version: The version that was published last; None before the first.
        report: The report of the last publish, in the first process; else None.

    Raises:
        ValueError, TypeError: The trainer or an argument cannot be used.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        fleet: SyncFleet,
        *,
        require: Require = "any",
        logprob_basis: LogprobBasis = LogprobBasis.TEMPERATURE,
        **publisher: Any,
    ) -> None:
        if not isinstance(fleet, SyncFleet):
            raise TypeError(f"fleet is {fleet!r:.80}, not a SyncFleet(…)")
        checked_share(require)
        _check_trainer(trainer)
        self.version: int | None = None
        self.report: PublishReport | None = None
        self._trainer: Any = trainer
        self._fleet = fleet
        self._require = require
        self._logprob_basis = logprob_basis
        self._publisher = SyncPublisher(fleet, **publisher)
        self._ranks: Ranks | None = None
        self._newest = -1  # the highest version that servers have committed
        self._trained: int | None = None  # fingerprint of what was published last
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Opens the fleet. Blocks until all processes of the trainer have entered it.

        Raises:
            UnavailableError: No server is up.
            PublishError: The processes cannot connect.
        """
        with contextlib.ExitStack() as resources:
            resources.enter_context(self._fleet)
            newest = self._fleet.newest_version()
            self._newest = self._from_first(-1 if newest is None else newest)
            if self._trainer.accelerator.num_processes > 1:
                import torch.distributed as dist

                world = dist.group.WORLD
                assert world is not None  # noqa: S101 - accelerate has made it
                self._ranks = resources.enter_context(Ranks(world))
            resources.enter_context(_installed(self._trainer, self))
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def sync_weights(self) -> None:
        """Publishes the policy; the trainer calls it in all processes.

        Raises:
            PublishError: Too few servers have committed it, or the trained policy is not in it.
            RollwireError: See ``Publisher.publish``.
        """
        version = max(self._trainer.state.global_step, self._newest + 1)
        optimizer = self._trainer.optimizer
        trained = None if optimizer is None else fingerprint(optimizer)
        handle = self._call(self._publish(version))
        report: PublishReport | None = None
        error: RollwireError | None = None
        if handle is not None:
            try:
                report = self._call(self._commit(handle))
                self._check_digest(report, trained)
            except RollwireError as raised:
                error = raised
        self._share_outcome(report, error)
        self.version = self._newest = version
        self.report, self._trained = report, trained

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        images: Sequence[object] | None,
        num_generations: int,  # noqa: ARG002 - each prompt comes as often as it is to be sampled
        profiler: AbstractContextManager[object] | None = None,
    ) -> tuple[
        Sequence[Sequence[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]
    ]:
        """Samples one completion of each prompt; the trainer calls it.

        Returns:
            The prompts, and for each of them the token ids of its completion, their
            log-probabilities, and the token of each log-probability.

        Raises:
            RolloutFailedError: A completion was aborted.
            WeightVersionError: Other weights than the policy sampled a token.
            RollwireError: See ``Fleet.generate_many``.
        """
        if images is not None:
            raise ValueError("prompts have images: rollwire's servers take token ids only")
        with profiler or contextlib.nullcontext():
            samples = self._fleet.generate_many(
                prompts, self._sampling(), logprob_basis=self._logprob_basis
            )
        completions = [completion for (completion,) in samples]
        for completion in completions:
            self._check_completion(completion)
        return (
            prompts,
            [list(completion.token_ids) for completion in completions],
            [[[logprob] for logprob in completion.logprobs] for completion in completions],
            [[[token] for token in completion.token_ids] for completion in completions],
        )

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._fleet._loop_thread.call(work)  # noqa: SLF001 - the library's own

    async def _publish(self, version: int) -> PublishHandle | None:
        """The publish, in the first process. What it raises, it raises in all of them."""
        publisher = self._publisher._inner  # noqa: SLF001 - the library's own
        if self._ranks is None:
            return await publisher.publish(version, self._tensors)
        return await self._ranks.publish(publisher, version, self._tensors)

    async def _commit(self, handle: PublishHandle) -> PublishReport:
        report = await handle.committed
        report.require(self._require)
        for server in report.failed:
            logger.warning(
                "%s does not serve %s: %s",
                server.address,
                update_text(report.version),
                server.error,
            )
        return report

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        return policy_tensors(self._trainer.model)

    def _check_digest(self, report: PublishReport, trained: int | None) -> None:
        if self.report is None or None in {trained, self._trained}:
            return
        if report.digest == self.report.digest and trained != self._trained:
            raise PublishError(
                f"{update_text(report.version)} was published, and is equal to "
                f"{update_text(self.report.version)} bit for bit, though the optimizer has changed "
                "parameters since: what is trained does not reach the servers. The trained "
                "parameters are not part of trainer.model, or their changes are too small for the "
                "servers' dtype"
            )

    def _share_outcome(self, report: PublishReport | None, error: RollwireError | None) -> None:
        """Raises the first process's error in all of them, or tells their fleets which servers
        serve the policy.
        """
        tags = [
            (server.address, tag.version, tag.revision, tag.server_id, tag.digest)
            for server in (report.servers if report is not None else ())
            if (tag := server.weights) is not None
        ]
        text, tags = self._from_first((str(error) if error is not None else None, tags))
        if error is not None:
            raise error
        if text is not None:
            raise PublishError(f"rank 0: {text}")
        if report is None:
            self._call(self._adopt({address: WeightTag(*tag) for address, *tag in tags}))

    async def _adopt(self, committed: dict[str, WeightTag]) -> None:
        self._fleet._inner._pool.adopt(committed)  # noqa: SLF001 - the library's own

    def _from_first(self, value: Any) -> Any:
        """The value that the first process has."""
        box = [value]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def _sampling(self) -> Sampling:
        trainer = self._trainer
        return Sampling(
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k or 0,
            min_p=trainer.min_p or 0.0,
            max_new_tokens=trainer.max_completion_length,
            stop_token_ids=tuple(trainer.eos_token_ids),
        )

    def _check_completion(self, completion: Trajectory) -> None:
        if not completion.complete:
            raise RolloutFailedError(
                f"sequence {completion.request_id} ended before it was complete: "
                f"{completion.finish}",
                [],
            )
        if others := set(completion.versions) - {self.version}:
            raise WeightVersionError(
                f"{update_text(others.pop())} sampled a token of sequence {completion.request_id}, "
                f"and the trainer is at version {self.version}: somebody else publishes to these "
                "servers"
            )


class _PublishFirst(TrainerCallback):  # type: ignore[misc]
    """Has the policy published before the first generation of each ``train``."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer: Any = trainer

    def on_train_begin(self, *_: object, **__: object) -> None:
        self._trainer._last_loaded_step = -1  # noqa: SLF001 - TRL has no other way


@contextlib.contextmanager
def _installed(trainer: Any, generation: RollwireGeneration) -> Iterator[None]:
    """While it lasts, the trainer generates as with a server of vLLM's, which is ``generation``.

    It uses two methods of that: ``sync_weights`` when its step is not ``_last_loaded_step``, and
    ``generate``.
    """
    callback = _PublishFirst(trainer)
    mode = trainer.vllm_mode
    trainer.vllm_generation = generation
    trainer.vllm_mode = "server"
    trainer.use_vllm = True
    trainer._last_loaded_step = -1  # noqa: SLF001 - as with vLLM
    trainer.add_callback(callback)
    try:
        yield
    finally:
        trainer.remove_callback(callback)
        trainer.use_vllm = False
        trainer.vllm_mode = mode
        del trainer.vllm_generation, trainer._last_loaded_step  # noqa: SLF001


def _check_trainer(trainer: Any) -> None:
    """Raises TypeError or ValueError for a trainer that cannot sample from rollwire's servers."""
    from trl import GRPOTrainer

    if not isinstance(trainer, GRPOTrainer):
        raise TypeError(f"trainer is a {type(trainer).__name__}, not a GRPOTrainer")
    if trainer.use_vllm:
        raise ValueError(
            "the trainer was made with use_vllm, or has a RollwireGeneration already: make it "
            "without use_vllm, and enter one RollwireGeneration at a time"
        )
    if getattr(trainer, "_is_vlm", False):
        raise ValueError("the model takes images: rollwire's servers take token ids only")
    if trainer.repetition_penalty not in {None, 1.0}:
        raise ValueError(
            f"repetition_penalty is {trainer.repetition_penalty}: rollwire's servers have none"
        )
    if trainer.args.generation_kwargs:
        raise ValueError(
            f"generation_kwargs has {', '.join(trainer.args.generation_kwargs)}: they are those of "
            "transformers or vLLM, and rollwire's servers do not know them"
        )
    if trainer.is_deepspeed_enabled:
        raise ValueError("training with DeepSpeed is not supported: use DDP or one process")
    if trainer.is_fsdp_enabled:
        raise ValueError("training with FSDP is not supported: use DDP or one process")
    check_model(trainer.model)

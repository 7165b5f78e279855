"""Runs a model step by step: plan, forward pass, sampling, report. No threads, no asyncio."""

from __future__ import annotations

import ctypes
import math
import time
import traceback
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from rollwire.types import WeightTag
from rollwire_transport import sum_digests

from rollwire_server.engines.base import (
    CommitStats,
    EndReason,
    EngineError,
    EngineLoad,
    TornWeightsError,
)
from rollwire_server.engines.embedded.batch import PrefillChunk, pack
from rollwire_server.engines.embedded.checkpoint import checkpoint_tensors
from rollwire_server.engines.embedded.output import ForwardResult, StepBuilder, to_host
from rollwire_server.engines.embedded.sampling import SamplingNoise, log_probabilities, sample
from rollwire_server.engines.embedded.scheduler import Scheduler
from rollwire_server.engines.embedded.weights import ModelWeights
from rollwire_server.engines.memory import allocating

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire.types import SleepingWeights
    from torch import Tensor
    from transformers import PreTrainedModel

    from rollwire_server.engines.base import SequenceSpec, StagedUpdate, Step
    from rollwire_server.engines.embedded.batch import KvCache, StepPlan
    from rollwire_server.engines.embedded.model import PackedModel
    from rollwire_server.engines.embedded.weights import Staging

log = structlog.get_logger()

MAX_LOGITS = 1 << 26
"""Elements of logits that one step may compute for prompt log-probabilities."""

MAX_FAILED_STEPS = 16
"""This many failed steps in a row end the engine. A fleet tries one sequence less often, so that a
sequence alone does not end a server."""

FAILURE_LOG_SECONDS = 10.0

# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

_NO_SLOTS = np.empty(0, dtype=np.int64)


class ModelRunner:
    """All of the engine that belongs to its thread, except ``load`` and ``accept``."""

    def __init__(
        self,
        model: PackedModel,
        cache: KvCache,
        read_checkpoint: Callable[[], PreTrainedModel],
        *,
        context: int,
        prefill_tokens: int,
        staging: Staging,
        server_id: str,
    ) -> None:
        self._model = model
        self._cache = cache
        self._read_checkpoint = read_checkpoint
        self._prefill_tokens = prefill_tokens
        self._prompt_logprob_rows = max(1, MAX_LOGITS // model.vocab_size)
        self._noise = SamplingNoise(model.vocab_size, model.device)
        self._held = False
        self._asleep = False
        self._submitted = 0
        self._added = 0
        self._failed_in_a_row = 0
        self._failures_unlogged = 0
        self._failure_logged_at: dict[type[Exception], float] = {}
        self.scheduler = Scheduler(cache.slots, context)
        self.routing = model.routers.allocate(cache.slots, context)
        self.weights = ModelWeights(model.hf, staging)
        self.tag = WeightTag(None, 0, server_id, sum_digests(self.weights.digests().values()))

    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        return EngineLoad(
            running=int(scheduler.live.sum()),
            waiting=len(scheduler.waiting) + self._submitted - self._added,
            kv_tokens_used=int(scheduler.cached[scheduler.live].sum()),
            kv_tokens_total=scheduler.tokens.size,
        )

    def accept(self, spec: SequenceSpec) -> None:
        """Counts a sequence that waits for ``add``; raises EngineError if it can never run."""
        tokens, context = len(spec.prompt) + len(spec.prefix), self.scheduler.context
        if not spec.prompt or tokens >= context:
            raise EngineError(
                f"a sequence of {tokens} tokens cannot be sampled: it must have 1 to "
                f"{context - 1}, so that one more fits into the context"
            )
        self._submitted += 1

    def add(self, spec: SequenceSpec) -> None:
        self._added += 1
        self.scheduler.waiting.append(spec)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False

    def commit(self, staged: StagedUpdate, tag: WeightTag, max_kv_lag: int | None) -> CommitStats:
        if not self._held:
            raise EngineError("weights are committed only while sampling is held")
        began = time.perf_counter_ns()
        try:
            if staged.delta is None:
                self.weights.replace(staged.tensors)
            else:
                self.weights.apply_delta(staged.delta)
        except TornWeightsError:
            self.scheduler.drop_entries()
            raise
        self.tag = tag
        apply_ns = time.perf_counter_ns() - began
        return CommitStats(apply_ns, self.scheduler.commit(tag.revision, max_kv_lag))

    def sleep(self, weights: SleepingWeights) -> int:
        if self.scheduler.live.any() or self.scheduler.waiting:
            raise EngineError("sequences are live: end them before the engine goes to sleep")
        freed = self.weights.sleep(weights) + self._cache.free()
        self._asleep = True
        self.scheduler.drop_entries()
        _release_unused_memory(self._model.device)
        return freed

    def wake(self, *, reload_checkpoint: bool) -> None:
        checkpoint = checkpoint_tensors(self._read_checkpoint()) if reload_checkpoint else None
        if self._asleep:
            try:
                with allocating("the engine cannot wake up", "free memory on its device"):
                    self._cache.reallocate()
                    self.weights.wake()
            except EngineError:
                self._cache.free()
                _release_unused_memory(self._model.device)
                raise
        if checkpoint is not None:
            self.weights.reload(checkpoint)
        self._asleep = False

    @torch.inference_mode()
    def step(self) -> Step | None:
        """Computes and samples the next step; None if there is nothing to do, or sampling is held.

        A sequence whose step raises alone ends with STEP_FAILED. When the model raises whatever it
        computes, all sequences of the step end with INTERRUPTED; raises EngineError when that
        happens step after step.
        """
        if self._held or self._asleep or not self.weights.consistent:
            return None
        plan = self.scheduler.schedule(
            self._prefill_tokens, self._prompt_logprob_rows, self.tag.revision
        )
        if not len(plan.decoding) and not plan.chunks:
            return None
        failed: dict[int, Exception] = {}
        results = self._forward_or_split(plan, failed)
        output = StepBuilder(self.tag, self.scheduler, self.routing)
        for result in results:
            self._record(result, output)
        if failed:
            self._end_failed(failed, output, alone=bool(results) or self._can_compute(min(failed)))
        else:
            self._failed_in_a_row = 0
        return output.build()

    def _forward_or_split(
        self, plan: StepPlan, failed: dict[int, Exception]
    ) -> list[ForwardResult]:
        """Computes a plan, or if that raises its halves, down to single sequences; those that raise
        alone are put into ``failed``, by slot.
        """
        try:
            return [self._forward(plan)]
        except Exception as error:  # whatever it is, other sequences can continue
            traceback.clear_frames(error.__traceback__)  # they hold the step's memory
            slots = plan.slots
            self._log_failure(error, sequences=len(slots))
            if len(slots) == 1:
                failed[slots[0]] = error
                return []
        halves = (slots[: len(slots) // 2], slots[len(slots) // 2 :])
        return [r for half in halves for r in self._forward_or_split(plan.only(half), failed)]

    def _forward(self, plan: StepPlan) -> ForwardResult:
        # All that can raise is done here. It changes nothing but entries of the cache, which are
        # written again in the same way, so a plan that raised can be computed again.
        scheduler = self.scheduler
        self._copy_prefixes(plan)
        last = scheduler.length[plan.decoding] - 1
        batch, slots, positions = pack(
            self._cache, scheduler.tokens, plan.decoding, last, plan.chunks, self._model.row_step
        )
        wanted = scheduler.logit_rows(plan)
        logits = self._model.logits(batch, wanted.rows)
        if self.routing is not None:
            self.routing[slots, positions] = self._model.routers.chosen()[: len(slots)]
        # A sum is finite only if its terms are, and costs a tenth of testing each of them.
        finite = logits.sum(-1).isfinite().cpu().numpy()
        not_finite = np.unique(wanted.slots[~finite]) if not finite.all() else _NO_SLOTS

        prompts = []
        for slot, rows in wanted.prompts:
            if slot not in not_finite:
                metadata = scheduler.sampling_metadata(wanted.slots[rows])
                logprobs = log_probabilities(logits[rows], metadata)
                token_ids = scheduler.next_prompt_tokens(slot, len(logprobs))
                prompts.append((slot, _gather(logprobs, token_ids)))
        sampling = wanted.sampling(without=not_finite)
        sampled = None
        if len(sampling):
            if len(sampling) < len(logits):
                logits = logits[torch.from_numpy(sampling).to(logits.device)]
            drawing = wanted.slots[sampling]
            drawn = sample(logits, scheduler.sampling_metadata(drawing), self._noise)
            sampled = to_host(drawing, *drawn, scheduler.top_logprobs[drawing])
        return ForwardResult(plan, slots, not_finite, prompts, sampled)

    def _record(self, result: ForwardResult, output: StepBuilder) -> None:
        self.scheduler.mark_computed(result.plan)
        for slot in result.not_finite.tolist():
            tokens = int(self.scheduler.cached[slot])
            message = f"NaN or infinity in the logits after {tokens} tokens"
            output.end(slot, EndReason.NOT_FINITE, message)
        if len(result.not_finite):
            self._clear(result.not_finite)
        output.add_routed_experts(result.slots)
        for slot, logprobs in result.prompts:
            output.add_prompt_logprobs(slot, logprobs)
        if result.sampled is not None:
            output.add_tokens(result.sampled)

    def _end_failed(
        self, failed: dict[int, Exception], output: StepBuilder, *, alone: bool
    ) -> None:
        """Ends sequences whose step raised, for each ``alone`` or whatever the model computed."""
        # Alone: the model computes others, so the engine is sound.
        self._failed_in_a_row = 0 if alone else self._failed_in_a_row + 1
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            error = failed[min(failed)]
            raise EngineError(
                f"{self._failed_in_a_row} steps failed in a row, the last with "
                f"{type(error).__name__}: {error}"
            ) from error
        for slot, error in failed.items():
            message = f"{type(error).__name__}: {error}"
            if alone:
                output.end(slot, EndReason.STEP_FAILED, message)
            else:
                output.end(slot, EndReason.INTERRUPTED, f"the engine's step failed: {message}")
        self._clear(np.array(list(failed), dtype=np.int64))

    def _log_failure(self, error: Exception, *, sequences: int) -> None:
        """Logs a step that raised, each kind of error once in FAILURE_LOG_SECONDS."""
        now, kind = time.monotonic(), type(error)
        if now - self._failure_logged_at.get(kind, -math.inf) < FAILURE_LOG_SECONDS:
            self._failures_unlogged += 1
            return
        log.error(
            "a step failed: a sequence that fails alone ends, the others go on",
            exc_info=error,
            sequences=sequences,
            unsaid=self._failures_unlogged,
        )
        self._failure_logged_at[kind], self._failures_unlogged = now, 0

    def _can_compute(self, slot: int) -> bool:
        """Whether the model computes token 0, in a slot that will be cleared."""
        tokens = np.zeros((self._cache.slots, 1), dtype=np.int64)
        chunks = [PrefillChunk(slot, 0, 1)]
        try:
            batch, *_ = pack(
                self._cache, tokens, _NO_SLOTS, _NO_SLOTS, chunks, self._model.row_step
            )
            self._model.logits(batch, np.zeros(1, dtype=np.int64)).cpu()
        except Exception as error:
            self._log_failure(error, sequences=0)
            return False
        return True

    def _copy_prefixes(self, plan: StepPlan) -> None:
        if not plan.copies:
            return
        sources = np.array([c.source for c in plan.copies])
        targets = np.array([c.target for c in plan.copies])
        tokens = max(c.tokens for c in plan.copies)
        self._cache.copy(torch.from_numpy(sources), torch.from_numpy(targets), tokens)
        if self.routing is not None:
            self.routing[targets, :tokens] = self.routing[sources, :tokens]

    def _clear(self, slots: np.ndarray) -> None:
        self._cache.clear(torch.from_numpy(slots).to(self._model.device))
        self.scheduler.drop_entries(slots)


def _gather(logprobs: Tensor, token_ids: np.ndarray) -> list[float]:
    """The log-probability of one token a row of ``logprobs`` [tokens, vocab]."""
    tokens = torch.from_numpy(token_ids).to(logprobs.device)
    values: list[float] = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return values


def _release_unused_memory(device: torch.device) -> None:
    """Has allocators give free memory back to the system or the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif _malloc_trim is not None:
        _malloc_trim(0)

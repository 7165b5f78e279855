"""One step after another: plan, run the model, sample, report; without threads or asyncio."""

from __future__ import annotations

import ctypes
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rollwire.types import KvPolicy, WeightTag
from rollwire_transport import sum_digests

from rollwire_server.engines.allocating import allocating
from rollwire_server.engines.base import Applied, EngineError, Load, TornWeightsError
from rollwire_server.engines.embedded.batch import Chunk, pack
from rollwire_server.engines.embedded.failures import Failures
from rollwire_server.engines.embedded.report import Report, read_prompt, read_tokens
from rollwire_server.engines.embedded.sampling import Noise, Rows, log_probabilities, sample
from rollwire_server.engines.embedded.slots import SlotTable
from rollwire_server.engines.embedded.tensors import checkpoint_tensors
from rollwire_server.engines.embedded.weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollwire.types import SleepingWeights
    from torch import Tensor
    from transformers import PreTrainedModel

    from rollwire_server.engines.base import SequenceSpec, Step
    from rollwire_server.engines.embedded.kv_cache import KvCache
    from rollwire_server.engines.embedded.model import Model
    from rollwire_server.engines.embedded.report import Tokens
    from rollwire_server.engines.embedded.slots import Plan
    from rollwire_server.engines.embedded.staging import StagingPlace

MAX_LOGITS = 1 << 26
"""Elements of logits that one step may make for prompt log-probabilities."""

# glibc's, where this is glibc.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

_NO_SLOTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Computed:
    """What one forward pass gave, on the host.

    Attributes:
        plan: What it computed.
        slots: Of each row.
        broken: Slots whose logits are not finite.
        prompts: The log-probabilities of a slot's next prompt tokens.
        sampled: Slots that got a token.
        tokens: Theirs; None if there are none.
    """

    plan: Plan
    slots: np.ndarray
    broken: np.ndarray
    prompts: list[tuple[int, list[float]]]
    sampled: np.ndarray
    tokens: Tokens | None


class Runner:
    """The model, its KV cache and the sequences.

    All of it belongs to the engine's thread, but for ``load``, ``check`` and ``announce``.
    """

    def __init__(
        self,
        model: Model,
        cache: KvCache,
        read_again: Callable[[], PreTrainedModel],
        *,
        context: int,
        prefill_tokens: int,
        staging: StagingPlace,
        server_id: str,
    ) -> None:
        self._model = model
        self._read_again = read_again
        self._prefill_tokens = prefill_tokens
        self._prompt_logprob_rows = max(1, MAX_LOGITS // model.vocab_size)
        self._cache = cache
        self._noise = Noise(model.vocab_size, model.device)
        self._held = False
        self._asleep = False
        self._announced = 0
        self._added = 0
        self._failures = Failures()
        self.table = SlotTable(cache.slots, context)
        self.routing = model.routers.store(cache.slots, context)
        self.weights = Weights(model.hf, staging)
        self.tag = WeightTag(None, 0, server_id, sum_digests(self.weights.digests().values()))

    def load(self) -> Load:
        """How busy it is."""
        table = self.table
        return Load(
            running=int(table.live.sum()),
            waiting=len(table.waiting) + self._announced - self._added,
            kv_tokens_used=int(table.cached[table.live].sum()),
            kv_tokens_total=table.tokens.size,
        )

    def check(self, spec: SequenceSpec) -> None:
        """Raises EngineError if a sequence can never run here."""
        tokens = len(spec.prompt) + len(spec.prefix)
        if not spec.prompt or tokens >= self.table.context:
            raise EngineError(
                f"a sequence of {tokens} tokens cannot be sampled: 1 to {self.table.context - 1} "
                "leave room for another"
            )

    def announce(self) -> None:
        """Counts a sequence as waiting that is on its way to ``add``."""
        self._announced += 1

    def add(self, spec: SequenceSpec) -> None:
        """Queues a sequence."""
        self._added += 1
        self.table.waiting.append(spec)

    def hold(self) -> None:
        """Makes ``step`` compute nothing."""
        self._held = True

    def release(self) -> None:
        """Lets ``step`` go on."""
        self._held = False

    def commit(self, staged: Mapping[str, Tensor], tag: WeightTag, policy: KvPolicy) -> Applied:
        """Puts staged weights in place; see ``Engine.commit``."""
        if not self._held:
            raise EngineError("weights are committed only while sampling is held")
        began = time.perf_counter_ns()
        try:
            self.weights.replace(staged)
        except TornWeightsError:
            self.table.forget()
            raise
        self.tag = tag
        if policy is KvPolicy.KEEP:
            self.table.keep()
            return Applied(time.perf_counter_ns() - began, 0)
        return Applied(time.perf_counter_ns() - began, self.table.recompute())

    def sleep(self, weights: SleepingWeights) -> int:
        """Frees memory; see ``Engine.sleep``."""
        if self.table.live.any() or self.table.waiting:
            raise EngineError("sequences are live: end them before the engine goes to sleep")
        freed = self.weights.sleep(weights) + self._cache.free()
        self._asleep = True
        self.table.forget()
        _return_unused(self._model.device)
        return freed

    def wake(self, *, reload_checkpoint: bool) -> None:
        """Takes the memory back; see ``Engine.wake``."""
        checkpoint = checkpoint_tensors(self._read_again()) if reload_checkpoint else None
        if self._asleep:
            self._take_memory()
        if checkpoint is not None:
            self.weights.reload(checkpoint)
        self._asleep = False

    def _take_memory(self) -> None:
        """All that sleep freed, or nothing."""
        try:
            with allocating("the engine cannot wake up", "leave it more memory"):
                self._cache.take()
                self.weights.wake()
        except EngineError:
            self._cache.free()
            _return_unused(self._model.device)
            raise

    @torch.inference_mode()
    def step(self) -> Step | None:
        """Computes and samples what is next; None if there is nothing to do, or if it must not.

        A sequence whose step raises by itself ends with STEP_FAILED. Where the model raises
        whatever it computes, all that were to be computed end with FAILED; raises EngineError when
        that happens step after step.
        """
        if self._held or self._asleep or not self.weights.whole:
            return None
        plan = self.table.plan(self._prefill_tokens, self._prompt_logprob_rows, self.tag.revision)
        if not len(plan.decoding) and not plan.chunks:
            return None
        failed: dict[int, Exception] = {}
        computed = self._compute(plan, failed)
        report = Report(self.tag, self.table, self.routing)
        for part in computed:
            self._take(part, report)
        if failed:
            self._give_up(failed, report, sound=bool(computed) or self._is_sound(min(failed)))
        else:
            self._failures.none()
        return report.step

    def _compute(self, plan: Plan, failed: dict[int, Exception]) -> list[Computed]:
        """Computes a plan; where that raises, its halves, down to single sequences. ``failed`` gets
        those that raise alone, by slot.
        """
        try:
            return [self._run(plan)]
        except Exception as error:  # whatever it is, other sequences can go on
            traceback.clear_frames(error.__traceback__)  # they hold the step's memory
            slots = plan.slots
            self._failures.say(error, sequences=len(slots))
            if len(slots) == 1:
                failed[slots[0]] = error
                return []
        return [part for half in plan.halves() for part in self._compute(half, failed)]

    def _run(self, plan: Plan) -> Computed:
        """Computes a plan and samples. Whatever can raise is done here, and nothing but entries of
        the cache (which are written again the same way) changes: what raised can be run again.
        """
        table = self.table
        self._copy(plan)
        last = table.length[plan.decoding] - 1
        batch, slots, positions = pack(
            self._cache, table.tokens, plan.decoding, last, plan.chunks, self._model.row_step
        )
        wanted = table.logit_rows(plan)
        logits = self._model.logits(batch, wanted.rows)
        if self.routing is not None:
            self.routing[slots, positions] = self._model.routers.chosen()[: len(slots)]
        # A sum is finite only if its terms are, and costs a tenth of looking at each.
        finite = logits.sum(-1).isfinite().cpu().numpy()
        broken = np.unique(wanted.slots[~finite]) if not finite.all() else _NO_SLOTS

        prompts = []
        for slot, rows in wanted.prompts:
            if slot not in broken:
                told = log_probabilities(logits[rows], self._rows(wanted.slots[rows]))
                prompts.append((slot, read_prompt(told, table.next_prompt_tokens(slot, len(told)))))
        sampling = wanted.sampling(without=broken)
        sampled, tokens = wanted.slots[sampling], None
        if len(sampling):
            if len(sampling) < len(logits):
                logits = logits[torch.from_numpy(sampling).to(logits.device)]
            drawn = sample(logits, self._rows(sampled), self._noise)
            tokens = read_tokens(drawn, table.top_logprobs[sampled])
        return Computed(plan, slots, broken, prompts, sampled, tokens)

    def _take(self, part: Computed, report: Report) -> None:
        """Puts what was computed into the table and the report."""
        self.table.computed(part.plan)
        if len(part.broken):
            report.not_finite(part.broken)
            self._clear(part.broken)
        report.routed_experts(part.slots)
        for slot, logprobs in part.prompts:
            report.prompt_logprobs(slot, logprobs)
        if part.tokens is not None:
            report.sampled(part.sampled, part.tokens)

    def _give_up(self, failed: dict[int, Exception], report: Report, *, sound: bool) -> None:
        """Ends sequences whose steps raised: their own fault if the model computes others."""
        if sound:
            self._failures.none()
        else:
            self._failures.one(failed[min(failed)])
        for slot, error in failed.items():
            report.failed(slot, error, alone=sound)
        self._clear(np.array(list(failed), dtype=np.int64))

    def _is_sound(self, slot: int) -> bool:
        """Whether the model computes anything: token 0, in a slot that will be cleared."""
        tokens = np.zeros((self._cache.slots, 1), dtype=np.int64)
        chunk = Chunk(slot, 0, 1)
        try:
            batch, *_ = pack(
                self._cache, tokens, _NO_SLOTS, _NO_SLOTS, [chunk], self._model.row_step
            )
            self._model.logits(batch, np.zeros(1, dtype=np.int64)).cpu()
        except Exception as error:
            self._failures.say(error, sequences=0)
            return False
        return True

    def _copy(self, plan: Plan) -> None:
        if not plan.copies:
            return
        sources = np.array([c.source for c in plan.copies])
        targets = np.array([c.target for c in plan.copies])
        tokens = max(c.tokens for c in plan.copies)
        self._cache.copy(torch.from_numpy(sources), torch.from_numpy(targets), tokens)
        if self.routing is not None:
            self.routing[targets, :tokens] = self.routing[sources, :tokens]

    def _rows(self, slots: np.ndarray) -> Rows:
        """How to sample a row of each of ``slots``."""
        table = self.table
        position = table.length[slots] - table.prompt_length[slots]
        banned: tuple[list[int], list[int]] = ([], [])
        for row in (table.length[slots] < table.no_stop_before[slots]).nonzero()[0].tolist():
            stops = table.at(int(slots[row])).spec.sampling.stop_token_ids
            banned[0].extend([row] * len(stops))
            banned[1].extend(stops)
        return Rows(
            temperature=table.temperature[slots],
            top_k=table.top_k[slots],
            top_p=table.top_p[slots],
            min_p=table.min_p[slots],
            noise_keys=Noise.keys(table.seed[slots], position),
            basis=table.basis[slots],
            banned=banned,
        )

    def _clear(self, slots: np.ndarray) -> None:
        self._cache.clear(torch.from_numpy(slots).to(self._model.device))
        self.table.forget(slots)


def _return_unused(device: torch.device) -> None:
    """Gives memory that is free in this process back, which allocators keep for themselves."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif _malloc_trim is not None:
        _malloc_trim(0)

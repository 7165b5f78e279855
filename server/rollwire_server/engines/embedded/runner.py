"""One step after another: plan, run the model, sample, report; without threads or asyncio."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rollwire_transport import sum_digests

from rollwire_server.engines.base import (
    Applied,
    End,
    EndReason,
    EngineError,
    Extras,
    KvPolicy,
    Load,
    PromptLogprobs,
    Step,
    TopLogprobs,
    TornWeightsError,
    WeightTag,
)

from .attention import WIDTH_STEP, Batch, KvCache, round_up
from .sampling import Noise, Rows, log_probabilities, sample
from .slots import SlotTable
from .weights import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from rollwire_server.engines.base import SequenceSpec

    from .model import LoadedModel
    from .slots import Plan

MIN_ROWS = 8
"""Token rows that the model is given at least, and rows of logits. Below four, matrix products on
a CPU take another path, with sums in another order."""

MAX_LOGITS = 1 << 26
"""Elements of logits that one step may make for prompt log-probabilities."""


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The slots of which a step samples a token, and what their batch rows are."""

    slots: np.ndarray
    rows: np.ndarray


class Runner:
    """The model, its KV cache and the sequences; everything here runs on the engine's thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        slots: int,
        context: int,
        prefill_tokens: int,
        batch_invariant: bool,
        server_id: str,
    ) -> None:
        self._model = loaded.model
        self._device = loaded.model.device
        self._prefill_tokens = prefill_tokens
        self._prompt_logprob_rows = max(1, MAX_LOGITS // loaded.vocab_size)
        self._batch_invariant = batch_invariant
        self._cache = KvCache(slots, context)
        self._noise = Noise(loaded.vocab_size, self._device)
        self.table = SlotTable(slots, context)
        self.weights = Weights(loaded.model)
        self.tag = WeightTag(None, 0, server_id, sum_digests(self.weights.digests().values()))
        self._held = False
        self._announced = 0
        self._added = 0

    def announce(self) -> None:
        """Counts a sequence that is on its way to ``add``, as waiting; from the event loop."""
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

    def load(self) -> Load:
        """How busy it is; may be called from any thread."""
        table = self.table
        return Load(
            running=int(table.live.sum()),
            waiting=len(table.waiting) + self._announced - self._added,
            kv_tokens_used=int(table.cached[table.live].sum()),
            kv_tokens_total=table.tokens.size,
        )

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
        stale = self.table.recompute() if policy is KvPolicy.RECOMPUTE else 0
        return Applied(time.perf_counter_ns() - began, stale)

    @torch.inference_mode()
    def step(self) -> Step | None:
        """Computes and samples what is next; None if there is nothing to do.

        An exception of the model ends the sequences that were computed, with FAILED.
        """
        if self._held:
            return None
        plan = self.table.plan(self._prefill_tokens, self._prompt_logprob_rows, self.tag.revision)
        if not len(plan.decoding) and not plan.chunks:
            return None
        try:
            return self._run(plan)
        except Exception as error:  # whatever it is, other sequences can go on
            return self._fail(plan, error)

    def _run(self, plan: Plan) -> Step:
        table = self.table
        if plan.copies:
            self._copy(plan)
        batch, input_ids = self._batch(plan)
        sampling, prompt_rows = self._logit_rows(plan)
        wanted = np.concatenate([sampling.rows, *(rows for _, rows in prompt_rows)])
        padding = max(0, MIN_ROWS - len(wanted))
        keep = torch.from_numpy(np.pad(wanted, (0, padding))).to(self._device)
        logits = self._model(
            input_ids=input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            batch=batch,
        ).logits[0]
        logits = logits[: len(wanted)].float()

        step = Step(self.tag, [], [], [])
        table.cached[plan.decoding] = table.length[plan.decoding]
        for chunk in plan.chunks:
            table.cached[chunk.slot] = chunk.end
        if len(sampling.slots):
            self._sample(logits[: len(sampling.slots)], sampling, step)
        first = len(sampling.slots)
        for slot, rows in prompt_rows:
            self._tell_prompt_logprobs(slot, logits[first : first + len(rows)], step)
            first += len(rows)
        return step

    def _copy(self, plan: Plan) -> None:
        sources = torch.tensor([c.source for c in plan.copies], device=self._device)
        targets = torch.tensor([c.target for c in plan.copies], device=self._device)
        self._cache.copy_prefixes(sources, targets, max(c.tokens for c in plan.copies))

    def _batch(self, plan: Plan) -> tuple[Batch, Tensor]:
        """The batch of a plan, and its input tokens."""
        table = self.table
        decoding = plan.decoding
        last = table.length[decoding] - 1
        slots = np.concatenate(
            [decoding, *(np.full(c.end - c.start, c.slot) for c in plan.chunks)], dtype=np.int64
        )
        positions = np.concatenate(
            [last, *(np.arange(c.start, c.end) for c in plan.chunks)], dtype=np.int64
        )
        padding = (0, max(0, MIN_ROWS - len(slots)))
        host = np.stack(
            [
                np.pad(table.tokens[slots, positions], padding),
                np.pad(positions, padding),
                np.pad(slots * self._cache.context + positions, padding),
            ]
        )
        device = torch.from_numpy(host).to(self._device)
        batch = Batch(
            cache=self._cache,
            decoding=torch.from_numpy(decoding).to(self._device),
            positions=device[1],
            entries=device[2, : len(slots)],
            chunks=plan.chunks,
            width=round_up(int(last.max(initial=0)) + 1, WIDTH_STEP),
            batch_invariant=self._batch_invariant,
        )
        return batch, device[0]

    def _logit_rows(self, plan: Plan) -> tuple[_Sampling, list[tuple[int, np.ndarray]]]:
        """Which batch rows sample, and which give prompt log-probabilities of which slots."""
        table = self.table
        slots = plan.decoding.tolist()
        rows = list(range(len(slots)))
        prompt_rows = []
        first = len(rows)
        for chunk in plan.chunks:
            end = first + chunk.end - chunk.start
            if chunk.end == table.length[chunk.slot]:
                slots.append(chunk.slot)
                rows.append(end - 1)
            sequence = table.at(chunk.slot)
            if sequence.wants_prompt_logprobs:
                # The row of a token gives the distribution of the one after it.
                low = max(chunk.start, sequence.prompt_logprobs_told - 1)
                high = min(chunk.end, len(sequence.spec.prompt) - 1)
                if low < high:
                    told = np.arange(low, high) - chunk.start + first
                    prompt_rows.append((chunk.slot, told))
            first = end
        return _Sampling(np.array(slots, np.int64), np.array(rows, np.int64)), prompt_rows

    def _rows(self, slots: np.ndarray) -> Rows:
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

    def _sample(self, logits: Tensor, sampling: _Sampling, step: Step) -> None:
        table = self.table
        slots = sampling.slots
        sampled = sample(logits, self._rows(slots), self._noise)
        chosen = sampled.logprobs.gather(1, sampled.token_ids[:, None])[:, 0]
        token_ids: list[int] = sampled.token_ids.tolist()
        logprobs: list[float] = chosen.tolist()
        finite: list[bool] = sampled.finite.tolist()

        revisions = table.revision[slots].tolist()
        mixed = any(r != self.tag.revision for r in revisions)
        length = table.length[slots]
        full = (length + 1 >= table.limit[slots]).tolist()
        room = length < table.context
        table.tokens[slots[room], length[room]] = np.array(token_ids)[room]
        table.length[slots] = length + 1
        for row, slot in enumerate(slots.tolist()):
            sequence = table.at(slot)
            key = sequence.spec.key
            if not finite[row]:
                message = f"NaN or infinity in the logits after {int(length[row])} tokens"
                step.ends.append(End(key, EndReason.NOT_FINITE, message))
                table.release(slot)
                continue
            token = token_ids[row]
            step.keys.append(key)
            step.token_ids.append(token)
            step.logprobs.append(logprobs[row])
            if mixed:
                step.oldest_kv_revisions.append(revisions[row])
            if sequence.cached_prompt_tokens is not None:
                extras = step.extras.setdefault(key, Extras())
                extras.cached_prompt_tokens = sequence.cached_prompt_tokens
                sequence.cached_prompt_tokens = None
            if k := sequence.spec.top_logprobs:
                top = sampled.logprobs[row].topk(k)
                extras = step.extras.setdefault(key, Extras())
                extras.top_logprobs = TopLogprobs(k, top.indices.tolist(), top.values.tolist())
            if token in sequence.spec.sampling.stop_token_ids:
                step.ends.append(End(key, EndReason.STOP))
                table.release(slot)
            elif full[row]:
                step.ends.append(End(key, EndReason.LENGTH))
                table.release(slot)

    def _tell_prompt_logprobs(self, slot: int, logits: Tensor, step: Step) -> None:
        table = self.table
        sequence = table.at(slot)
        start = sequence.prompt_logprobs_told
        rows = self._rows(np.full(len(logits), slot))
        logprobs = log_probabilities(logits, rows)
        targets = table.tokens[slot, start : start + len(logits)]
        index = torch.from_numpy(targets).to(self._device)[:, None]
        told = PromptLogprobs(start, logprobs.gather(1, index)[:, 0].tolist())
        sequence.prompt_logprobs_told = start + len(logits)
        extras = step.extras.setdefault(sequence.spec.key, Extras())
        extras.prompt_logprobs.append(told)

    def _fail(self, plan: Plan, error: Exception) -> Step:
        slots = [*plan.decoding.tolist(), *(c.slot for c in plan.chunks)]
        message = f"the engine's step failed: {type(error).__name__}: {error}"
        keys = [self.table.at(s).spec.key for s in slots if self.table.live[s]]
        self.table.forget(np.array(slots, dtype=np.int64))
        self.table.remove(keys)
        return Step(self.tag, [], [], [], ends=[End(k, EndReason.FAILED, message) for k in keys])

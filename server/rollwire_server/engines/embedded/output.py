"""Builds the ``Step`` that the engine reports from what forward passes computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_server.engines.base import (
    EndReason,
    PromptLogprobs,
    RoutedExperts,
    SequenceEnd,
    SequenceExtras,
    Step,
    TopLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_server.engines.embedded.batch import StepPlan
    from rollwire_server.engines.embedded.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token of each of ``slots``, and the top log-probabilities of some rows."""

    slots: np.ndarray
    ids: np.ndarray
    logprobs: list[float]
    top_logprobs: dict[int, TopLogprobs]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The results of one forward pass, on the host."""

    plan: StepPlan
    slots: np.ndarray  # of each row
    not_finite: np.ndarray  # slots whose logits hold NaN or infinity
    prompts: list[tuple[int, list[float]]]  # slots, with those of their next prompt tokens
    sampled: SampledTokens | None


def to_host(
    slots: np.ndarray, token_ids: Tensor, logprobs: Tensor, top_logprobs: np.ndarray
) -> SampledTokens:
    """Copies sampled tokens to the host, with ``top_logprobs`` [rows] top ones of each row."""
    own = logprobs.gather(1, token_ids[:, None])[:, 0].tolist()
    tops: dict[int, TopLogprobs] = {}
    if max_k := int(top_logprobs.max()):
        top = logprobs.topk(max_k, dim=-1)
        top_ids, values = top.indices.tolist(), top.values.tolist()
        for row in top_logprobs.nonzero()[0].tolist():
            k = int(top_logprobs[row])
            tops[row] = TopLogprobs(k, top_ids[row][:k], values[row][:k])
    return SampledTokens(slots, token_ids.cpu().numpy(), own, tops)


class StepBuilder:
    """Collects what one step reports, and ends the sequences that end with it."""

    def __init__(self, tag: WeightTag, scheduler: Scheduler, routing: np.ndarray | None) -> None:
        self._step = Step(tag, [], [], [])
        self._revisions: list[int] = []  # the oldest KV revision of each row
        self._scheduler = scheduler
        self._routing = routing

    def build(self) -> Step:
        revision = self._step.weights.revision
        if self._revisions.count(revision) != len(self._revisions):
            self._step.oldest_kv_revisions = self._revisions
        return self._step

    def add_tokens(self, tokens: SampledTokens) -> None:
        """Appends a token to each sequence; ends those that are complete with it."""
        scheduler, step, slots = self._scheduler, self._step, tokens.slots
        scheduler.tokens[slots, scheduler.length[slots]] = tokens.ids
        scheduler.length[slots] += 1

        sequences = [scheduler.at(slot) for slot in slots.tolist()]
        token_ids = tokens.ids.tolist()
        step.keys += [sequence.spec.key for sequence in sequences]
        step.token_ids += token_ids
        step.logprobs += tokens.logprobs
        self._revisions += scheduler.revision[slots].tolist()
        for row, top in tokens.top_logprobs.items():
            self._extras(int(slots[row])).top_logprobs = top
        full = (scheduler.length[slots] >= scheduler.max_length[slots]).tolist()
        for sequence, token, is_full in zip(sequences, token_ids, full, strict=True):
            if sequence.cached_prompt_tokens is not None:
                self._extras(sequence.slot).cached_prompt_tokens = sequence.cached_prompt_tokens
                sequence.cached_prompt_tokens = None
            if token in sequence.spec.sampling.stop_token_ids:
                self.end(sequence.slot, EndReason.STOP)
            elif is_full:
                self.end(sequence.slot, EndReason.LENGTH)

    def add_prompt_logprobs(self, slot: int, logprobs: list[float]) -> None:
        """Reports the log-probabilities of a slot's next prompt tokens."""
        sequence = self._scheduler.at(slot)
        start = sequence.reported_prompt_logprobs
        sequence.reported_prompt_logprobs += len(logprobs)
        part = PromptLogprobs(start, logprobs, int(self._scheduler.revision[slot]))
        self._extras(slot).prompt_logprobs.append(part)

    def add_routed_experts(self, slots: np.ndarray) -> None:
        """Reports the experts of the tokens of ``slots`` that have not been reported yet."""
        if self._routing is None:
            return
        scheduler = self._scheduler
        for slot in dict.fromkeys(slots.tolist()):
            if not scheduler.live[slot] or not scheduler.at(slot).spec.routed_experts:
                continue
            sequence = scheduler.at(slot)
            start, end = sequence.reported_routing, int(scheduler.cached[slot])
            rows = self._routing[slot, start:end]
            sequence.reported_routing = end
            self._extras(slot).routed_experts.append(
                RoutedExperts(
                    start_position=start,
                    num_tokens=end - start,
                    num_layers=rows.shape[1],
                    top_k=rows.shape[2],
                    experts=rows.tobytes(),
                    bytes_per_expert=rows.itemsize,
                    oldest_kv_revision=int(scheduler.revision[slot]),
                )
            )

    def end(self, slot: int, reason: EndReason, message: str = "") -> None:
        key = self._scheduler.at(slot).spec.key
        self._step.ends.append(SequenceEnd(key, reason, message))
        self._scheduler.release(slot)

    def _extras(self, slot: int) -> SequenceExtras:
        key = self._scheduler.at(slot).spec.key
        return self._step.extras.setdefault(key, SequenceExtras())

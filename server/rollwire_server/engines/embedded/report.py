"""Turns what a step computed into what it tells, and ends the sequences that it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import (
    End,
    EndReason,
    Extras,
    PromptLogprobs,
    RoutedExperts,
    Step,
    TopLogprobs,
)

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from rollwire_server.engines.base import WeightTag

    from .sampling import Sampled
    from .slots import SlotTable


class Report:
    """Fills the ``Step`` of one engine step."""

    def __init__(self, tag: WeightTag, table: SlotTable, routing: np.ndarray | None) -> None:
        self.step = Step(tag, [], [], [])
        self._table = table
        self._routing = routing

    def not_finite(self, slots: np.ndarray) -> None:
        """Ends sequences whose logits hold NaN or infinity."""
        for slot in slots.tolist():
            tokens = int(self._table.cached[slot])
            message = f"NaN or infinity in the logits after {tokens} tokens"
            self._end(slot, EndReason.NOT_FINITE, message)

    def routed_experts(self, slots: np.ndarray) -> None:
        """Tells the experts of the tokens of ``slots`` that have not been told yet."""
        if self._routing is None:
            return
        table = self._table
        for slot in dict.fromkeys(slots.tolist()):
            if not table.live[slot] or not (sequence := table.at(slot)).spec.routed_experts:
                continue
            start, end = sequence.routing_told, int(table.cached[slot])
            rows = self._routing[slot, start:end]
            sequence.routing_told = end
            self._extras(slot).routed_experts.append(
                RoutedExperts(
                    start_position=start,
                    num_tokens=end - start,
                    num_layers=rows.shape[1],
                    top_k=rows.shape[2],
                    experts=rows.tobytes(),
                    bytes_per_expert=rows.itemsize,
                )
            )

    def prompt_logprobs(self, slot: int, logprobs: Tensor) -> None:
        """Tells those of the next prompt tokens of a slot; ``logprobs`` is [tokens, vocab]."""
        sequence = self._table.at(slot)
        start = sequence.prompt_logprobs_told
        sequence.prompt_logprobs_told = end = start + len(logprobs)
        tokens = torch.from_numpy(self._table.tokens[slot, start:end]).to(logprobs.device)
        values = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        self._extras(slot).prompt_logprobs.append(PromptLogprobs(start, values))

    def sampled(self, slots: np.ndarray, sampled: Sampled) -> None:
        """Appends a token to each of ``slots``; ends what is complete with it."""
        table, step = self._table, self.step
        token_ids = sampled.token_ids.cpu().numpy()
        table.tokens[slots, table.length[slots]] = token_ids
        table.length[slots] += 1

        sequences = [table.at(slot) for slot in slots.tolist()]
        step.keys = [sequence.spec.key for sequence in sequences]
        step.token_ids = token_ids.tolist()
        step.logprobs = sampled.logprobs.gather(1, sampled.token_ids[:, None])[:, 0].tolist()
        revisions = table.revision[slots]
        if (revisions != step.weights.revision).any():
            step.oldest_kv_revisions = revisions.tolist()
        self._top_logprobs(slots, sampled.logprobs)
        full = (table.length[slots] >= table.limit[slots]).tolist()
        for sequence, token, is_full in zip(sequences, step.token_ids, full, strict=True):
            if sequence.cached_prompt_tokens is not None:
                self._extras(sequence.slot).cached_prompt_tokens = sequence.cached_prompt_tokens
                sequence.cached_prompt_tokens = None
            if token in sequence.spec.sampling.stop_token_ids:
                self._end(sequence.slot, EndReason.STOP)
            elif is_full:
                self._end(sequence.slot, EndReason.LENGTH)

    def _top_logprobs(self, slots: np.ndarray, logprobs: Tensor) -> None:
        wanted = self._table.top_logprobs[slots]
        most = int(wanted.max())
        if most == 0:
            return
        top = logprobs.topk(most, dim=-1)
        token_ids, values = top.indices.tolist(), top.values.tolist()
        for row in wanted.nonzero()[0].tolist():
            k = int(wanted[row])
            told = TopLogprobs(k, token_ids[row][:k], values[row][:k])
            self._extras(int(slots[row])).top_logprobs = told

    def _extras(self, slot: int) -> Extras:
        return self.step.extras.setdefault(self._table.at(slot).spec.key, Extras())

    def _end(self, slot: int, reason: EndReason, message: str = "") -> None:
        self.step.ends.append(End(self._table.at(slot).spec.key, reason, message))
        self._table.release(slot)

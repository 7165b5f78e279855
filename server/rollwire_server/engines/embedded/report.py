"""Turns what a step computed into what it tells, and ends the sequences that it ended."""

from __future__ import annotations

from dataclasses import dataclass
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
    from rollwire.types import WeightTag
    from torch import Tensor

    from rollwire_server.engines.embedded.sampling import Sampled
    from rollwire_server.engines.embedded.slots import SlotTable


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens on the host, one a row, and the likeliest ones of rows that ask for them."""

    ids: np.ndarray
    logprobs: list[float]
    tops: dict[int, TopLogprobs]


def read_tokens(sampled: Sampled, tops: np.ndarray) -> Tokens:
    """Brings sampled tokens to the host, with ``tops`` likeliest ones of each row."""
    logprobs = sampled.logprobs.gather(1, sampled.token_ids[:, None])[:, 0].tolist()
    told: dict[int, TopLogprobs] = {}
    if most := int(tops.max()):
        top = sampled.logprobs.topk(most, dim=-1)
        token_ids, values = top.indices.tolist(), top.values.tolist()
        for row in tops.nonzero()[0].tolist():
            k = int(tops[row])
            told[row] = TopLogprobs(k, token_ids[row][:k], values[row][:k])
    return Tokens(sampled.token_ids.cpu().numpy(), logprobs, told)


def read_prompt(logprobs: Tensor, token_ids: np.ndarray) -> list[float]:
    """Those of ``token_ids``, one a row of ``logprobs`` [tokens, vocab]."""
    tokens = torch.from_numpy(token_ids).to(logprobs.device)
    values: list[float] = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    return values


class Report:
    """Fills the ``Step`` of one engine step."""

    def __init__(self, tag: WeightTag, table: SlotTable, routing: np.ndarray | None) -> None:
        self._step = Step(tag, [], [], [])
        self._revisions: list[int] = []  # one a row
        self._table = table
        self._routing = routing

    @property
    def step(self) -> Step:
        """What has been told so far."""
        revision = self._step.weights.revision
        if self._revisions.count(revision) != len(self._revisions):
            self._step.oldest_kv_revisions = self._revisions
        return self._step

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
                    oldest_kv_revision=int(table.revision[slot]),
                )
            )

    def failed(self, slot: int, error: Exception, *, alone: bool) -> None:
        """Ends a sequence whose step raised, ``alone`` or with all others."""
        reason = EndReason.STEP_FAILED if alone else EndReason.INTERRUPTED
        what = f"{type(error).__name__}: {error}"
        self._end(slot, reason, what if alone else f"the engine's step failed: {what}")

    def prompt_logprobs(self, slot: int, logprobs: list[float]) -> None:
        """Tells those of the next prompt tokens of a slot."""
        sequence = self._table.at(slot)
        start = sequence.prompt_logprobs_told
        sequence.prompt_logprobs_told += len(logprobs)
        told = PromptLogprobs(start, logprobs, int(self._table.revision[slot]))
        self._extras(slot).prompt_logprobs.append(told)

    def sampled(self, slots: np.ndarray, tokens: Tokens) -> None:
        """Appends a token to each of ``slots``; ends what is complete with it."""
        table, step = self._table, self._step
        table.tokens[slots, table.length[slots]] = tokens.ids
        table.length[slots] += 1

        sequences = [table.at(slot) for slot in slots.tolist()]
        token_ids = tokens.ids.tolist()
        step.keys += [sequence.spec.key for sequence in sequences]
        step.token_ids += token_ids
        step.logprobs += tokens.logprobs
        self._revisions += table.revision[slots].tolist()
        for row, top in tokens.tops.items():
            self._extras(int(slots[row])).top_logprobs = top
        full = (table.length[slots] >= table.limit[slots]).tolist()
        for sequence, token, is_full in zip(sequences, token_ids, full, strict=True):
            if sequence.cached_prompt_tokens is not None:
                self._extras(sequence.slot).cached_prompt_tokens = sequence.cached_prompt_tokens
                sequence.cached_prompt_tokens = None
            if token in sequence.spec.sampling.stop_token_ids:
                self._end(sequence.slot, EndReason.STOP)
            elif is_full:
                self._end(sequence.slot, EndReason.LENGTH)

    def _extras(self, slot: int) -> Extras:
        return self._step.extras.setdefault(self._table.at(slot).spec.key, Extras())

    def _end(self, slot: int, reason: EndReason, message: str = "") -> None:
        self._step.ends.append(End(self._table.at(slot).spec.key, reason, message))
        self._table.release(slot)

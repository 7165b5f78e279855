"""Assigns sequences to slots of the KV cache and plans what each step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollwire_server.engines.embedded.batch import PrefillChunk, PrefixCopy, StepPlan
from rollwire_server.engines.embedded.sampling import BASES, SamplingMetadata, SamplingNoise
from rollwire_server.engines.kv_lag import sequences_to_recompute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rollwire_server.engines.base import SequenceSpec

MIN_SHARED_TOKENS = 8
"""A shorter common prefix is computed again: that is cheaper than copying it."""


@dataclass(slots=True)
class SlotSequence:
    """A sequence that has a slot until it ends."""

    spec: SequenceSpec
    slot: int
    arrival: int  # orders sequences, oldest first
    started: bool = False  # some tokens have been computed: it keeps the KV entries that it has
    cached_prompt_tokens: int | None = 0  # whose KV entries were reused; None once reported
    reported_prompt_logprobs: int = 1  # of how many tokens; token 0 has none
    reported_routing: int = 0  # of how many tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.spec.prompt_logprobs and self.reported_prompt_logprobs < len(self.spec.prompt)


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The batch rows whose logits a step needs.

    First comes the last row of each decoding slot and of each chunk, whether it samples or not:
    keys and values that are not finite show there. Then come the rows for prompt
    log-probabilities: ``prompts`` has the slice of each slot's.
    """

    rows: np.ndarray  # [n]
    slots: np.ndarray  # [n]
    samples: np.ndarray  # [n], whether a row is its sequence's last one and gives a token
    prompts: list[tuple[int, slice]]

    def sampling(self, without: np.ndarray) -> np.ndarray:
        """Indices of the rows that sample, except those of slots ``without``."""
        samples = self.samples
        if len(without):
            samples = samples & ~np.isin(self.slots, without)
        return samples.nonzero()[0]


class Scheduler:
    """Slots, the sequences in them and the sequences that wait for one.

    One row of every array is one slot. A free slot keeps its tokens and KV entries, for sequences
    with the same prefix, until another sequence needs it.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.context = context
        self.tokens = np.zeros((slots, context), dtype=np.int64)  # prompt and output
        self.length = np.zeros(slots, dtype=np.int64)  # of ``tokens``
        self.cached = np.zeros(slots, dtype=np.int64)  # how many of them have KV entries
        # Of the weights that computed the slot's first entry; no entry is older.
        self.revision = np.full(slots, -1, dtype=np.int64)
        self.live = np.zeros(slots, dtype=bool)
        self.running: list[SlotSequence | None] = [None] * slots
        self.waiting: deque[SequenceSpec] = deque()  # oldest first

        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.max_length = np.zeros(slots, dtype=np.int64)
        self.no_stop_before = np.zeros(slots, dtype=np.int64)  # a length
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.basis = np.zeros(slots, dtype=np.int64)
        self.top_logprobs = np.zeros(slots, dtype=np.int64)

        self._freed_at = np.zeros(slots, dtype=np.int64)  # counts releases; the least is used first
        self._releases = 0
        self._arrivals = 0

    def at(self, slot: int) -> SlotSequence:
        sequence = self.running[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is free")
        return sequence

    def remove(self, keys: Iterable[int]) -> None:
        removed = set(keys)
        for sequence in self._sequences():
            if sequence.spec.key in removed:
                self.release(sequence.slot)
        if any(spec.key in removed for spec in self.waiting):
            self.waiting = deque(spec for spec in self.waiting if spec.key not in removed)

    def release(self, slot: int) -> None:
        self.running[slot] = None
        self.live[slot] = False
        self._releases += 1
        self._freed_at[slot] = self._releases

    def drop_entries(self, slots: np.ndarray | slice = slice(None)) -> None:
        """Drops KV entries: running sequences are prefilled again, free slots can give nothing."""
        self.cached[slots] = 0

    def commit(self, revision: int, max_kv_lag: int | None) -> int:
        """Drops the KV entries of sequences that must be computed again under new weights, and what
        sequences reuse that have not started; returns how many there were.
        """
        slots = [s.slot for s in self._sequences() if s.started and self.cached[s.slot]]
        chosen = sequences_to_recompute(
            self.revision[slots].tolist(), self.length[slots].tolist(), revision, max_kv_lag
        )
        kept = set(slots) - {slots[i] for i in chosen}
        dropped = [sequence for sequence in self._sequences() if sequence.slot not in kept]
        for sequence in dropped:
            sequence.started = False
            sequence.reported_routing = 0
        at = np.array([sequence.slot for sequence in dropped], dtype=np.int64)
        entries = int(self.cached[at].sum())
        self.drop_entries(at)
        return entries

    def schedule(self, prefill_tokens: int, prompt_logprob_rows: int, revision: int) -> StepPlan:
        """What the next step computes: one token of each sequence that decodes, and up to
        ``prefill_tokens`` of the others, oldest first, of which up to ``prompt_logprob_rows`` need
        logits.
        """
        self._admit(revision)
        missing = np.where(self.live, self.length - self.cached, 0)
        decoding = (missing == 1).nonzero()[0].tolist()
        prefilling = (missing > 1).nonzero()[0].tolist()
        prefilling.sort(key=lambda slot: self.at(slot).arrival)
        cached = self.cached.copy()  # entries copied in this step cannot be copied on in it
        copies, chunks = [], []
        for slot in prefilling:
            if prefill_tokens == 0:
                break
            sequence = self.at(slot)
            budget = prefill_tokens
            if sequence.wants_prompt_logprobs:
                budget = min(budget, prompt_logprob_rows)
            elif not sequence.started:
                copy, wait = self._find_prefix(sequence, cached, revision)
                if wait:
                    continue
                if copy is not None:
                    copies.append(copy)
                    self._reuse_entries(sequence, copy.tokens, revision)
            start, length = int(self.cached[slot]), int(self.length[slot])
            if length - start == 1:  # all but the last token was copied
                decoding.append(slot)
                continue
            end = min(length, start + budget)
            if end == start:
                continue
            chunks.append(PrefillChunk(slot, start, end))
            prefill_tokens -= end - start
            if sequence.wants_prompt_logprobs:
                prompt_logprob_rows -= end - start
        decoding.sort()
        for slot in (*decoding, *(c.slot for c in chunks)):
            self.at(slot).started = True
            if self.cached[slot] == 0:
                self.revision[slot] = revision
        return StepPlan(copies, np.array(decoding, dtype=np.int64), chunks)

    def logit_rows(self, plan: StepPlan) -> LogitRows:
        n = len(plan.decoding)
        if not plan.chunks:
            return LogitRows(np.arange(n), plan.decoding, np.ones(n, dtype=bool), [])
        ends = n + np.cumsum([c.end - c.start for c in plan.chunks], dtype=np.int64)
        rows = [np.arange(n), ends - 1]
        slots = [plan.decoding, np.array([c.slot for c in plan.chunks], dtype=np.int64)]
        complete = [c.end == self.length[c.slot] for c in plan.chunks]
        samples = [np.ones(n, dtype=bool), np.array(complete, dtype=bool)]
        prompts = []
        at = n + len(plan.chunks)
        for chunk, end in zip(plan.chunks, ends.tolist(), strict=True):
            sequence = self.at(chunk.slot)
            # The row of a token gives the distribution of the token after it.
            low = max(chunk.start, sequence.reported_prompt_logprobs - 1)
            high = min(chunk.end, len(sequence.spec.prompt) - 1)
            if sequence.spec.prompt_logprobs and low < high:
                rows.append(np.arange(low, high) + end - chunk.end)
                slots.append(np.full(high - low, chunk.slot))
                samples.append(np.zeros(high - low, dtype=bool))
                prompts.append((chunk.slot, slice(at, at + high - low)))
                at += high - low
        return LogitRows(
            np.concatenate(rows), np.concatenate(slots), np.concatenate(samples), prompts
        )

    def sampling_metadata(self, slots: np.ndarray) -> SamplingMetadata:
        position = self.length[slots] - self.prompt_length[slots]
        banned: tuple[list[int], list[int]] = ([], [])
        for row in (self.length[slots] < self.no_stop_before[slots]).nonzero()[0].tolist():
            stops = self.at(int(slots[row])).spec.sampling.stop_token_ids
            banned[0].extend([row] * len(stops))
            banned[1].extend(stops)
        return SamplingMetadata(
            temperature=self.temperature[slots],
            top_k=self.top_k[slots],
            top_p=self.top_p[slots],
            min_p=self.min_p[slots],
            noise_keys=SamplingNoise.keys(self.seed[slots], position),
            basis=self.basis[slots],
            banned=banned,
        )

    def next_prompt_tokens(self, slot: int, count: int) -> np.ndarray:
        """The prompt tokens whose log-probabilities are reported next."""
        start = self.at(slot).reported_prompt_logprobs
        return self.tokens[slot, start : start + count]

    def mark_computed(self, plan: StepPlan) -> None:
        self.cached[plan.decoding] = self.length[plan.decoding]
        for chunk in plan.chunks:
            self.cached[chunk.slot] = chunk.end

    def _admit(self, revision: int) -> None:
        """Gives free slots to waiting sequences, those with the same prefix by preference."""
        free = (~self.live).nonzero()[0]
        while self.waiting and len(free):
            spec = self.waiting.popleft()
            tokens = np.array([*spec.prompt, *spec.prefix], dtype=np.int64)
            slot = int(free[self._freed_at[free].argmin()])
            entries = 0
            if not spec.prompt_logprobs:
                owners = free[(self.revision[free] == revision) & (self.cached[free] > 0)]
                shared = self._shared_prefixes(tokens[:-1], owners, self.cached[owners])
                if len(shared) and shared.max() >= MIN_SHARED_TOKENS:
                    slot = int(owners[shared.argmax()])
                    entries = int(shared.max())
            sequence = self._assign(slot, spec, tokens)
            if entries:
                self._reuse_entries(sequence, entries, revision)
            free = free[free != slot]

    def _assign(self, slot: int, spec: SequenceSpec, tokens: np.ndarray) -> SlotSequence:
        sampling = spec.sampling
        prompt = len(spec.prompt)
        self._arrivals += 1
        self.live[slot] = True
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot] = len(tokens)
        self.cached[slot] = 0
        self.prompt_length[slot] = prompt
        self.max_length[slot] = min(prompt + sampling.max_new_tokens, self.context)
        self.no_stop_before[slot] = prompt + sampling.min_new_tokens
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.basis[slot] = BASES.index(spec.logprob_basis)
        self.top_logprobs[slot] = spec.top_logprobs
        sequence = self.running[slot] = SlotSequence(spec, slot, self._arrivals)
        return sequence

    def _reuse_entries(self, sequence: SlotSequence, entries: int, revision: int) -> None:
        self.cached[sequence.slot] = entries
        self.revision[sequence.slot] = revision
        if sequence.cached_prompt_tokens is not None:
            sequence.cached_prompt_tokens = min(entries, len(sequence.spec.prompt))

    def _find_prefix(
        self, sequence: SlotSequence, cached: np.ndarray, revision: int
    ) -> tuple[PrefixCopy | None, bool]:
        """A longer cached prefix of a sequence than its own slot has, to be copied; and whether to
        wait instead, since an older sequence is about to compute a still longer one.
        """
        slot = sequence.slot
        tokens = self.tokens[slot, : self.length[slot] - 1]
        pending = [
            older.slot
            for older in self._sequences()
            if older.arrival < sequence.arrival
            and self.length[older.slot] - cached[older.slot] > 1
            and (cached[older.slot] == 0 or self.revision[older.slot] == revision)
        ]
        owners = ((self.revision == revision) & (cached > 0)).nonzero()[0]
        now = self._shared_prefixes(tokens, owners, cached[owners])
        best = max(int(now.max(initial=0)), MIN_SHARED_TOKENS - 1, int(cached[slot]))
        later = self._shared_prefixes(
            tokens, np.array(pending, dtype=np.int64), self.length[pending]
        )
        if later.max(initial=0) > best:
            return None, True
        if len(now) and now.max() >= MIN_SHARED_TOKENS and now.max() > cached[slot]:
            return PrefixCopy(int(owners[now.argmax()]), slot, int(now.max())), False
        return None, False

    def _sequences(self) -> Iterator[SlotSequence]:
        return (sequence for sequence in self.running if sequence is not None)

    def _shared_prefixes(
        self, tokens: np.ndarray, slots: np.ndarray, bounds: np.ndarray
    ) -> np.ndarray:
        """How many first tokens each of ``slots`` shares with ``tokens``, up to its bound."""
        shared = np.zeros(len(slots), dtype=np.int64)
        if len(tokens) < MIN_SHARED_TOKENS or not len(slots):
            return shared
        head = self.tokens[slots, :MIN_SHARED_TOKENS] == tokens[:MIN_SHARED_TOKENS]
        for i in head.all(1).nonzero()[0].tolist():
            bound = min(int(bounds[i]), len(tokens))
            differs = self.tokens[slots[i], :bound] != tokens[:bound]
            shared[i] = int(differs.argmax()) if differs.any() else bound
        return shared

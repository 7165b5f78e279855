"""Which sequence sits in which slot of the KV cache, and what each step computes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rollwire_server.engines.embedded.batch import Chunk
from rollwire_server.engines.embedded.sampling import BASES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rollwire_server.engines.base import SequenceSpec

MIN_SHARED_TOKENS = 8
"""Shorter common prefixes are computed again: that is cheaper than copying them."""


@dataclass(slots=True)
class Running:
    """A sequence that has a slot.

    Attributes:
        slot: Its own until it ends.
        arrival: Orders sequences, oldest first.
        begun: Some of its tokens have been computed, so that it keeps the entries that it has.
        cached_prompt_tokens: Not computed but taken over, of the prompt; None once it is told.
        prompt_logprobs_told: Prompt tokens whose log-probabilities have been reported (token 0 has
            none, and counts as such).
        routing_told: Tokens whose experts have been reported.
    """

    spec: SequenceSpec
    slot: int
    arrival: int
    begun: bool = False
    cached_prompt_tokens: int | None = 0
    prompt_logprobs_told: int = 1
    routing_told: int = 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some are still to be reported."""
        return self.spec.prompt_logprobs and self.prompt_logprobs_told < len(self.spec.prompt)


@dataclass(frozen=True, slots=True)
class Copy:
    """KV entries that a slot takes from another one instead of computing them."""

    source: int
    target: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step computes.

    Attributes:
        copies: Before anything else.
        decoding: Slots of which the last token is computed, ascending.
        chunks: Runs of tokens of other slots.
    """

    copies: list[Copy]
    decoding: np.ndarray
    chunks: list[Chunk]

    @property
    def slots(self) -> list[int]:
        """Of all that it computes."""
        return [*self.decoding.tolist(), *(chunk.slot for chunk in self.chunks)]

    def halves(self) -> tuple[Plan, Plan]:
        """The same for its first slots and for the others; the result does not depend on order."""
        slots = self.slots
        at, n = len(slots) // 2, len(self.decoding)
        first = set(slots[:at])
        return (
            Plan(
                [copy for copy in self.copies if copy.target in first],
                self.decoding[:at],
                self.chunks[: max(0, at - n)],
            ),
            Plan(
                [copy for copy in self.copies if copy.target not in first],
                self.decoding[at:],
                self.chunks[max(0, at - n) :],
            ),
        )


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The batch rows that a step needs logits of.

    First the last row of each decoding slot and of each chunk, whether it samples or not: keys and
    values that are not finite show there. Then those that prompt log-probabilities come from.

    Attributes:
        rows, slots: [n].
        samples: Whether a row is its sequence's last and gives a token; [n].
        prompts: Which of the rows give prompt log-probabilities of a slot.
    """

    rows: np.ndarray
    slots: np.ndarray
    samples: np.ndarray
    prompts: list[tuple[int, slice]]

    def sampling(self, without: np.ndarray) -> np.ndarray:
        """Which of the rows sample, those of slots ``without`` left out."""
        samples = self.samples
        if len(without):
            samples = samples & ~np.isin(self.slots, without)
        return samples.nonzero()[0]


class SlotTable:
    """Slots, the sequences in them and the ones that wait; plans what each step computes.

    One row of every array is one slot. A slot that is free keeps its tokens and KV entries for
    sequences that begin alike, until another sequence needs it.

    Attributes:
        tokens: Prompt and output of each slot's sequence, [slots, context].
        length: How many of them there are.
        cached: How many of them have KV entries.
        revision: Of the weights that computed the first entry; no entry of the slot is older.
        running: The sequence in each slot, if any.
        waiting: Oldest first.
    """

    def __init__(self, slots: int, context: int) -> None:
        self.context = context
        self.tokens = np.zeros((slots, context), dtype=np.int64)
        self.length = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)
        self.revision = np.full(slots, -1, dtype=np.int64)
        self.live = np.zeros(slots, dtype=bool)
        self.running: list[Running | None] = [None] * slots
        self.waiting: deque[SequenceSpec] = deque()

        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.no_stop_before = np.zeros(slots, dtype=np.int64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.basis = np.zeros(slots, dtype=np.int64)
        self.top_logprobs = np.zeros(slots, dtype=np.int64)

        self._by_key: dict[int, int] = {}
        self._free_since = np.zeros(slots, dtype=np.int64)  # in releases; least is first to go
        self._releases = 0
        self._arrivals = 0

    def remove(self, keys: Iterable[int]) -> None:
        """Takes sequences out, running or waiting; unknown keys are ignored."""
        gone = set(keys)
        for key in gone & self._by_key.keys():
            self.release(self._by_key[key])
        if any(spec.key in gone for spec in self.waiting):
            self.waiting = deque(spec for spec in self.waiting if spec.key not in gone)

    def release(self, slot: int) -> None:
        """Frees the slot of a sequence that has ended."""
        sequence = self.at(slot)
        del self._by_key[sequence.spec.key]
        self.running[slot] = None
        self.live[slot] = False
        self._releases += 1
        self._free_since[slot] = self._releases

    def at(self, slot: int) -> Running:
        """The sequence of a slot that has one."""
        sequence = self.running[slot]
        if sequence is None:
            raise LookupError(f"slot {slot} is free")
        return sequence

    def forget(self, slots: np.ndarray | slice = slice(None)) -> None:
        """Drops KV entries: what runs is prefilled again, what is free can give nothing."""
        self.cached[slots] = 0

    def recompute(self) -> int:
        """Drops the KV entries of what runs; returns how many there were."""
        entries = int(self.cached[self.live].sum())
        self.cached[self.live] = 0
        for sequence in self._sequences():
            sequence.begun = False
            sequence.routing_told = 0
        return entries

    def keep(self) -> None:
        """Leaves the KV entries of what runs, but for those taken over by what has not begun."""
        for sequence in self._sequences():
            if not sequence.begun:
                self.cached[sequence.slot] = 0

    def plan(self, prefill_tokens: int, prompt_logprob_rows: int, revision: int) -> Plan:
        """What the next step computes under ``revision``: one token of each sequence that decodes,
        and up to ``prefill_tokens`` of those that do not yet, oldest first, of which
        ``prompt_logprob_rows`` may need logits.
        """
        self._admit(revision)
        missing = np.where(self.live, self.length - self.cached, 0)
        decoding = (missing == 1).nonzero()[0].tolist()
        prefilling = (missing > 1).nonzero()[0].tolist()
        prefilling.sort(key=lambda slot: self.at(slot).arrival)
        cached = self.cached.copy()  # a slot that is copied to in this step gives nothing yet
        copies, chunks = [], []
        for slot in prefilling:
            if prefill_tokens == 0:
                break
            sequence = self.at(slot)
            room = prefill_tokens
            if sequence.wants_prompt_logprobs:
                room = min(room, prompt_logprob_rows)
            elif not sequence.begun:
                copy, wait = self._reuse(sequence, cached, revision)
                if wait:
                    continue
                if copy is not None:
                    copies.append(copy)
                    self._take_over(sequence, copy.tokens, revision)
            start, length = int(self.cached[slot]), int(self.length[slot])
            if length - start == 1:  # all but the last token was copied
                decoding.append(slot)
                continue
            end = min(length, start + room)
            if end == start:
                continue
            chunks.append(Chunk(slot, start, end))
            prefill_tokens -= end - start
            if sequence.wants_prompt_logprobs:
                prompt_logprob_rows -= end - start
        decoding.sort()
        for slot in (*decoding, *(c.slot for c in chunks)):
            self.at(slot).begun = True
            if self.cached[slot] == 0:
                self.revision[slot] = revision
        return Plan(copies, np.array(decoding, dtype=np.int64), chunks)

    def logit_rows(self, plan: Plan) -> LogitRows:
        """Which rows of a plan's batch need logits."""
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
            # The row of a token gives the distribution of the one after it.
            low = max(chunk.start, sequence.prompt_logprobs_told - 1)
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

    def next_prompt_tokens(self, slot: int, count: int) -> np.ndarray:
        """The next prompt tokens whose log-probabilities are to be reported."""
        start = self.at(slot).prompt_logprobs_told
        return self.tokens[slot, start : start + count]

    def computed(self, plan: Plan) -> None:
        """A plan's tokens have KV entries now."""
        self.cached[plan.decoding] = self.length[plan.decoding]
        for chunk in plan.chunks:
            self.cached[chunk.slot] = chunk.end

    def _admit(self, revision: int) -> None:
        free = (~self.live).nonzero()[0]
        while self.waiting and len(free):
            spec = self.waiting.popleft()
            tokens = np.array([*spec.prompt, *spec.prefix], dtype=np.int64)
            slot = int(free[self._free_since[free].argmin()])
            entries = 0
            if not spec.prompt_logprobs:
                owners = free[(self.revision[free] == revision) & (self.cached[free] > 0)]
                shared = self._shared(tokens[:-1], owners, self.cached[owners])
                if len(shared) and shared.max() >= MIN_SHARED_TOKENS:
                    slot = int(owners[shared.argmax()])
                    entries = int(shared.max())
            sequence = self._occupy(slot, spec, tokens)
            if entries:
                self._take_over(sequence, entries, revision)
            free = free[free != slot]

    def _occupy(self, slot: int, spec: SequenceSpec, tokens: np.ndarray) -> Running:
        sampling = spec.sampling
        prompt = len(spec.prompt)
        self._arrivals += 1
        self._by_key[spec.key] = slot
        self.live[slot] = True
        self.tokens[slot, : len(tokens)] = tokens
        self.length[slot] = len(tokens)
        self.cached[slot] = 0
        self.prompt_length[slot] = prompt
        self.limit[slot] = min(prompt + sampling.max_new_tokens, self.context)
        self.no_stop_before[slot] = prompt + sampling.min_new_tokens
        self.temperature[slot] = sampling.temperature
        self.top_k[slot] = sampling.top_k
        self.top_p[slot] = sampling.top_p
        self.min_p[slot] = sampling.min_p
        self.seed[slot] = sampling.seed
        self.basis[slot] = BASES.index(spec.logprob_basis)
        self.top_logprobs[slot] = spec.top_logprobs
        sequence = self.running[slot] = Running(spec, slot, self._arrivals)
        return sequence

    def _take_over(self, sequence: Running, entries: int, revision: int) -> None:
        self.cached[sequence.slot] = entries
        self.revision[sequence.slot] = revision
        if sequence.cached_prompt_tokens is not None:
            sequence.cached_prompt_tokens = min(entries, len(sequence.spec.prompt))

    def _reuse(
        self, sequence: Running, cached: np.ndarray, revision: int
    ) -> tuple[Copy | None, bool]:
        """Entries that other slots hold of how a sequence begins, more than its own has; and
        whether to wait because an older sequence is about to compute still more of them.
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
        now = self._shared(tokens, owners, cached[owners])
        best = max(int(now.max(initial=0)), MIN_SHARED_TOKENS - 1, int(cached[slot]))
        later = self._shared(tokens, np.array(pending, dtype=np.int64), self.length[pending])
        if later.max(initial=0) > best:
            return None, True
        if len(now) and now.max() >= MIN_SHARED_TOKENS and now.max() > cached[slot]:
            return Copy(int(owners[now.argmax()]), slot, int(now.max())), False
        return None, False

    def _sequences(self) -> Iterator[Running]:
        return (sequence for sequence in self.running if sequence is not None)

    def _shared(self, tokens: np.ndarray, owners: np.ndarray, bounds: np.ndarray) -> np.ndarray:
        """How many first tokens each of the slots ``owners`` shares with ``tokens``, up to its
        bound.
        """
        shared = np.zeros(len(owners), dtype=np.int64)
        if len(tokens) < MIN_SHARED_TOKENS or not len(owners):
            return shared
        head = self.tokens[owners, :MIN_SHARED_TOKENS] == tokens[:MIN_SHARED_TOKENS]
        for i in head.all(1).nonzero()[0].tolist():
            bound = min(int(bounds[i]), len(tokens))
            differs = self.tokens[owners[i], :bound] != tokens[:bound]
            shared[i] = int(differs.argmax()) if differs.any() else bound
        return shared

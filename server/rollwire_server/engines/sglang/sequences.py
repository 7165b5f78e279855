"""The sequences of one engine: what each has, under which id SGLang knows it, what it reports."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire_server.engines.base import (
    EndReason,
    PromptLogprobs,
    SequenceEnd,
    SequenceExtras,
    SequenceSpec,
    Step,
    TopLogprobs,
)
from rollwire_server.engines.sglang.messages import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rollwire.types import WeightTag

    from rollwire_server.engines.base import RoutedExperts
    from rollwire_server.engines.sglang.messages import Chunk

SHARED_TOKENS = 64
"""A shorter prompt is computed sooner than waited for."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One that has not ended.

    Attributes:
        tokens: Output tokens, the prefix among them.
        prompt_hash: The same for those that should share their prompt.
        rid: SGLang's id for it; None while it waits to be sent.
        revision: Of the oldest key or value that it can hold: it was sent under it.
        started: It has a token since it was last sent.
        told: Whether its prompt's extras have been reported.
        passes: From which input token on which weights computed, since it was last sent.
    """

    spec: SequenceSpec
    tokens: list[int]
    prompt_hash: int
    rid: str | None = None
    revision: int = 0
    started: bool = False
    told: bool = False
    passes: list[tuple[int, WeightTag]] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens, the prompt's among them."""
        return len(self.spec.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Ending:
    """One that was given up, until SGLang ends it: how far it was by then.

    Attributes:
        tokens: Whose keys and values are there.
        revision: Of the oldest of them.
    """

    key: int
    tokens: int
    revision: int
    passes: list[tuple[int, WeightTag]]


class Sequences:
    """All that have not ended, and those that SGLang has yet to end.

    Attributes:
        context_length: No sequence gets longer.
        ending: Sequences that were given up, by SGLang's id.
    """

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.ending: dict[str, Ending] = {}
        self._live: dict[int, Sequence] = {}
        self._unsent: dict[int, Sequence] = {}
        self._sent: dict[str, Sequence] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, spec: SequenceSpec) -> None:
        """A sequence that waits to be sent."""
        worth_it = len(spec.prompt) >= SHARED_TOKENS
        prompt = hash(tuple(spec.prompt)) if worth_it else hash((spec.key, "alone"))
        self._live[spec.key] = self._unsent[spec.key] = Sequence(spec, list(spec.prefix), prompt)

    @property
    def sent(self) -> int:
        """How many SGLang has."""
        return len(self._sent)

    def next_unsent(self, revision: int) -> Sequence | None:
        """The oldest that waits to be sent, under ``revision``.

        Those of a group follow once the first of them has computed their prompt: SGLang would
        compute it in each of them.
        """
        if not self._unsent:
            return None
        sent = [s for s in self._sent.values() if s.revision == revision]
        computing = {s.prompt_hash for s in sent} - {s.prompt_hash for s in sent if s.started}
        return next((s for s in self._unsent.values() if s.prompt_hash not in computing), None)

    def send(self, sequence: Sequence, revision: int) -> Request:
        """What SGLang is to sample of a sequence from now on, under an id never used before.

        Keys and values are shared among sequences that were sent under the same revision only.
        """
        spec, sampling = sequence.spec, sequence.spec.sampling
        sequence.rid = f"{next(self._numbers):016x}"  # of one length: SGLang matches prefixes
        sequence.revision, sequence.started, sequence.passes = revision, False, []
        del self._unsent[spec.key]
        self._sent[sequence.rid] = sequence
        return Request(
            rid=sequence.rid,
            input_ids=[*spec.prompt, *sequence.tokens],
            max_new_tokens=self._limit(spec) - len(sequence.tokens),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            cache_key=f"revision {revision}",
            top_logprobs=spec.top_logprobs,
            prompt_logprobs=spec.prompt_logprobs and not sequence.told,
            routed_experts=spec.routed_experts,
        )

    def remove(self, keys: Iterable[int]) -> list[str]:
        """Gives sequences up; returns the ids that SGLang must end."""
        gone = [s for key in keys if (s := self._live.pop(key, None)) is not None]
        for sequence in gone:
            self._unsent.pop(sequence.spec.key, None)
        return [rid for s in gone if (rid := self._take_back(s)) is not None]

    def recall(self, *, started: bool) -> tuple[list[str], int]:
        """Makes sequences wait again that have no token yet, or all of them.

        Returns the ids that SGLang must end, and how many tokens are to be computed again.
        """
        recalled = [s for s in self._sent.values() if started or not s.started]
        tokens = sum(s.length for s in recalled if s.started)
        waiting = sorted([*recalled, *self._unsent.values()], key=lambda s: s.spec.key)
        self._unsent = {s.spec.key: s for s in waiting}
        return [rid for s in recalled if (rid := self._take_back(s)) is not None], tokens

    def take(self, chunks: Iterable[Chunk], weights: WeightTag) -> tuple[Step, list[str]]:
        """What chunks say, as a step; and the ids that SGLang must end because of it."""
        step = Step(weights, [], [], [])
        to_end: list[str] = []
        for chunk in chunks:
            if (sequence := self._sent.get(chunk.rid)) is None:
                self._of_ending(step, chunk, to_end)
                continue
            if chunk.ended is not None:
                del self._sent[chunk.rid]
            end = self._append(step, sequence, chunk)
            if chunk.routed_experts is not None:
                told = _by_weights(chunk.routed_experts, sequence.length - 1, sequence)
                step.extras.setdefault(sequence.spec.key, SequenceExtras()).routed_experts += told
            if end is not None:
                step.ends.append(end)
                del self._live[end.key]
                if chunk.ended is None and (rid := self._take_back(sequence)) is not None:
                    to_end.append(rid)
        if all(revision == weights.revision for revision in step.oldest_kv_revisions):
            step.oldest_kv_revisions = []
        return step, to_end

    def refuse(self, rid: str, message: str) -> SequenceEnd | None:
        """Ends one that SGLang does not take; None if it was given up meanwhile."""
        self.ending.pop(rid, None)
        if (sequence := self._sent.pop(rid, None)) is None:
            return None
        del self._live[sequence.spec.key]
        return SequenceEnd(sequence.spec.key, EndReason.STEP_FAILED, message)

    def kv_tokens(self) -> int:
        """Keys and values that are in use; what is only kept for others does not count."""
        started = sum(s.length for s in self._sent.values() if s.started)
        return started + sum(ending.tokens for ending in self.ending.values())

    def _of_ending(self, step: Step, chunk: Chunk, to_end: list[str]) -> None:
        if (ending := self.ending.get(chunk.rid)) is None:
            return
        if chunk.ended is None:
            to_end.append(chunk.rid)  # it sampled on: asked again until it ends
            return
        del self.ending[chunk.rid]
        if chunk.routed_experts is not None and ending.key in self._live:
            told = _by_weights(chunk.routed_experts, ending.tokens - 1, ending)
            step.extras.setdefault(ending.key, SequenceExtras()).routed_experts += told

    def _limit(self, spec: SequenceSpec) -> int:
        """Output tokens that a sequence may have."""
        return min(spec.sampling.max_new_tokens, self.context_length - len(spec.prompt))

    def _take_back(self, sequence: Sequence) -> str | None:
        rid, sequence.rid = sequence.rid, None
        if rid is None or self._sent.pop(rid, None) is None:
            return None
        tokens = sequence.length if sequence.started else 0
        self.ending[rid] = Ending(sequence.spec.key, tokens, sequence.revision, sequence.passes)
        return rid

    def _append(self, step: Step, sequence: Sequence, chunk: Chunk) -> SequenceEnd | None:
        """Adds a chunk to a step, up to the token that ends the sequence."""
        spec, sampling = sequence.spec, sequence.spec.sampling
        if chunk.token_ids:
            self._tell(step, sequence, chunk)
        limit = self._limit(spec)
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            if not math.isfinite(logprob):  # SGLang samples something all the same
                message = f"NaN or infinity in the logits after {sequence.length} tokens"
                return SequenceEnd(spec.key, EndReason.NOT_FINITE, message)
            if not sequence.passes or sequence.passes[-1][1] is not step.weights:
                first = sequence.length - 1 if sequence.started else 0
                sequence.passes.append((first, step.weights))
            sequence.tokens.append(token)
            sequence.started = True
            step.keys.append(spec.key)
            step.token_ids.append(token)
            step.logprobs.append(logprob)
            step.oldest_kv_revisions.append(sequence.revision)
            if token in sampling.stop_token_ids:
                return SequenceEnd(spec.key, EndReason.STOP)
            if len(sequence.tokens) >= limit:
                return SequenceEnd(spec.key, EndReason.LENGTH)
        if chunk.ended is not None:
            return SequenceEnd(
                spec.key, EndReason.STEP_FAILED, f"SGLang ended the sequence: {chunk.ended}"
            )
        return None

    def _tell(self, step: Step, sequence: Sequence, chunk: Chunk) -> None:
        """What the sequence asked for beside its tokens."""
        spec, extras = sequence.spec, SequenceExtras()
        if spec.top_logprobs:
            extras.top_logprobs = _top(spec.top_logprobs, chunk)
        if not sequence.told:
            sequence.told = True
            extras.cached_prompt_tokens = min(chunk.cached_tokens, len(spec.prompt))
            if spec.prompt_logprobs and len(spec.prompt) > 1:
                known = chunk.prompt_logprobs[: len(spec.prompt) - 1]
                extras.prompt_logprobs.append(PromptLogprobs(1, known, sequence.revision))
        if extras != SequenceExtras():
            step.extras[spec.key] = extras


def _by_weights(rows: RoutedExperts, known: int, of: Sequence | Ending) -> Iterator[RoutedExperts]:
    """The first ``known`` rows, cut where weights changed; none of what has no token."""
    passes = of.passes
    if not passes:
        return
    count = min(known, rows.num_tokens)
    width = rows.num_layers * rows.top_k * rows.bytes_per_expert
    ends = [*(start for start, _ in passes[1:]), count]
    for (start, weights), end in zip(passes, ends, strict=True):
        if start < (end := min(end, count)):
            yield replace(
                rows,
                start_position=start,
                num_tokens=end - start,
                experts=rows.experts[start * width : end * width],
                weights=weights,
                oldest_kv_revision=of.revision,
            )


def _top(k: int, chunk: Chunk) -> TopLogprobs:
    return TopLogprobs(
        k,
        [token for token_ids, _ in chunk.top for token in token_ids[:k]],
        [value for _, values in chunk.top for value in values[:k]],
    )

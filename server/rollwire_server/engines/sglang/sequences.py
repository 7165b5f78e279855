"""The engine's sequences: their tokens, their ids in SGLang, what SGLang reports of them."""

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
from rollwire_server.engines.kv_lag import sequences_to_recompute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rollwire.types import WeightTag

    from rollwire_server.engines.base import RoutedExperts

SHARED_TOKENS = 64
"""The samples of a group share a prompt of at least this length; a shorter one is soon computed."""

BESIDE_TOKENS = 4096
"""SGLang decodes nothing while it has a prompt to compute. Of the sequences that are computed again
beside the others it gets this many tokens at a time, so that others decode in between.
"""


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """One sequence for SGLang's scheduler."""

    rid: str  # SGLang's id for it; all have the same length
    spec: SequenceSpec
    input_ids: list[int]  # prompt and output so far
    max_new_tokens: int  # from the end of ``input_ids``
    cache_key: str  # only sequences of the same key share prefixes
    prompt_logprobs: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step reports of one sequence."""

    rid: str
    token_ids: list[int]  # the new ones
    logprobs: list[float]
    top: list[tuple[list[int], list[float]]]  # of each new token, if requested
    prompt_logprobs: list[float]  # of input tokens 1, 2, …; reported once
    cached_tokens: int  # input tokens whose keys and values were cached
    ended: str | None  # why it has ended, if it has; nothing follows
    routed_experts: RoutedExperts | None = None  # of all input tokens, with the end, if requested


@dataclass(slots=True, eq=False)
class SglangSequence:
    """A sequence that has not ended."""

    spec: SequenceSpec
    tokens: list[int]  # output, including the prefix
    prompt_hash: int  # equal for those that should share the keys and values of their prompt
    rid: str | None = None  # None while it waits to be sent
    revision: int = 0  # under which it was sent: the oldest of its keys and values
    started: bool = False  # whether it has a token since it was last sent
    beside: bool = False  # whether it is computed again beside others that keep their keys
    prompt_reported: bool = False
    # From which input token on which weights computed, since it was last sent.
    forward_passes: list[tuple[int, WeightTag]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.spec.prompt) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class EndingSequence:
    """A sequence that was withdrawn from SGLang, until SGLang ends it."""

    key: int
    tokens: int  # how many had keys and values
    revision: int  # of the oldest of these
    forward_passes: list[tuple[int, WeightTag]]


class SequenceTable:
    """All sequences that have not ended, and those that SGLang has yet to end."""

    def __init__(self, context_length: int) -> None:
        self.context_length = context_length
        self.ending: dict[str, EndingSequence] = {}  # by SGLang's id
        self._live: dict[int, SglangSequence] = {}
        self._unsent: dict[int, SglangSequence] = {}
        self._sent: dict[str, SglangSequence] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, spec: SequenceSpec) -> None:
        worth_it = len(spec.prompt) >= SHARED_TOKENS
        prompt = hash(tuple(spec.prompt)) if worth_it else hash((spec.key, "alone"))
        self._live[spec.key] = self._unsent[spec.key] = SglangSequence(
            spec, list(spec.prefix), prompt
        )

    @property
    def sent(self) -> int:
        return len(self._sent)

    def send_next(self, revision: int) -> SchedulerRequest | None:
        """Marks the oldest sequence that may be sent now as sent, under an id never used before.

        Of a group, the first sequence is sent alone until its prompt is computed. Otherwise SGLang
        would compute the prompt in each of them.
        """
        if not self._unsent:
            return None
        sent = [s for s in self._sent.values() if s.revision == revision]
        computing = {s.prompt_hash for s in sent} - {s.prompt_hash for s in sent if s.started}
        ready = (s for s in self._unsent.values() if s.prompt_hash not in computing)
        if (sequence := next(ready, None)) is None:
            return None
        beside = sum(s.length for s in self._sent.values() if s.beside and not s.started)
        if sequence.beside and beside and beside + sequence.length > BESIDE_TOKENS:
            return None  # nor a later one, which would take its place
        spec = sequence.spec
        sequence.rid = f"{next(self._numbers):016x}"
        sequence.revision, sequence.started, sequence.forward_passes = revision, False, []
        del self._unsent[spec.key]
        self._sent[sequence.rid] = sequence
        return SchedulerRequest(
            rid=sequence.rid,
            spec=spec,
            input_ids=[*spec.prompt, *sequence.tokens],
            max_new_tokens=self._limit(spec) - len(sequence.tokens),
            cache_key=f"revision {revision}",
            prompt_logprobs=spec.prompt_logprobs and not sequence.prompt_reported,
        )

    def remove(self, keys: Iterable[int]) -> list[str]:
        """Removes sequences; returns the ids that SGLang must end."""
        gone = [s for key in keys if (s := self._live.pop(key, None)) is not None]
        for sequence in gone:
            self._unsent.pop(sequence.spec.key, None)
        return [rid for s in gone if (rid := self._withdraw(s)) is not None]

    def requeue(self, revision: int, max_kv_lag: int | None) -> tuple[list[str], int]:
        """Withdraws sequences to be sent again under new weights: those without a token, and those
        that must be computed again.

        Returns the ids that SGLang must end, and how many tokens must be computed again.
        """
        started = [s for s in self._sent.values() if s.started]
        chosen = sequences_to_recompute(
            [s.revision for s in started], [s.length for s in started], revision, max_kv_lag
        )
        again = [started[i] for i in chosen]
        for sequence in again:
            sequence.beside = max_kv_lag != 0
        tokens = sum(s.length for s in again)
        recalled = [*again, *(s for s in self._sent.values() if not s.started)]
        waiting = sorted([*recalled, *self._unsent.values()], key=lambda s: s.spec.key)
        self._unsent = {s.spec.key: s for s in waiting}
        return [rid for s in recalled if (rid := self._withdraw(s)) is not None], tokens

    def process(
        self, outputs: Iterable[SchedulerOutput], weights: WeightTag
    ) -> tuple[Step, list[str]]:
        """Turns outputs into a step; also returns the ids that SGLang must end now."""
        step = Step(weights, [], [], [])
        to_end: list[str] = []
        for output in outputs:
            if (sequence := self._sent.get(output.rid)) is None:
                self._on_ending_output(step, output, to_end)
                continue
            if output.ended is not None:
                del self._sent[output.rid]
            end = self._append(step, sequence, output)
            if output.routed_experts is not None:
                rows = _split_by_weights(output.routed_experts, sequence.length - 1, sequence)
                step.extras.setdefault(sequence.spec.key, SequenceExtras()).routed_experts += rows
            if end is not None:
                step.ends.append(end)
                del self._live[end.key]
                if output.ended is None and (rid := self._withdraw(sequence)) is not None:
                    to_end.append(rid)
        if all(revision == weights.revision for revision in step.oldest_kv_revisions):
            step.oldest_kv_revisions = []
        return step, to_end

    def refuse(self, rid: str, message: str) -> SequenceEnd | None:
        """Ends a sequence that SGLang refused; None if it was removed meanwhile."""
        self.ending.pop(rid, None)
        if (sequence := self._sent.pop(rid, None)) is None:
            return None
        del self._live[sequence.spec.key]
        return SequenceEnd(sequence.spec.key, EndReason.STEP_FAILED, message)

    def kv_tokens(self) -> int:
        """Tokens whose keys and values are in use; cached prefixes do not count."""
        started = sum(s.length for s in self._sent.values() if s.started)
        return started + sum(ending.tokens for ending in self.ending.values())

    def _on_ending_output(self, step: Step, output: SchedulerOutput, to_end: list[str]) -> None:
        if (ending := self.ending.get(output.rid)) is None:
            return
        if output.ended is None:
            to_end.append(output.rid)  # it has sampled on: abort again until it ends
            return
        del self.ending[output.rid]
        if output.routed_experts is not None and ending.key in self._live:
            rows = _split_by_weights(output.routed_experts, ending.tokens - 1, ending)
            step.extras.setdefault(ending.key, SequenceExtras()).routed_experts += rows

    def _limit(self, spec: SequenceSpec) -> int:
        return min(spec.sampling.max_new_tokens, self.context_length - len(spec.prompt))

    def _withdraw(self, sequence: SglangSequence) -> str | None:
        rid, sequence.rid = sequence.rid, None
        if rid is None or self._sent.pop(rid, None) is None:
            return None
        tokens = sequence.length if sequence.started else 0
        self.ending[rid] = EndingSequence(
            sequence.spec.key, tokens, sequence.revision, sequence.forward_passes
        )
        return rid

    def _append(
        self, step: Step, sequence: SglangSequence, output: SchedulerOutput
    ) -> SequenceEnd | None:
        """Adds an output to a step, up to the token that ends the sequence."""
        spec, sampling = sequence.spec, sequence.spec.sampling
        if output.token_ids:
            self._add_extras(step, sequence, output)
        limit = self._limit(spec)
        for token, logprob in zip(output.token_ids, output.logprobs, strict=True):
            if not math.isfinite(logprob):  # SGLang samples a token nevertheless
                message = f"NaN or infinity in the logits after {sequence.length} tokens"
                return SequenceEnd(spec.key, EndReason.NOT_FINITE, message)
            if not sequence.forward_passes or sequence.forward_passes[-1][1] is not step.weights:
                first = sequence.length - 1 if sequence.started else 0
                sequence.forward_passes.append((first, step.weights))
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
        if output.ended is not None:
            return SequenceEnd(
                spec.key, EndReason.STEP_FAILED, f"SGLang ended the sequence: {output.ended}"
            )
        return None

    def _add_extras(self, step: Step, sequence: SglangSequence, output: SchedulerOutput) -> None:
        spec, extras = sequence.spec, SequenceExtras()
        if spec.top_logprobs:
            extras.top_logprobs = TopLogprobs(
                spec.top_logprobs,
                [token for token_ids, _ in output.top for token in token_ids[: spec.top_logprobs]],
                [value for _, values in output.top for value in values[: spec.top_logprobs]],
            )
        if not sequence.prompt_reported:
            sequence.prompt_reported = True
            extras.cached_prompt_tokens = min(output.cached_tokens, len(spec.prompt))
            if spec.prompt_logprobs and len(spec.prompt) > 1:
                known = output.prompt_logprobs[: len(spec.prompt) - 1]
                extras.prompt_logprobs.append(PromptLogprobs(1, known, sequence.revision))
        if extras != SequenceExtras():
            step.extras[spec.key] = extras


def _split_by_weights(
    rows: RoutedExperts, known: int, of: SglangSequence | EndingSequence
) -> Iterator[RoutedExperts]:
    """The first ``known`` rows, split where the weights changed; none without a token."""
    forward_passes = of.forward_passes
    if not forward_passes:
        return
    count = min(known, rows.num_tokens)
    width = rows.num_layers * rows.top_k * rows.bytes_per_expert
    ends = [*(start for start, _ in forward_passes[1:]), count]
    for (start, weights), end in zip(forward_passes, ends, strict=True):
        if start < (end := min(end, count)):
            yield replace(
                rows,
                start_position=start,
                num_tokens=end - start,
                experts=rows.experts[start * width : end * width],
                weights=weights,
                oldest_kv_revision=of.revision,
            )

"""One sequence as the server keeps it, and the cursor by which a stream reads it.

Sequences live apart from streams: the engine appends to a sequence whether or not anybody reads, a
reader takes what lies behind its cursor. So a slow reader costs no more memory than its sequence.
"""

from __future__ import annotations

import asyncio
import enum
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire_server.engines.base import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Ints

    from rollwire_server.engines.base import Extras, RoutedExperts, SequenceSpec, WeightTag
    from rollwire_server.errors import ServiceError

EXTRA_BYTES = 1 << 19  # of prompt log-probabilities and routing, a message
BYTES_A_TOP = 9
NUMBER_BYTES = 36  # a number of Python's own, and its place in a list
OWN_BYTES = 4096  # a sequence without any


class FinishReason(enum.Enum):
    """Why a sequence ended, when that is no error."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Finish:
    """A sequence's end. ``output_tokens`` counts a given prefix."""

    reason: FinishReason
    output_tokens: int
    prompt_tokens: int
    stop_token_id: int | None = None
    message: str = ""
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive output tokens, from ``start`` on, that were sampled under the same weights."""

    start: int
    weights: WeightTag
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for, checked: the engine's part, and the server's own."""

    request_id: str
    attempt: int
    spec: SequenceSpec
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    detach_grace: float = 0.0
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Prompt log-probabilities, cut to what one message takes; ``size`` in bytes."""

    logprobs: PromptLogprobs
    weights: WeightTag
    size: int

    @property
    def held_bytes(self) -> int:
        """In memory."""
        return NUMBER_BYTES * len(self.logprobs.logprobs)


@dataclass(frozen=True, slots=True)
class RoutedPart:
    """Rows of routing, cut to what one message takes, and the weights that computed them."""

    rows: RoutedExperts
    weights: WeightTag
    size: int

    @property
    def held_bytes(self) -> int:
        """In memory."""
        return self.size


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at a request, live or kept.

    Attributes:
        request: What was asked.
        tokens: Output token ids, the given prefix included.
        prefix_length: How many of them the caller brought.
        logprobs: Of the tokens after the prefix.
        runs: Which weights sampled them.
        tops: Top log-probabilities of the tokens after the prefix, a pair (ids, logprobs) each, if
            they were asked for.
        extras: Prompt log-probabilities and routing, as the engine reported them.
        end: Finish or error, once there is one; nothing is appended afterwards.
        reader: Who reads it now.
        timers: Deadlines that are running for it.
    """

    request: Request
    tokens: array[int]
    prefix_length: int
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    runs: list[Run] = field(default_factory=list)
    tops: list[tuple[list[int], list[float]]] = field(default_factory=list)
    extras: list[PromptPart | RoutedPart] = field(default_factory=list)
    cached_prompt_tokens: int = 0
    end: Finish | ServiceError | None = None
    reader: Reader | None = None
    timers: dict[str, asyncio.TimerHandle] = field(default_factory=dict)

    def append(self, token: int, logprob: float, weights: WeightTag, oldest: int) -> None:
        """Takes one sampled token."""
        runs = self.runs
        if not runs or runs[-1].weights is not weights or runs[-1].oldest_kv_revision != oldest:
            runs.append(Run(len(self.tokens), weights, oldest))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def extend(self, extras: Extras, weights: WeightTag) -> None:
        """Takes what an engine step says beside its tokens."""
        if (top := extras.top_logprobs) is not None:
            for i in range(0, len(top.token_ids), top.k):
                self.tops.append((top.token_ids[i : i + top.k], top.logprobs[i : i + top.k]))
        for told in extras.prompt_logprobs:
            self.extras += _prompt_parts(told, weights)
        for rows in extras.routed_experts:
            self.extras += _routed_parts(rows, rows.weights or weights)
        if extras.cached_prompt_tokens is not None:
            self.cached_prompt_tokens = extras.cached_prompt_tokens

    def finish(self, reason: FinishReason, message: str = "") -> Finish:
        """The Finish that this sequence has if it ends now for ``reason``."""
        stopped = reason is FinishReason.STOP
        return Finish(
            reason=reason,
            output_tokens=len(self.tokens),
            prompt_tokens=len(self.request.spec.prompt),
            stop_token_id=self.tokens[-1] if stopped else None,
            message=message,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def held_bytes(self) -> int:
        """The memory that it takes, about: what a caller can make large."""
        spec = self.request.spec
        numbers = len(spec.prompt) + len(spec.prefix) + len(spec.sampling.stop_token_ids)
        numbers += 2 * sum(len(token_ids) for token_ids, _ in self.tops)
        extras = sum(extra.held_bytes for extra in self.extras)
        return OWN_BYTES + NUMBER_BYTES * numbers + 8 * len(self.tokens) + extras

    def complete(self) -> FinishReason | None:
        """Whether the prefix alone ends the sequence, and why."""
        sampling = self.request.spec.sampling
        last = self.tokens[-1] if self.tokens else None
        if last in sampling.stop_token_ids and len(self.tokens) > sampling.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= sampling.max_new_tokens else None


@dataclass(slots=True)
class Chunk:
    """What a reader takes at once: tokens of one run, and what belongs to them.

    ``weights`` computed all of it but the routing; None where there is neither token nor prompt.
    ``end`` comes with the last chunk of a reader, which may bring no tokens.
    """

    offset: int
    token_ids: Ints[int]
    logprobs: Ints[float]
    run: Run | None
    weights: WeightTag | None
    tops: list[tuple[list[int], list[float]]]
    prompt_logprobs: list[PromptLogprobs]
    routed_experts: list[tuple[RoutedExperts, WeightTag]]
    extra_bytes: int
    end: Finish | ServiceError | None

    @property
    def has_event(self) -> bool:
        """Whether it brings more than tokens."""
        return bool(self.end is not None or self.extra_bytes)


class Outbox:
    """The readers of one stream that have something to say, in the order they got it."""

    def __init__(self) -> None:
        self._waiting: dict[Reader, None] = {}
        self._filled = asyncio.Event()

    def put(self, reader: Reader) -> None:
        """Notes that a reader has something."""
        self._waiting[reader] = None
        self._filled.set()

    def wake(self) -> None:
        """Lets ``wait`` return though there may be nothing."""
        self._filled.set()

    async def wait(self) -> None:
        """Returns when there is something, or after ``wake``."""
        await self._filled.wait()

    def take(self) -> list[Reader]:
        """The readers that have something; each is to be read until it has no more, or put back."""
        self._filled.clear()
        taken = list(self._waiting)
        self._waiting.clear()
        return taken


class Reader:
    """A stream's cursor in one sequence.

    Args:
        sequence: What it reads.
        outbox: Of its stream.
        handle: Names the sequence on that stream.
        offset: The output token that it reads first.
    """

    __slots__ = (
        "_extra", "_run", "_superseded", "cursor", "done", "handle", "outbox", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, outbox: Outbox, handle: int, offset: int) -> None:
        self.sequence = sequence
        self.outbox = outbox
        self.handle = handle
        self.cursor = offset
        self.done = False
        self._run = 0
        self._extra = 0
        self._superseded: Finish | None = None

    def supersede(self) -> None:
        """Ends this reader where it is: a newer stream reads the sequence on.

        It lets go of the sequence, so that a stream that reads late holds nothing but this end.
        """
        finish = self.sequence.finish(
            FinishReason.SUPERSEDED, "a newer stream of this request took over"
        )
        self._superseded = replace(finish, output_tokens=self.cursor)
        request = self.sequence.request
        nothing = replace(request.spec, prompt=(), prefix=())
        self.sequence = new_sequence(replace(request, spec=nothing))
        self.outbox.put(self)

    @property
    def behind(self) -> bool:
        """Whether there is something that it has not taken."""
        sequence = self.sequence
        return not self.done and (
            self.cursor < len(sequence.tokens)
            or self._extra < len(sequence.extras)
            or sequence.end is not None
            or self._superseded is not None
        )

    def next_token(self) -> Run | None:
        """Takes the next token if that is all there is; returns its run, and None otherwise.

        The usual case of a stream that keeps up, made cheap: ``next_chunk`` does all cases.
        """
        sequence = self.sequence
        if (
            self.cursor + 1 != len(sequence.tokens)
            or sequence.end is not None
            or self._extra < len(sequence.extras)
            or sequence.tops
            or self._superseded is not None
        ):
            return None
        self.cursor += 1
        self._run = len(sequence.runs) - 1
        return sequence.runs[-1]

    def next_chunk(self, most: int) -> Chunk | None:
        """What comes next, at most ``most`` tokens, or None when there is nothing now."""
        sequence, start = self.sequence, self.cursor
        if self._superseded is not None:
            return self._last_words()
        if not self.behind:
            return None
        runs, length = sequence.runs, len(sequence.tokens)
        stop, run, top_bytes = start, None, 0
        weights = self._prompt_weights()
        if start < length and weights in (None, self._next_run().weights):
            run = self._next_run()
            weights = run.weights
            stop = runs[self._run + 1].start if self._run + 1 < len(runs) else length
            if sequence.tops:
                k = len(sequence.tops[0][0])
                most = max(1, most // (1 + k))
                top_bytes = BYTES_A_TOP * k * min(stop - start, most)
            self.cursor = stop = min(stop, start + most)
        first, beyond = start - sequence.prefix_length, stop - sequence.prefix_length
        prompt_logprobs, routed_experts, extra_bytes = self._take_extras(weights)
        end = None
        if stop == length and self._extra == len(sequence.extras):
            end = sequence.end
        self.done = end is not None
        return Chunk(
            offset=start,
            token_ids=sequence.tokens[start:stop],
            logprobs=sequence.logprobs[first:beyond],
            run=run,
            weights=weights,
            tops=sequence.tops[first:beyond] if top_bytes else [],
            prompt_logprobs=prompt_logprobs,
            routed_experts=routed_experts,
            extra_bytes=extra_bytes + top_bytes,
            end=end,
        )

    def _last_words(self) -> Chunk | None:
        if self.done:
            return None
        self.done = True
        return Chunk(self.cursor, (), (), None, None, [], [], [], 0, self._superseded)

    def _next_run(self) -> Run:
        """The run of the token at the cursor, which is there."""
        runs = self.sequence.runs
        while self._run + 1 < len(runs) and runs[self._run + 1].start <= self.cursor:
            self._run += 1
        return runs[self._run]

    def _prompt_weights(self) -> WeightTag | None:
        """What computed the prompt log-probabilities that come next, if they do."""
        extras = self.sequence.extras
        extra = extras[self._extra] if self._extra < len(extras) else None
        return extra.weights if isinstance(extra, PromptPart) else None

    def _take_extras(
        self, weights: WeightTag | None
    ) -> tuple[list[PromptLogprobs], list[tuple[RoutedExperts, WeightTag]], int]:
        prompt_logprobs: list[PromptLogprobs] = []
        routed_experts: list[tuple[RoutedExperts, WeightTag]] = []
        extras, size = self.sequence.extras, 0
        while self._extra < len(extras):
            extra = extras[self._extra]
            if size and size + extra.size > EXTRA_BYTES:
                break
            if isinstance(extra, PromptPart) and extra.weights is not weights:
                break
            size += extra.size
            if isinstance(extra, RoutedPart):
                routed_experts.append((extra.rows, extra.weights))
            else:
                prompt_logprobs.append(extra.logprobs)
            self._extra += 1
        return prompt_logprobs, routed_experts, size


def _prompt_parts(told: PromptLogprobs, weights: WeightTag) -> Iterator[PromptPart]:
    most = EXTRA_BYTES // 4
    for i in range(0, len(told.logprobs), most):
        part = told.logprobs[i : i + most]
        logprobs = PromptLogprobs(told.start_position + i, part)
        yield PromptPart(logprobs, weights, 4 * len(part))


def _routed_parts(rows: RoutedExperts, weights: WeightTag) -> Iterator[RoutedPart]:
    row_bytes = rows.num_layers * rows.top_k * rows.bytes_per_expert
    most = max(1, EXTRA_BYTES // row_bytes)
    for i in range(0, rows.num_tokens, most):
        count = min(most, rows.num_tokens - i)
        part = replace(
            rows,
            start_position=rows.start_position + i,
            num_tokens=count,
            experts=rows.experts[i * row_bytes : (i + count) * row_bytes],
        )
        yield RoutedPart(part, weights, count * row_bytes)


def new_sequence(request: Request) -> Sequence:
    """A sequence with nothing sampled yet."""
    prefix = request.spec.prefix
    return Sequence(request, array("I", prefix), len(prefix))

"""One sequence as the server keeps it, and the cursors by which streams read it.

The engine appends to a sequence whether or not anybody reads it, and a stream takes what lies
behind its cursor. So a slow reader costs no more memory than its sequence.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire.deadlines import Timer
from rollwire.types import Finish, FinishReason

from rollwire_server.engines.base import PromptLogprobs, RoutedExperts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Sequence as Ints

    from rollwire.types import WeightTag

    from rollwire_server.engines.base import SequenceExtras, SequenceSpec
    from rollwire_server.errors import ServiceError

EXTRA_BYTES = 1 << 19  # of prompt log-probabilities and routing in one message
TOP_LOGPROB_BYTES = 9  # of one likely token and its log-probability in a message
NUMBER_BYTES = 36  # of a Python number and its place in a list
EMPTY_BYTES = 4096  # of a sequence without tokens

TopTokens = tuple[list[int], list[float]]  # ids and log-probabilities, likeliest first


@dataclass(frozen=True, slots=True)
class Request:
    """A validated request: the engine's part (``spec``) and the server's own, in seconds."""

    request_id: str
    attempt: int
    spec: SequenceSpec
    seed: int | None = None  # as asked; None where the server drew the one of ``spec``
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    detach_grace: float = 0.0  # that the sequence is kept without a stream
    delivery_interval: float = 0.0  # between two messages about it; 0: one each engine step
    timeout: float | None = None  # until its last token; None: the server's limit

    def needs_newer(self, version: int | None) -> bool:
        """Whether weights are too old for it; weights without a version are older than any."""
        minimum = self.min_weight_version
        return minimum is not None and (version is None or version < minimum)

    def needs_older(self, version: int | None) -> bool:
        maximum = self.max_weight_version
        return maximum is not None and version is not None and version > maximum

    def violated_bound(self, version: int | None) -> str:
        """The bound that keeps it from continuing under ``version``; "" where none does."""
        if self.needs_older(version):
            return f"beyond max_weight_version {self.max_weight_version}"
        if self.needs_newer(version):
            return f"below min_weight_version {self.min_weight_version}"
        return ""


@dataclass(frozen=True, slots=True)
class TokenSegment:
    """Consecutive output tokens, from ``start`` on, that were sampled under the same weights."""

    start: int
    weights: WeightTag
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class Extra:
    """Prompt log-probabilities or routing, cut to what one message takes."""

    value: PromptLogprobs | RoutedExperts
    weights: WeightTag
    message_bytes: int
    memory_bytes: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at a request, live or kept. Of its columns only ``tokens`` has the prefix."""

    request: Request
    tokens: array[int] = field(init=False)
    prefix_length: int = field(init=False)
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    segments: list[TokenSegment] = field(default_factory=list)
    tops: list[TopTokens] = field(default_factory=list)
    extras: list[Extra] = field(default_factory=list)
    cached_prompt_tokens: int = 0
    end: Finish | ServiceError | None = None  # nothing is appended afterwards
    cursor: Cursor | None = None  # of the stream that reads it now
    timers: dict[str, Timer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = array("I", self.request.spec.prefix)
        self.prefix_length = len(self.tokens)

    def append(self, token: int, logprob: float, weights: WeightTag, oldest: int) -> None:
        """``oldest`` is the revision of the oldest key or value that the token attended to."""
        last = self.segments[-1] if self.segments else None
        if last is None or last.weights is not weights or last.oldest_kv_revision != oldest:
            self.segments.append(TokenSegment(len(self.tokens), weights, oldest))
        self.tokens.append(token)
        self.logprobs.append(logprob)

    def add_extras(self, extras: SequenceExtras, weights: WeightTag) -> None:
        if (top := extras.top_logprobs) is not None:
            for i in range(0, len(top.token_ids), top.k):
                self.tops.append((top.token_ids[i : i + top.k], top.logprobs[i : i + top.k]))
        for logprobs in extras.prompt_logprobs:
            self.extras += _split_prompt_logprobs(logprobs, weights)
        for rows in extras.routed_experts:
            self.extras += _split_routing(rows, rows.weights or weights)
        if extras.cached_prompt_tokens is not None:
            self.cached_prompt_tokens = extras.cached_prompt_tokens

    def finish(self, reason: FinishReason, message: str = "") -> Finish:
        return Finish(
            reason=reason,
            output_tokens=len(self.tokens),
            prompt_tokens=len(self.request.spec.prompt),
            stop_token_id=self.tokens[-1] if reason is FinishReason.STOP else None,
            message=message,
            cached_prompt_tokens=self.cached_prompt_tokens,
        )

    def finish_reason_of_prefix(self) -> FinishReason | None:
        """Why the given prefix alone ends the sequence, if it does."""
        sampling = self.request.spec.sampling
        last = self.tokens[-1] if self.tokens else None
        if last in sampling.stop_token_ids and len(self.tokens) > sampling.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= sampling.max_new_tokens else None

    def memory_bytes(self) -> int:
        """About: what a caller can make large."""
        spec = self.request.spec
        numbers = len(spec.prompt) + len(spec.prefix) + len(spec.sampling.stop_token_ids)
        numbers += 2 * sum(len(token_ids) for token_ids, _ in self.tops)
        extras = sum(extra.memory_bytes for extra in self.extras)
        return EMPTY_BYTES + NUMBER_BYTES * numbers + 8 * len(self.tokens) + extras

    def start_timer(
        self, name: str, seconds: float, then: Callable[..., None], *arguments: object
    ) -> None:
        """Calls ``then`` with this sequence after ``seconds``; replaces the timer of that name."""
        self.cancel_timer(name)
        self.timers[name] = Timer(seconds, then, self, *arguments)

    def cancel_timer(self, name: str) -> None:
        if (timer := self.timers.pop(name, None)) is not None:
            timer.cancel()

    def cancel_timers(self) -> None:
        for name in list(self.timers):
            self.cancel_timer(name)


@dataclass(slots=True)
class SequenceOutput:
    """What a cursor takes at once: tokens of one segment, and what belongs to them."""

    offset: int  # of the first token, among the output tokens
    token_ids: Ints[int]
    logprobs: Ints[float]
    segment: TokenSegment | None  # of the tokens; None where there are none
    weights: WeightTag | None  # what computed all of it but the routing; None: nothing was computed
    tops: list[TopTokens]
    extras: list[Extra]
    extra_bytes: int  # of extras and tops in a message
    end: Finish | ServiceError | None  # with the last output, which may bring no tokens


class Cursor:
    """A stream's place in one sequence, which ``handle`` names on that stream."""

    __slots__ = (
        "_extra", "_segment", "delivery_interval", "done", "handle", "position", "queue",
        "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, queue: ReadyQueue, handle: int, position: int) -> None:
        self.sequence = sequence
        self.queue = queue
        self.handle = handle
        self.position = position  # of the output token that comes next
        self.delivery_interval = sequence.request.delivery_interval
        self.done = False  # whether the end was taken
        self._segment = 0  # index of the segment at or before the position
        self._extra = 0  # index of the next extra

    def supersede(self) -> None:
        """Ends this cursor where it is: a newer stream reads the rest of the sequence.

        It lets the sequence go and keeps an empty one with this end, so that a stream that is read
        late holds no tokens.
        """
        finish = self.sequence.finish(
            FinishReason.SUPERSEDED, "a newer stream of this request took over"
        )
        request = self.sequence.request
        spec = replace(request.spec, prompt=(), prefix=())
        self.sequence = Sequence(replace(request, spec=spec))
        self.sequence.end = replace(finish, output_tokens=self.position)
        self._segment = self._extra = 0
        self.queue.put(self)

    @property
    def behind(self) -> bool:
        sequence = self.sequence
        return not self.done and (
            self.position < len(sequence.tokens)
            or self._extra < len(sequence.extras)
            or sequence.end is not None
        )

    def next_token(self) -> TokenSegment | None:
        """Takes the next token if that is all there is, and returns its segment; else None.

        The usual case of a stream that keeps up, made cheap; ``next_output`` does all cases.
        """
        sequence = self.sequence
        if (
            self.position + 1 != len(sequence.tokens)
            or sequence.end is not None
            or self._extra < len(sequence.extras)
            or sequence.tops
        ):
            return None
        self.position += 1
        self._segment = len(sequence.segments) - 1
        return sequence.segments[-1]

    def next_output(self, max_tokens: int) -> SequenceOutput | None:
        """Takes what comes next, at most ``max_tokens`` tokens; None when there is nothing now."""
        if not self.behind:
            return None
        sequence, start = self.sequence, self.position
        length = len(sequence.tokens)
        segment, weights, top_bytes = None, self._prompt_weights(), 0
        # Prompt log-probabilities go with tokens of the same weights only.
        if start < length and weights in (None, self._next_segment().weights):
            segment = self._next_segment()
            weights = segment.weights
            following = sequence.segments[self._segment + 1 : self._segment + 2]
            stop = following[0].start if following else length
            if sequence.tops:
                k = len(sequence.tops[0][0])
                max_tokens = max(1, max_tokens // (1 + k))
                top_bytes = TOP_LOGPROB_BYTES * k * min(stop - start, max_tokens)
            self.position = min(stop, start + max_tokens)
        stop = self.position
        extras, extra_bytes = self._take_extras(weights)
        all_taken = stop >= length and self._extra == len(sequence.extras)
        end = sequence.end if all_taken else None
        self.done = end is not None
        sampled = slice(start - sequence.prefix_length, stop - sequence.prefix_length)
        return SequenceOutput(
            offset=start,
            token_ids=sequence.tokens[start:stop],
            logprobs=sequence.logprobs[sampled],
            segment=segment,
            weights=weights,
            tops=sequence.tops[sampled] if top_bytes else [],
            extras=extras,
            extra_bytes=extra_bytes + top_bytes,
            end=end,
        )

    def _next_segment(self) -> TokenSegment:
        segments = self.sequence.segments
        while (
            self._segment + 1 < len(segments) and segments[self._segment + 1].start <= self.position
        ):
            self._segment += 1
        return segments[self._segment]

    def _prompt_weights(self) -> WeightTag | None:
        """Of the prompt log-probabilities that come next, if they do."""
        extras = self.sequence.extras
        extra = extras[self._extra] if self._extra < len(extras) else None
        return extra.weights if extra and isinstance(extra.value, PromptLogprobs) else None

    def _take_extras(self, weights: WeightTag | None) -> tuple[list[Extra], int]:
        taken: list[Extra] = []
        size = 0
        for extra in self.sequence.extras[self._extra :]:
            if size and size + extra.message_bytes > EXTRA_BYTES:
                break
            if isinstance(extra.value, PromptLogprobs) and extra.weights is not weights:
                break
            taken.append(extra)
            size += extra.message_bytes
        self._extra += len(taken)
        return taken, size


class ReadyQueue:
    """The cursors of one stream that have something to take, in order.

    A cursor with a delivery interval is delayed. All cursors of one interval wait for the same
    moment, so that what they have goes into one message.
    """

    def __init__(self) -> None:
        self._ready: dict[Cursor, None] = {}
        self._delayed: dict[float, dict[Cursor, None]] = {}  # by interval
        self._timers: dict[float, asyncio.TimerHandle] = {}  # of each interval
        self._filled = asyncio.Event()

    def put(self, cursor: Cursor) -> None:
        if interval := cursor.delivery_interval:
            if cursor.sequence.end is None:  # an end is not delayed
                self._delay(cursor, interval)
                return
            self._delayed.get(interval, {}).pop(cursor, None)
        if not self._ready:  # else it is set already
            self._filled.set()
        self._ready[cursor] = None

    def wake(self) -> None:
        """Lets ``wait`` return though there may be nothing."""
        self._filled.set()

    async def wait(self) -> None:
        await self._filled.wait()

    def pop_all(self) -> list[Cursor]:
        """The cursors that have something; each is to be read until it has no more, or put back."""
        self._filled.clear()
        cursors = list(self._ready)
        self._ready.clear()
        return cursors

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._delayed.clear()

    def _delay(self, cursor: Cursor, interval: float) -> None:
        if interval not in self._delayed:
            self._delayed[interval] = {}
            self._timers[interval] = asyncio.get_running_loop().call_later(
                interval, self._release, interval
            )
        self._delayed[interval][cursor] = None

    def _release(self, interval: float) -> None:
        del self._timers[interval]
        self._ready |= self._delayed.pop(interval)
        self._filled.set()


def _split_prompt_logprobs(logprobs: PromptLogprobs, weights: WeightTag) -> Iterator[Extra]:
    size = EXTRA_BYTES // 4
    for i in range(0, len(logprobs.logprobs), size):
        part = logprobs.logprobs[i : i + size]
        yield Extra(
            replace(logprobs, start_position=logprobs.start_position + i, logprobs=part),
            weights,
            message_bytes=4 * len(part),
            memory_bytes=NUMBER_BYTES * len(part),
        )


def _split_routing(rows: RoutedExperts, weights: WeightTag) -> Iterator[Extra]:
    row_bytes = rows.num_layers * rows.top_k * rows.bytes_per_expert
    size = max(1, EXTRA_BYTES // row_bytes)
    for i in range(0, rows.num_tokens, size):
        count = min(size, rows.num_tokens - i)
        part = replace(
            rows,
            start_position=rows.start_position + i,
            num_tokens=count,
            experts=rows.experts[i * row_bytes : (i + count) * row_bytes],
        )
        yield Extra(part, weights, count * row_bytes, count * row_bytes)

"""How streams read sequences: each by a cursor of its own.

Sequences live apart from streams: the engine appends to a sequence whether or not anybody reads, a
reader takes what lies behind its cursor. So a slow reader costs no more memory than its sequence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollwire.types import FinishReason

from rollwire_server.sequences.sequence import EXTRA_BYTES, PromptPart, RoutedPart, new_sequence

if TYPE_CHECKING:
    from collections.abc import Sequence as Ints

    from rollwire.types import Finish, WeightTag

    from rollwire_server.engines.base import PromptLogprobs, RoutedExperts
    from rollwire_server.errors import ServiceError
    from rollwire_server.sequences.sequence import Run, Sequence

BYTES_A_TOP = 9


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


@dataclass(frozen=True, slots=True)
class _Held:
    """Readers with the same delivery interval, until their time comes."""

    readers: dict[Reader, None]
    timer: asyncio.TimerHandle


class Outbox:
    """The readers of one stream that have something to say, in the order they got it.

    A reader with a delivery interval is held back. All readers of one interval wait for the same
    moment, so that what they have goes into one message.
    """

    def __init__(self) -> None:
        self._waiting: dict[Reader, None] = {}
        self._held: dict[float, _Held] = {}  # by interval
        self._filled = asyncio.Event()

    def put(self, reader: Reader) -> None:
        """Notes that a reader has something; what has ended is not held back."""
        if reader.interval:
            if not reader.ended:
                self._hold(reader)
                return
            if (held := self._held.get(reader.interval)) is not None:
                held.readers.pop(reader, None)
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

    def close(self) -> None:
        """Lets go of what is held back: the stream is over."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()

    def _hold(self, reader: Reader) -> None:
        held = self._held.get(interval := reader.interval)
        if held is None:
            timer = asyncio.get_running_loop().call_later(interval, self._release, interval)
            held = self._held[interval] = _Held({}, timer)
        held.readers[reader] = None

    def _release(self, interval: float) -> None:
        self._waiting |= self._held.pop(interval).readers
        self._filled.set()


class Reader:
    """A stream's cursor in one sequence.

    Args:
        sequence: What it reads.
        outbox: Of its stream.
        handle: Names the sequence on that stream.
        offset: The output token that it reads first.

    Attributes:
        interval: Seconds that the outbox holds back what there is to read; 0: it does not.
    """

    __slots__ = (
        "_extra", "_run", "_superseded", "cursor", "done", "handle", "interval", "outbox",
        "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, outbox: Outbox, handle: int, offset: int) -> None:
        self.sequence = sequence
        self.outbox = outbox
        self.handle = handle
        self.cursor = offset
        self.interval = sequence.request.delivery_interval
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
    def ended(self) -> bool:
        """Whether nothing comes after what it can read now."""
        return self.sequence.end is not None or self._superseded is not None

    @property
    def behind(self) -> bool:
        """Whether there is something that it has not taken."""
        sequence = self.sequence
        return not self.done and (
            self.cursor < len(sequence.tokens) or self._extra < len(sequence.extras) or self.ended
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

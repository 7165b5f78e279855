"""One sequence as the server keeps it, whether or not anybody reads."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rollwire.patience import Timer
from rollwire.types import Finish, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollwire.types import WeightTag

    from rollwire_server.engines.base import Extras, PromptLogprobs, RoutedExperts, SequenceSpec
    from rollwire_server.errors import ServiceError
    from rollwire_server.sequences.cursor import Reader

EXTRA_BYTES = 1 << 19  # of prompt log-probabilities and routing, a message
NUMBER_BYTES = 36  # a number of Python's own, and its place in a list
OWN_BYTES = 4096  # a sequence without any


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive output tokens, from ``start`` on, that were sampled under the same weights."""

    start: int
    weights: WeightTag
    oldest_kv_revision: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for, checked: the engine's part, and the server's own.

    Attributes:
        seed: As asked; None where the server drew the one of ``spec``.
    """

    request_id: str
    attempt: int
    spec: SequenceSpec
    seed: int | None = None
    min_weight_version: int | None = None
    max_weight_version: int | None = None
    detach_grace: float = 0.0
    delivery_interval: float = 0.0
    timeout: float | None = None

    def wants_newer(self, version: int | None) -> bool:
        """Whether these weights are too old for it; an absent version is older than any."""
        least = self.min_weight_version
        return least is not None and (version is None or version < least)

    def wants_older(self, version: int | None) -> bool:
        """Whether these weights are too new for it."""
        most = self.max_weight_version
        return most is not None and version is not None and version > most


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
    timers: dict[str, Timer] = field(default_factory=dict)

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

    def arm(self, name: str, seconds: float, then: Callable[..., None], *arguments: object) -> None:
        """Calls ``then`` with this sequence in so many seconds, instead of what ``name`` did."""
        self.disarm(name)
        self.timers[name] = Timer(seconds, then, self, *arguments)

    def disarm(self, name: str) -> None:
        """Nothing is called."""
        if (timer := self.timers.pop(name, None)) is not None:
            timer.cancel()

    def complete(self) -> FinishReason | None:
        """Whether the prefix alone ends the sequence, and why."""
        sampling = self.request.spec.sampling
        last = self.tokens[-1] if self.tokens else None
        if last in sampling.stop_token_ids and len(self.tokens) > sampling.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= sampling.max_new_tokens else None


def _prompt_parts(told: PromptLogprobs, weights: WeightTag) -> Iterator[PromptPart]:
    most = EXTRA_BYTES // 4
    for i in range(0, len(told.logprobs), most):
        part = told.logprobs[i : i + most]
        logprobs = replace(told, start_position=told.start_position + i, logprobs=part)
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

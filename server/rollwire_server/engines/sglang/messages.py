"""The data between the engine and the bridge, independent of SGLang's version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollwire_server.engines.base import EngineError, RoutedExperts


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """One sequence for the scheduler.

    Attributes:
        rid: SGLang's id for it. All have the same length.
        input_ids: Prompt and prefix.
        max_new_tokens, temperature, top_p, top_k, min_p, seed: As in ``SamplingParams``, but
            max_new_tokens counts from the end of ``input_ids``.
        stop_token_ids: Where the scheduler stops by itself; empty: nowhere.
        cache_key: Only sequences of the same key share prefixes.
        top_logprobs: How many likeliest tokens to report.
        prompt_logprobs: Report those of ``input_ids``.
        routed_experts: Report the experts of all input tokens at the end.
    """

    rid: str
    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop_token_ids: frozenset[int]
    cache_key: str
    top_logprobs: int
    prompt_logprobs: bool
    routed_experts: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one step reports of one sequence.

    Attributes:
        rid: SGLang's id for it.
        token_ids, logprobs: The new ones.
        top: (token ids, log-probabilities) for each new token, if requested.
        prompt_logprobs: Of input tokens 1, 2, …; reported once.
        cached_tokens: Input tokens whose keys and values were cached.
        ended: Why the scheduler has ended the sequence, or None. Nothing follows it.
        routed_experts: Of all input tokens, reported with the end, if requested.
    """

    rid: str
    token_ids: list[int]
    logprobs: list[float]
    top: list[tuple[list[int], list[float]]]
    prompt_logprobs: list[float]
    cached_tokens: int
    ended: str | None
    routed_experts: RoutedExperts | None = None


@dataclass(frozen=True, slots=True)
class SglangInfo:
    """What a started SGLang is.

    Attributes:
        context_length: The most tokens of prompt and output together.
        kv_tokens: The capacity of its KV cache.
        own_end_tokens: Where its scheduler ends a sequence that does not ignore stops.
        processes: Ids of its processes.
        sampling_parameters: Those that neither end it nor are ignored.
        ranks: How many scheduler processes there are, each with its shard of the weights.
        routed_experts: Whether it can report them.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    own_end_tokens: frozenset[int]
    dtype: torch.dtype
    kv_tokens: int
    deterministic: bool
    logprobs_before_temperature: bool
    can_release_memory: bool
    keeps_weights_on_release: bool
    sampling_parameters: frozenset[str]
    processes: list[int]
    ranks: int
    routed_experts: bool


class OutputReceiver(Protocol):
    """Receives what a bridge reports, on the event loop, in order."""

    def on_outputs(self, outputs: Sequence[SchedulerOutput]) -> None:
        """Receives the outputs of one step."""

    def on_death(self, error: EngineError) -> None:
        """SGLang is dead or does not answer."""

"""What the engine and its bridge to SGLang say to each other, in no version's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollwire_server.engines.base import EngineError, RoutedExperts


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence for the scheduler.

    Attributes:
        rid: Its id, of the same length as all others.
        input_ids: Prompt and prefix.
        max_new_tokens, temperature, top_p, top_k, min_p, seed: As ``SamplingParams``; counted from
            the end of ``input_ids``.
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
class Chunk:
    """What one step says of one sequence.

    Attributes:
        rid: Its id.
        token_ids, logprobs: New ones.
        top: (token ids, log-probabilities) for each new token, if asked for.
        prompt_logprobs: Of input tokens 1, 2, …; once.
        cached_tokens: Input tokens whose keys and values were there already.
        ended: Why the scheduler has ended it, or None; nothing comes for it afterwards.
        routed_experts: Of all tokens that were an input, with the end, if asked for.
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
class Facts:
    """What a started SGLang is.

    Attributes:
        context_length: Longest prompt and output that it takes.
        kv_tokens: Entries of its KV cache.
        own_end_tokens: Where its scheduler ends a sequence unless it is told to ignore stops.
        processes: Ids of its processes.
        sampling_parameters: Those that neither end it nor are ignored.
        ranks: Scheduler processes, each with its part of the weights.
        routed_experts: It can report them.
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


class Receiver(Protocol):
    """Where a bridge reports, on the event loop, in order."""

    def on_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Takes what one step says."""

    def on_death(self, error: EngineError) -> None:
        """Learns that SGLang is dead or does not answer."""

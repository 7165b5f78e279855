"""Samples one token a row: seeded noise, truncation, log-probabilities.

Sums are in an order that does not depend on the batch, so neither does a row's result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rollwire.types import LogprobBasis

if TYPE_CHECKING:
    from torch import Tensor

# The increment and multipliers of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom
# Number Generators, 2014), as signed 64-bit integers where torch multiplies by them.
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x


class SamplingNoise:
    """Exponential noise, one value a token of the vocabulary, the same on every device.

    It comes from a counter-based hash of (seed, position, token id).
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        ids = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._tokens = torch.from_numpy(_mix(ids).view(np.int64)).to(device)

    @staticmethod
    def keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """One int64 a row of (seed, position after the prompt)."""
        counters = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
        return _mix(_mix(seeds + np.uint64(_GOLDEN)) ^ _mix(counters)).view(np.int64)

    def exponential(self, keys: Tensor) -> Tensor:
        """Exponential noise of rate 1 in fp32, [rows, vocab]."""
        # The smallest value wins, so the uniform number must be fine near zero: it is made as a
        # float, not in fixed point. Its sign is dropped.
        x = keys[:, None] ^ self._tokens
        x *= _signed(_MIX_1)
        x ^= x >> 27
        x *= _signed(_MIX_2)
        uniform = x.to(torch.float32).abs_().mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_()


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """How to sample each row, as ``SamplingParams`` says; arrays are [rows], on the host."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    noise_keys: np.ndarray  # from ``SamplingNoise.keys``
    basis: np.ndarray  # indices into ``BASES``
    banned: tuple[list[int], list[int]] = ([], [])  # rows, and token ids not to draw in them


BASES = (LogprobBasis.TEMPERATURE, LogprobBasis.MODEL, LogprobBasis.SAMPLED)
_TEMPERATURE, _MODEL, _SAMPLED = range(3)


def sample(
    logits: Tensor, metadata: SamplingMetadata, noise: SamplingNoise
) -> tuple[Tensor, Tensor]:
    """Draws a token for each row of fp32 ``logits`` [rows, vocab]; also returns the
    ``log_probabilities``.
    """
    # The largest score + Gumbel noise picks tokens with the probabilities of the softmax over the
    # scores that top-k, top-p and min-p leave.
    scaled = _scale(logits, metadata)
    drawn_from = _restrict(scaled, metadata)
    greedy = metadata.temperature == 0
    if greedy.all():
        token_ids = drawn_from.argmax(-1)
    else:
        keys = torch.from_numpy(metadata.noise_keys).to(logits.device)
        gumbel = noise.exponential(keys).log_()
        if greedy.any():
            gumbel[torch.from_numpy(greedy).to(logits.device)] = 0
        token_ids = torch.sub(drawn_from, gumbel, out=gumbel).argmax(-1)
    return token_ids, _log_probabilities(logits, scaled, drawn_from, metadata)


def log_probabilities(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Log-probabilities of every token in each row's basis, fp32, [rows, vocab]."""
    scaled = _scale(logits, metadata)
    drawn_from = _restrict(scaled, metadata) if (metadata.basis == _SAMPLED).any() else scaled
    return _log_probabilities(logits, scaled, drawn_from, metadata)


def _log_probabilities(
    logits: Tensor, scaled: Tensor, drawn_from: Tensor, metadata: SamplingMetadata
) -> Tensor:
    chosen = scaled
    if (model := metadata.basis == _MODEL).any():
        chosen = torch.where(_column(model, logits), logits, chosen)
    if (sampled := metadata.basis == _SAMPLED).any():
        only_best = torch.full_like(scaled, -torch.inf)
        only_best.scatter_(1, drawn_from.argmax(-1, keepdim=True), 0.0)
        greedy = _column(metadata.temperature == 0, logits)
        certain = torch.where(greedy, only_best, drawn_from)
        chosen = torch.where(_column(sampled, logits), certain, chosen)
    return chosen.log_softmax(-1)


def _scale(logits: Tensor, metadata: SamplingMetadata) -> Tensor:
    divisor = np.where(metadata.temperature == 0, 1, metadata.temperature).astype(np.float32)
    if (divisor == 1).all():
        return logits
    return logits / _column(divisor, logits)


def _restrict(scaled: Tensor, metadata: SamplingMetadata) -> Tensor:
    """The scores that are drawn from: -inf for what is banned or cut off."""
    if metadata.banned[0]:
        scaled = scaled.clone()
        scaled[metadata.banned] = -torch.inf
    ranked = (metadata.top_k > 0) | (metadata.top_p < 1)
    floored = metadata.min_p > 0
    if not ranked.any() and not floored.any():
        return scaled
    lowest = scaled.new_full((len(scaled), 1), -torch.inf)
    if ranked.any():
        index = torch.from_numpy(ranked.nonzero()[0]).to(scaled.device)
        lowest[index] = _lowest_ranked(
            scaled[index], metadata.top_k[ranked], metadata.top_p[ranked]
        )
    if floored.any():
        floor = np.log(metadata.min_p, where=floored, out=np.full(len(floored), -np.inf))
        best = scaled.amax(-1, keepdim=True)
        lowest = torch.maximum(lowest, best + _column(floor.astype(np.float32), scaled))
    return scaled.masked_fill(scaled < lowest, -torch.inf)


def _lowest_ranked(scaled: Tensor, top_k: np.ndarray, top_p: np.ndarray) -> Tensor:
    """The lowest score that is kept by top-k, then by top-p of the rest: [rows, 1]."""
    # A bound on scores rather than ranks: equal scores are kept or cut together, so nothing depends
    # on how a sort orders them.
    vocab = scaled.shape[-1]
    k = np.where(top_k == 0, vocab, np.minimum(top_k, vocab))
    scores = scaled.topk(int(k.max()), dim=-1).values
    beyond = torch.arange(scores.shape[-1], device=scaled.device) >= _column(k, scaled)
    weights = (scores - scores[:, :1]).exp_().masked_fill_(beyond, 0)
    mass = weights.cumsum(-1)
    kept = (mass - weights < _column(top_p.astype(np.float32), scaled) * mass[:, -1:]) & ~beyond
    last = kept.sum(-1, keepdim=True).sub_(1).clamp_(min=0)
    return scores.gather(1, last)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]

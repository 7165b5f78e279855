"""Attention for TRL's AsyncGRPOTrainer on a CPU, in place of a CUDA kernel."""

from __future__ import annotations

import os
import types

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.async_grpo import async_grpo_trainer, packing


def _varlen(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    *_: object,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """FlashAttention's function of sequences of different lengths: causal, without a window."""
    assert causal
    assert window_size == (-1, -1)
    out = torch.empty_like(queries)
    groups = queries.shape[1] // keys.shape[1]
    spans = zip(
        query_ends[:-1].tolist(),
        query_ends[1:].tolist(),
        key_ends[:-1].tolist(),
        key_ends[1:].tolist(),
        strict=True,
    )
    for first, last, first_key, last_key in spans:
        own, seen = last - first, last_key - first_key
        mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
        found = scaled_dot_product_attention(
            queries[first:last].transpose(0, 1)[None],
            keys[first_key:last_key].repeat_interleave(groups, 1).transpose(0, 1)[None],
            values[first_key:last_key].repeat_interleave(groups, 1).transpose(0, 1)[None],
            attn_mask=mask,
            scale=softmax_scale,
        )
        out[first:last] = found[0].transpose(0, 1)
    return out


def install() -> None:
    """Has the trainer use it, and not ask CUDA for the device's speed."""
    kernels = types.SimpleNamespace(flash_attn_varlen_func=_varlen)
    packing._flash_attn = lambda: kernels
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None

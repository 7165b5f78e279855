"""Tiny models with fixed random weights, for demonstrations and tests; they need no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _tiny() -> PreTrainedModel:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**_SHAPE, intermediate_size=172, tie_word_embeddings=True)
    return Qwen2ForCausalLM(config)


def _tiny_moe() -> PreTrainedModel:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **_SHAPE,
        intermediate_size=172,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


BUILTIN: dict[str, Callable[[], PreTrainedModel]] = {
    "builtin:tiny": _tiny,
    "builtin:tiny-moe": _tiny_moe,
}


def build(name: str) -> PreTrainedModel:
    """A built-in model in fp32 on the CPU with the weights of seed 0.

    Leaves the process's random state as it is.
    """
    # The weights are drawn here, not by transformers, so that they are the same with each of its
    # releases and whatever other threads draw meanwhile.
    with torch.random.fork_rng(devices=[]):
        model = BUILTIN[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if parameter_name.endswith("bias") else 1.0)
    return model

"""Small models as checkpoint folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path


def dense(folder: Path, *, vocab_size: int = 512, hidden_size: int = 64) -> Path:
    """A random Qwen2 of two layers with a context of 4096 tokens and no end-of-sequence token."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder

"""The policy: a small random transformer, as any checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rollwire_demo.task import LENGTH, VOCABULARY

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

INITIAL_STD = 0.05


def make_policy(seed: int) -> Any:
    """A Qwen2 causal LM in fp32 with 90 thousand random weights, drawn from ``seed``.

    The weights are drawn here, so that they do not depend on the release of transformers. The
    process's random state stays as it is.
    """
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * LENGTH + 2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # texts are short
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen2ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=INITIAL_STD, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def save_policy(model: Any, folder: Path) -> None:
    """Writes a checkpoint that ``rollwire-server --model`` takes."""
    logging.disable_progress_bar()
    model.save_pretrained(folder)


def snapshot(model: Any) -> dict[str, Tensor]:
    """The weights as they are now, in memory of their own."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def logprobs(model: Any, token_ids: Tensor, answer_length: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the last ``answer_length`` tokens, by one forward over all of them.

    Args:
        model: A causal LM.
        token_ids: [sequences, tokens], prompt and answer.
        answer_length: How many of the tokens are the answer.

    Returns:
        Of each answer token, [sequences, answer_length]; and the whole distributions,
        [sequences, answer_length, vocabulary].
    """
    answer = token_ids[:, -answer_length:]
    logits = model(input_ids=token_ids[:, :-1], logits_to_keep=answer_length).logits
    distributions = logits.float().log_softmax(-1)
    return distributions.gather(-1, answer[..., None])[..., 0], distributions

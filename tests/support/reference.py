"""What transformers itself computes, to hold engines against."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Of each token's successor, fp32, [tokens, vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].float()


def logprobs(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probabilities of the output tokens."""
    scores = logits(model, [*prompt, *output])[len(prompt) - 1 : -1] / (temperature or 1.0)
    return of_tokens(scores.log_softmax(-1), output)


def of_tokens(distribution: Tensor, tokens: Sequence[int]) -> Tensor:
    return distribution.gather(1, torch.tensor(list(tokens))[:, None])[:, 0]


def greedy(model: PreTrainedModel, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What ``generate`` makes of a prompt."""
    ids = torch.tensor([list(prompt)])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    output: list[int] = whole[0, len(prompt) :].tolist()
    return output


def routing(model: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """The experts that the routers of a mixture choose, [tokens, layers, top_k]."""
    with torch.inference_mode():
        scores = model(torch.tensor([list(tokens)]), output_router_logits=True, use_cache=False)
    top_k = model.config.num_experts_per_tok
    chosen = [layer.float().topk(top_k).indices for layer in scores.router_logits]
    return torch.stack(chosen, dim=1)


def logprobs_over_old_keys(
    old: PreTrainedModel, new: PreTrainedModel, tokens: Sequence[int], entries: int, first: int
) -> Tensor:
    """Log-probabilities of ``tokens[first:]`` under ``new``, which attends to what ``old`` computed
    of the first ``entries`` tokens.
    """
    from transformers import DynamicCache

    parameters = inspect.signature(old.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    cache = DynamicCache(config=old.config)
    ids = torch.tensor([list(tokens)])
    with torch.inference_mode():
        old(ids[:, :entries], use_cache=True, **{name: cache})
        scores = new(ids[:, entries:], use_cache=True, **{name: cache}).logits[0].float()
    return of_tokens(scores[first - 1 - entries : -1].log_softmax(-1), tokens[first:])


def changed(model: PreTrainedModel, by: float = 0.05, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of a model, tied ones once, with noise added."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + by * torch.randn(tensor.shape, generator=generator)
        for name, tensor in _tensors(model).items()
    }


def with_tensors(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> PreTrainedModel:
    """Another model of the same kind that holds ``tensors``."""
    other = type(model)(model.config).eval().requires_grad_(requires_grad=False)
    other.load_state_dict({**_tensors(model), **tensors}, strict=False)
    return other


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    return tensors

"""The policy, a small random transformer; a group-relative policy gradient; a check of labels.

As GRPO (Shao et al., DeepSeekMath, 2024): several samples of each prompt, a sample's advantage is
its reward against those of its group, and the ratio to the policy that sampled it is clipped as in
PPO (Schulman et al., 2017), with a higher upper bound (Yu et al., DAPO, 2025). That policy's
log-probabilities are those that the rollouts bring: of several versions in one sequence, as tagged.
For a worse token PPO leaves the ratio unbounded; when an older version gave it little and this one
gives it much, one token outweighs the batch, and what was learned is lost. So there it is bounded
as well (dual clip: Ye et al., Mastering Complex Control in MOBA Games, 2020).

Credit is given token by token, as in GRPO with process supervision (DeepSeekMath, section 4.1.3),
discounted to nothing: each letter of an answer is right or wrong by itself, so its token is
compared with what the rest of the group wrote at the same position, and later letters are not its
doing.

The learning rate falls with what is left to learn. Adam's steps stay as long as ever when gradients
become small, and the same step changes a sure policy more than an unsure one: with a constant rate
letters that were learned are lost again.

An entropy bonus keeps the policy trying: a letter that it is sure of, and wrong, is never put
right, as no sample of the group ever shows the right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from rollwire_demo.report import TOLERANCE, CheckResult
from rollwire_demo.task import LENGTH, VOCABULARY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rollwire_client import Trajectory
    from torch import Tensor

LEARNING_RATE = 3e-3  # at reward 0, falling linearly
LEAST_RATE = 0.3  # of it
BETAS = (0.9, 0.99)
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DUAL_CLIP = 3.0
ENTROPY_BONUS = 0.05
STD_FLOOR = 0.1  # added to a group's deviation
MINIBATCHES = 2  # optimizer steps on a batch
GRADIENT_NORM = 1.0
INITIAL_STD = 0.05  # of weights


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
    """Log-probabilities by one forward over [sequences, tokens]: of the last ``answer_length``
    tokens, and the whole distributions there.
    """
    answer = token_ids[:, -answer_length:]
    logits = model(input_ids=token_ids[:, :-1], logits_to_keep=answer_length).logits
    distributions = logits.float().log_softmax(-1)
    return distributions.gather(-1, answer[..., None])[..., 0], distributions


def advantages(rewards: Tensor) -> Tensor:
    """How much better each token did than its group at the same position, in its deviations: of
    [prompts, group, answer].
    """
    mean = rewards.mean(dim=1, keepdim=True)
    deviation = rewards.std(dim=1, keepdim=True)
    return (rewards - mean) / (deviation + STD_FLOOR)


class Trainer:
    """Improves a policy in place; ``seed`` is of the order of samples."""

    def __init__(self, model: Any, seed: int) -> None:
        self._model = model
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, token_ids: Tensor, sampled: Tensor, rewards: Tensor) -> None:
        """One pass over token ids [prompts, group, prompt + answer], and of each answer's tokens
        [prompts, group, answer] the log-probabilities that they were sampled with, and the rewards.
        """
        token_ids, sampled = token_ids.flatten(0, 1), sampled.flatten(0, 1)
        advantage = advantages(rewards).flatten(0, 1)
        left = max(1.0 - rewards.mean().item(), LEAST_RATE)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = LEARNING_RATE * left
        order = torch.randperm(len(token_ids), generator=self._generator)
        for rows in order.chunk(MINIBATCHES):
            self._optimizer.zero_grad()
            self._loss(token_ids[rows], sampled[rows], advantage[rows]).backward()  # type: ignore[no-untyped-call]  # torch's
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), GRADIENT_NORM)
            self._optimizer.step()

    def _loss(self, token_ids: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
        """Of [sequences, tokens], [sequences, answer] and [sequences, answer]."""
        current, distributions = logprobs(self._model, token_ids, sampled.shape[1])
        ratio = (current - sampled).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        gain = torch.where(advantage < 0, torch.maximum(gain, DUAL_CLIP * advantage), gain).mean()
        entropy = -(distributions.exp() * distributions).sum(-1).mean()
        return -(gain + ENTROPY_BONUS * entropy)


def check_labels(
    model: Any,
    trajectories: Sequence[Trajectory],
    weights: Mapping[int | None, Mapping[str, Tensor]],
    digests: Mapping[int | None, int],
) -> CheckResult:
    """Compares tags with what was published, by version (None is the initial checkpoint), and
    scores every token again: by a plain forward over its whole prefix, with the weights that its
    tag names. Those of the model are overwritten.
    """
    problems = [problem for t in trajectories for problem in _wrong_tags(t, weights, digests)]
    tokens, worst = 0, 0.0
    model.eval()
    versions = {version for t in trajectories for version in t.versions} & weights.keys()
    for version in versions:
        model.load_state_dict(weights[version])
        for trajectory in trajectories:
            errors = _errors(model, trajectory, version)
            if not len(errors):
                continue
            tokens += len(errors)
            error = errors.nan_to_num(torch.inf).max().item()
            worst = max(worst, error)
            if error > TOLERANCE:
                problems.append(
                    f"sequence {trajectory.request_id}: the log-probability of a token tagged "
                    f"{_named(version)} is {error:.2g} off"
                )
    return CheckResult(len(trajectories), tokens, len(versions), worst, tuple(problems))


def _wrong_tags(
    trajectory: Trajectory,
    weights: Mapping[int | None, Mapping[str, Tensor]],
    digests: Mapping[int | None, int],
) -> Iterator[str]:
    for segment in trajectory.segments:
        tag = segment.weights
        prefix = f"sequence {trajectory.request_id}: tagged {_named(tag.version)}"
        if tag.version not in weights:
            yield f"{prefix}, which was never published"
        elif digests.get(tag.version, tag.digest) != tag.digest:
            yield (
                f"{prefix} with digest {tag.digest:016x}; {digests[tag.version]:016x} was published"
            )
        if segment.oldest_kv_revision != tag.revision:
            yield (
                f"{prefix}, revision {tag.revision}, but read keys and values of revision "
                f"{segment.oldest_kv_revision}"
            )


@torch.no_grad()
def _errors(model: Any, trajectory: Trajectory, version: int | None) -> Tensor:
    """Of the trajectory's tokens of this version, which the model has."""
    chosen = torch.tensor([v == version for v in trajectory.versions], dtype=torch.bool)
    if not chosen.any():
        return torch.empty(0)
    token_ids = torch.tensor([trajectory.prompt_ids + trajectory.token_ids])
    scored, _ = logprobs(model, token_ids, len(trajectory.token_ids))
    return (scored[0] - torch.tensor(trajectory.logprobs)).abs()[chosen]


def _named(version: int | None) -> str:
    return "as the initial checkpoint" if version is None else f"version {version}"

"""The algorithm: who gets credit, and how a policy follows it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rollwire_demo.trainer import (
    CLIP_HIGH,
    DUAL_CLIP,
    STD_FLOOR,
    Trainer,
    advantages,
    logprobs,
    make_policy,
    snapshot,
)
from torch import Tensor

PROMPTS, GROUP, PROMPT, ANSWER = 2, 4, 3, 5


@pytest.fixture
def policy() -> Any:
    torch.set_num_threads(1)
    return make_policy(0)


def test_advantage_is_the_reward_against_the_group_at_the_same_position() -> None:
    rewards = torch.zeros(1, 4, 3)
    rewards[0, 0, 0] = 1.0  # one of the group has the first token right
    rewards[0, :, 1] = 1.0  # all have the second
    advantage = advantages(rewards)
    scale = 0.5 + STD_FLOOR  # 0.5 is the deviation of 1, 0, 0, 0
    assert advantage[0, :, 0].tolist() == pytest.approx([0.75 / scale, *[-0.25 / scale] * 3])
    assert torch.count_nonzero(advantage[0, :, 1:]) == 0


def test_groups_do_not_see_each_other() -> None:
    rewards = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0))
    together = advantages(rewards)
    for prompt in range(3):
        assert torch.equal(together[prompt], advantages(rewards[prompt : prompt + 1])[0])
    assert together.mean(dim=1).abs().max() < 1e-6


def sampled(policy: Any) -> tuple[Tensor, Tensor]:
    """Token ids, and their log-probabilities under ``policy``."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, 26, (PROMPTS, GROUP, PROMPT + ANSWER), generator=generator)
    with torch.no_grad():
        scored, _ = logprobs(policy, token_ids.flatten(0, 1), ANSWER)
    return token_ids, scored.view(PROMPTS, GROUP, ANSWER)


def rewarding_the_first(shape: torch.Size) -> Tensor:
    rewards = torch.zeros(shape)
    rewards[:, 0] = 1.0
    return rewards


def test_a_step_makes_the_better_sample_likelier_and_the_others_less_so(policy: Any) -> None:
    token_ids, before = sampled(policy)
    trainer = Trainer(policy, seed=0)
    for _ in range(5):
        trainer.step(token_ids, before, rewarding_the_first(before.shape))
    _, after = sampled(policy)
    change = (after - before).mean(dim=(0, 2))
    assert change[0] > 0.1
    assert change[1:].max() < 0


def test_a_token_that_is_much_likelier_than_when_it_was_sampled_gets_no_more(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollwire_demo.trainer.ENTROPY_BONUS", 0.0)
    token_ids, now = sampled(policy)
    then = now.clone()
    then[:, 0] -= 2 * CLIP_HIGH  # the better one, sampled by an older policy
    then[:, 1:] += 1.0  # the others were likelier then
    before = snapshot(policy)
    Trainer(policy, seed=0).step(token_ids, then, rewarding_the_first(now.shape))
    after = snapshot(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_seed_makes_a_policy() -> None:
    one, same, other = (snapshot(make_policy(seed)) for seed in (7, 7, 8))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_a_worse_token_of_a_far_older_policy_does_not_outweigh_the_rest(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollwire_demo.trainer.ENTROPY_BONUS", 0.0)
    token_ids, now = sampled(policy)
    then = now - 2 * math.log(DUAL_CLIP)  # all are far likelier now: the ratio is beyond the bound
    before = snapshot(policy)
    Trainer(policy, seed=0).step(token_ids, then, rewarding_the_first(now.shape))
    after = snapshot(policy)
    assert all(torch.equal(before[name], after[name]) for name in before)

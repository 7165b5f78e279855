from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.types import LogprobBasis
from rollwire_server.engines.base import EndReason, EngineError
from support import reference
from support.engines import prompts, spec

if TYPE_CHECKING:
    from support.engines import Driver
    from transformers import PreTrainedModel

LENGTHS = (1, 2, 7, 16, 17, 47, 48, 49, 130)


async def test_greedy_output_is_what_transformers_generates(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    asked = [spec(prompt, 5 + 3 * i, temperature=0.0) for i, prompt in enumerate(prompts(*LENGTHS))]
    for one, sampled in zip(asked, await driver.sample(*asked), strict=True):
        new_tokens = one.sampling.max_new_tokens
        assert sampled.token_ids == reference.greedy(tiny, one.prompt, new_tokens)
        expected = reference.logprobs(tiny, one.prompt, sampled.token_ids)
        torch.testing.assert_close(torch.tensor(sampled.logprobs), expected, atol=1e-5, rtol=0)
        assert sampled.reason is EndReason.LENGTH


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("basis", LogprobBasis)
async def test_logprobs_are_of_the_basis_that_was_asked_for(
    driver: Driver, tiny: PreTrainedModel, basis: LogprobBasis, temperature: float
) -> None:
    (prompt,) = prompts(20)
    (sampled,) = await driver.sample(
        spec(
            prompt,
            seed=3,
            temperature=temperature,
            top_k=40,
            logprob_basis=basis,
            top_logprobs=5,
            prompt_logprobs=True,
        )
    )
    tokens = sampled.token_ids
    scores = reference.logits(tiny, [*prompt, *tokens[:-1]])
    if basis is not LogprobBasis.MODEL:
        scores = scores / (temperature or 1.0)
    if basis is LogprobBasis.SAMPLED:
        kept = 1 if temperature == 0 else 40
        scores = scores.masked_fill(scores < scores.topk(kept).values[:, -1:], -torch.inf)
    distribution = scores.log_softmax(-1)

    of_all = reference.of_tokens(distribution, [*prompt[1:], *tokens])
    got = torch.tensor([*sampled.prompt_logprobs, *sampled.logprobs])
    torch.testing.assert_close(got, of_all, atol=1e-5, rtol=0)
    top = [extras.top_logprobs for extras, _ in sampled.extras if extras.top_logprobs]
    assert len(top) == len(tokens)
    expected = distribution[len(prompt) - 1 :].topk(5).values
    got = torch.tensor([t.logprobs for t in top])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    for row, (told, token) in enumerate(zip(top, tokens, strict=True)):
        assert (told.k, len(told.token_ids)) == (5, 5)
        assert (token in told.token_ids) == (
            distribution[len(prompt) - 1 + row, token] >= min(told.logprobs) - 1e-6
        )


async def test_prompt_logprobs_of_a_chunked_prompt_come_once(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    asked = [spec(p, 3, prompt_logprobs=True) for p in prompts(1, 2, 100, 49, seed=5)]
    for one, sampled in zip(asked, await driver.sample(*asked), strict=True):
        expected = reference.logprobs(tiny, one.prompt[:1], one.prompt[1:])
        got = torch.tensor(sampled.prompt_logprobs)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


async def test_a_stop_token_ends_a_sequence_also_as_the_last_one_allowed(
    driver: Driver, tiny: PreTrainedModel
) -> None:
    (prompt,) = prompts(9)
    output = reference.greedy(tiny, prompt, 12)
    at = max(i for i in range(12) if output[i] not in output[:i])
    stop = frozenset({output[at]})
    one, last = await driver.sample(
        spec(prompt, 50, temperature=0.0, stop_token_ids=stop),
        spec(prompt, at + 1, temperature=0.0, stop_token_ids=stop),
    )
    assert one.token_ids == last.token_ids == output[: at + 1]
    assert one.reason is last.reason is EndReason.STOP


async def test_stop_tokens_are_not_drawn_before_min_new_tokens(driver: Driver) -> None:
    everything = frozenset(range(1, 512))
    (prompt,) = prompts(9)
    whole = spec(prompt, 30, seed=1, stop_token_ids=everything, min_new_tokens=6)
    resumed = spec(
        prompt, 30, seed=1, stop_token_ids=everything, min_new_tokens=6, prefix=[0, 0, 0]
    )
    first, second = await driver.sample(whole, resumed)
    assert first.token_ids[:6] == [0] * 6
    assert len(first.token_ids) == 7
    assert [0, 0, 0, *second.token_ids] == first.token_ids
    assert first.reason is EndReason.STOP


async def test_the_budget_counts_the_prefix_and_the_context_ends_a_sequence(
    driver: Driver,
) -> None:
    short, long = prompts(5, 4090)
    resumed, cut = await driver.sample(
        spec(short, 10, prefix=[1, 2, 3]), spec(long, 1000, temperature=0.0)
    )
    assert (len(resumed.token_ids), resumed.reason) == (7, EndReason.LENGTH)
    assert (len(cut.token_ids), cut.reason) == (6, EndReason.LENGTH)


async def test_what_can_never_run_is_refused(driver: Driver) -> None:
    for prompt in ([], [1] * 4096):
        with pytest.raises(EngineError, match="cannot be sampled"):
            driver.engine.submit(spec(prompt))


async def test_a_group_computes_its_prompt_once(driver: Driver) -> None:
    (prompt,) = prompts(100)
    group = await driver.sample(*(spec(prompt, 8, seed=i) for i in range(9)))
    assert [s.cached_prompt_tokens for s in group] == [0] + [99] * 8
    assert len({tuple(s.token_ids) for s in group}) == 9

    await driver.commit({})
    (later,) = await driver.sample(spec(prompt, 8, seed=0))
    assert later.cached_prompt_tokens == 0
    assert later.token_ids == group[0].token_ids
    assert later.logprobs == group[0].logprobs


async def test_a_conversation_goes_on_from_what_is_cached(driver: Driver) -> None:
    (prompt,) = prompts(30)
    (first,) = await driver.sample(spec(prompt, 20, seed=1))
    turn = [*prompt, *first.token_ids, *prompts(10, seed=9)[0]]
    (second,) = await driver.sample(spec(turn, 5))
    assert second.cached_prompt_tokens == 49  # the last sampled token was never an input


async def test_waiting_sequences_start_in_the_order_they_came(driver: Driver) -> None:
    asked = [spec(p, 6) for p in prompts(*[20] * 12)]
    await driver.sample(*asked)
    order = list(dict.fromkeys(key for step in driver.recorder.steps for key in step.keys))
    assert order == [one.key for one in asked]


async def test_a_long_prompt_does_not_stop_what_decodes(driver: Driver) -> None:
    short, long = prompts(4, 1000)
    (fast,) = driver.submit(spec(short, 200))
    await driver.tokens(5, fast)
    (slow,) = driver.submit(spec(long, 1))
    await driver.ended(fast, slow)
    keys = [step.keys for step in driver.recorder.steps]
    first = next(i for i, step in enumerate(driver.recorder.steps) if len(step.keys) == 2)
    assert math.ceil(1000 / 48) <= first
    assert all(len(k) == 1 for k in keys[:first])


@pytest.mark.parametrize("min_p", [0.0, 0.02])
async def test_drawn_tokens_follow_the_distribution(
    driver: Driver, tiny: PreTrainedModel, min_p: float
) -> None:
    (prompt,) = prompts(12)
    n = 600
    p = (reference.logits(tiny, prompt)[-1] / 0.3).softmax(-1)
    p = p.masked_fill(p < min_p * p.max(), 0)
    p /= p.sum()
    group = await driver.sample(
        *(spec(prompt, 1, temperature=0.3, min_p=min_p, seed=i) for i in range(n))
    )
    counts = torch.bincount(torch.tensor([s.token_ids[0] for s in group]), minlength=512)
    assert counts[p == 0].sum() == 0

    # Tokens of like probability, in bins that are drawn from about equally often.
    order = p.argsort(descending=True)
    bins = (p[order].cumsum(0) * 12).floor().long().clamp(max=11)
    observed = torch.zeros(12).index_add_(0, bins, counts[order].float())
    expected = torch.zeros(12).index_add_(0, bins, p[order] * n)
    used = expected > 5
    assert used.sum() > 6
    chi2 = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    assert chi2 < 12 + 4 * math.sqrt(2 * 12)

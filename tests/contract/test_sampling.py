"""What is drawn, and which log-probabilities are told, against the model computed by itself."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from rollwire.v1 import rollout_pb2
from rollwire_server.engines.embedded.checkpoint import build
from support.calls import generate, reason_of, request
from support.publishing import publish
from support.reference import changed, logits, of_tokens, with_tensors

if TYPE_CHECKING:
    from support.calls import Api, Output
    from torch import Tensor
    from transformers import PreTrainedModel

PROMPT = tuple(range(40, 60))
BASES = ["TEMPERATURE", "MODEL", "SAMPLED"]


@pytest_asyncio.fixture
async def policy(api: Api) -> PreTrainedModel:
    """The weights that the server serves, as a model of this process."""
    model = build("builtin:tiny")
    tensors = changed(model, by=0.2)
    await publish(api, tensors)
    return with_tensors(model, tensors)


def scores(policy: PreTrainedModel, output: Output) -> Tensor:
    """The logits that each output token was drawn from, [tokens, vocab]."""
    return logits(policy, [*PROMPT, *output.tokens])[len(PROMPT) - 1 : -1]


def kept(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The distribution after truncation: top-k, then top-p, then min-p, renormalized."""
    likely = (row.double() / temperature).softmax(-1)
    order = likely.argsort(descending=True)
    if top_k:
        likely[order[top_k:]] = 0
        likely /= likely.sum()
    before = likely[order].cumsum(-1) - likely[order]
    likely[order[before >= top_p]] = 0
    likely[likely < min_p * likely.max()] = 0
    return likely / likely.sum()


TRUNCATIONS = [(1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.3, 0.0), (0, 1.0, 0.4), (50, 0.8, 0.1)]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), TRUNCATIONS)
async def test_only_what_truncation_leaves_is_drawn(
    api: Api, policy: PreTrainedModel, top_k: int, top_p: float, min_p: float
) -> None:
    sampling = {"temperature": 1.5, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    basis = rollout_pb2.LOGPROB_BASIS_SAMPLED
    told = basis in (await api.info()).logprob_bases
    output = await generate(
        api, request(PROMPT, 80, seed=3, logprob_basis=basis if told else 0, **sampling)
    )
    for row, token, logprob in zip(
        scores(policy, output), output.tokens, output.logprobs, strict=True
    ):
        likely = float(kept(row, 1.5, top_k, top_p, min_p)[token])
        assert likely > 0
        assert not told or logprob == pytest.approx(math.log(likely), abs=1e-4)
    assert len(set(output.tokens)) > (0 if top_k == 1 else 3)


async def test_top_1_is_greedy(api: Api, policy: PreTrainedModel) -> None:
    greedy = await generate(api, request(PROMPT, 20, temperature=0))
    assert greedy.tokens == scores(policy, greedy).argmax(-1).tolist()
    assert (await generate(api, request(PROMPT, 20, top_k=1, seed=1))).tokens == greedy.tokens


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.7])
@pytest.mark.parametrize("name", BASES)
async def test_logprobs_are_of_the_basis_that_was_asked_for(
    api: Api, policy: PreTrainedModel, name: str, temperature: float, near: float
) -> None:
    basis = rollout_pb2.LogprobBasis.Value(f"LOGPROB_BASIS_{name}")
    asked = request(
        PROMPT, 30, seed=5, temperature=temperature, logprob_basis=basis, top_logprobs=4,
        prompt_logprobs=True,
    )  # fmt: skip
    if basis not in (await api.info()).logprob_bases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, asked)
        assert reason_of(caught.value) == "UNSUPPORTED_LOGPROB_BASIS"
        return
    output = await generate(api, asked)
    divided = 1.0 if name == "MODEL" or not temperature else temperature
    whole = (logits(policy, [*PROMPT, *output.tokens]) / divided).log_softmax(-1)
    prompt, sampled = whole[: len(PROMPT) - 1], whole[len(PROMPT) - 1 : -1]
    if name == "SAMPLED" and not temperature:  # it had no choice
        assert output.logprobs == [0.0] * 30
        return
    assert output.prompt_logprobs == pytest.approx(of_tokens(prompt, PROMPT[1:]).tolist(), abs=near)
    assert output.logprobs == pytest.approx(of_tokens(sampled, output.tokens).tolist(), abs=near)
    for row, (ids, logprobs) in zip(sampled, output.top, strict=True):
        assert logprobs == pytest.approx(row.topk(4).values.tolist(), abs=near)
        assert logprobs == pytest.approx(row[ids].tolist(), abs=near)


async def test_the_temperature_is_what_draws(api: Api, policy: PreTrainedModel) -> None:
    """Over many first tokens, the mean log-probability is the one that the model expects."""
    for temperature in (0.5, 1.0, 2.0):
        row = (logits(policy, PROMPT)[-1] / temperature).log_softmax(-1)
        expected = float((row.exp() * row).sum())
        spread = float((row.exp() * (row - expected) ** 2).sum()) ** 0.5
        outputs = await asyncio.gather(
            *(
                generate(api, request(PROMPT, 1, temperature=temperature, seed=seed))
                for seed in range(200)
            )
        )
        mean = sum(output.logprobs[0] for output in outputs) / len(outputs)
        assert abs(mean - expected) < 4 * spread / len(outputs) ** 0.5


async def test_a_stop_token_at_the_very_cut(api: Api) -> None:
    """A sequence that is interrupted right before its stop token, at it, and one later."""
    free = await generate(api, request(PROMPT, 40, seed=6))
    stop = free.tokens[20]
    at = free.tokens.index(stop)
    for cut in (at - 1, at, at + 1):
        rest = await generate(
            api, request(PROMPT, 40, seed=6, stop_token_ids=[stop], prefix=free.tokens[:cut])
        )
        assert free.tokens[:cut] + rest.tokens == free.tokens[: at + 1]
        assert rest.reason == "STOP"
        assert rest.finish is not None
        assert rest.finish.stop_token_id == stop


async def test_min_new_tokens_counts_what_came_before_an_interruption(api: Api) -> None:
    free = await generate(api, request(PROMPT, 12, seed=7))
    asked = {"seed": 7, "stop_token_ids": [free.tokens[0]], "min_new_tokens": 6}
    whole = await generate(api, request(PROMPT, 12, **asked))
    assert free.tokens[0] not in whole.tokens[:6]
    for cut in (1, 5, 6):
        rest = await generate(api, request(PROMPT, 12, prefix=whole.tokens[:cut], **asked))
        assert whole.tokens[:cut] + rest.tokens == whole.tokens
        assert rest.reason == whole.reason

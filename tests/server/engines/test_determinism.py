"""Sequences are equal token for token, and bit for bit in log-probability, whatever happens."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from support.engines import prompts, running, spec

if TYPE_CHECKING:
    from rollwire_server.engines.base import SequenceSpec
    from support.engines import Driver, Sampled

MODELS = ["builtin:tiny", "builtin:tiny-moe"]


def sequences(seed: int) -> list[SequenceSpec]:
    """Many kinds of sequences, some of which begin alike."""
    choose = random.Random(seed)
    shared, *others = prompts(60, *choose.choices([1, 3, 20, 70, 560], k=14), seed=seed)
    return [
        spec(
            [*shared[: choose.randrange(5, 60)], *other] if i % 3 == 0 else other,
            choose.choice([5, 20, 40]),
            seed=choose.getrandbits(64),
            temperature=choose.choice([0.0, 0.7, 1.0, 1.3]),
            top_k=choose.choice([0, 0, 20]),
            top_p=choose.choice([1.0, 0.9]),
            min_p=choose.choice([0.0, 0.02]),
        )
        for i, other in enumerate(others)
    ]


def again(one: SequenceSpec, prefix: list[int] | None = None) -> SequenceSpec:
    return spec(
        one.prompt,
        prefix=prefix or [],
        **{name: getattr(one.sampling, name) for name in one.sampling.__slots__},
    )


def results(sampled: list[Sampled]) -> list[tuple[list[int], list[float]]]:
    return [(s.token_ids, s.logprobs) for s in sampled]


def engine(model: str, slots: int, prefill_tokens: int) -> EmbeddedEngine:
    return EmbeddedEngine(
        EmbeddedConfig(
            model, device="cpu", max_running_sequences=slots, prefill_tokens=prefill_tokens
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
async def test_the_batch_does_not_matter(model: str) -> None:
    asked = sequences(0)
    async with running(engine(model, 64, 2048)) as driver:
        assert driver.engine.describe().deterministic
        together = results(await driver.sample(*asked))
    async with running(engine(model, 3, 29)) as driver:
        crowded = results(await driver.sample(*map(again, asked)))
    async with running(engine(model, 1, 500)) as driver:
        alone = results(await driver.sample(*map(again, asked)))
    assert together == crowded
    assert together == alone


@pytest.mark.parametrize("model", MODELS)
async def test_interruptions_do_not_matter(model: str) -> None:
    asked = sequences(1)
    choose = random.Random(1)
    async with running(engine(model, 64, 2048)) as driver:
        whole = results(await driver.sample(*asked))
    async with running(engine(model, 8, 100)) as driver:
        cuts = [choose.randrange(len(tokens)) for tokens, _ in whole]
        resumed = [
            again(one, tokens[:cut])
            for one, (tokens, _), cut in zip(asked, whole, cuts, strict=True)
        ]
        rest = results(await driver.sample(*resumed))
    expected = [
        (tokens[cut:], logprobs[cut:]) for (tokens, logprobs), cut in zip(whole, cuts, strict=True)
    ]
    assert rest == expected


async def test_commits_of_the_same_weights_and_holds_do_not_matter() -> None:
    asked = sequences(2)
    async with running(engine("builtin:tiny", 8, 1024)) as driver:
        whole = results(await driver.sample(*asked))
        sampled = driver.submit(*map(again, asked))
        while any(s.end is None for s in sampled):
            await driver.commit({})
            steps = len(driver.recorder.steps) + 12
            await driver.recorder.until(
                lambda steps=steps: (  # type: ignore[misc] # mypy knows no default here
                    len(driver.recorder.steps) >= steps or all(s.end is not None for s in sampled)
                )
            )
        # How many commits fit in depends on the machine; that a sequence met several does not.
        assert max(len(set(s.revisions)) for s in sampled) > 1
        assert results(sampled) == whole


async def test_several_threads_promise_nothing() -> None:
    config = EmbeddedConfig("builtin:tiny", device="cpu", max_running_sequences=4, threads=2)
    async with running(EmbeddedEngine(config)) as driver:
        assert not driver.engine.describe().deterministic
        (got,) = await driver.sample(spec(prompts(20)[0], 5))
        assert len(got.token_ids) == 5


async def test_seeds_and_positions_differ(driver: Driver) -> None:
    (prompt,) = prompts(8)
    one, same, other = await driver.sample(
        spec(prompt, 40, seed=1), spec(prompt, 40, seed=1), spec(prompt, 40, seed=2)
    )
    assert one.token_ids == same.token_ids
    assert one.token_ids != other.token_ids
    assert len(set(one.token_ids)) > 20

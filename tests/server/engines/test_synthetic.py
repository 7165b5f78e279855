"""The synthetic engine, by itself; tests/contract runs it behind the API."""

from __future__ import annotations

import math
import re
import time
from dataclasses import fields

import pytest
import torch
from pydantic import ValidationError
from rollwire_server.engines.synthetic import SyntheticConfig, SyntheticEngine
from rollwire_server.settings import ServerSettings
from support.engines import Driver, running, spec


def engine(**settings: float) -> SyntheticEngine:
    return SyntheticEngine(SyntheticConfig("none", **settings))  # type: ignore[arg-type]


async def seconds(driver: Driver, count: int, tokens: int) -> float:
    began = time.monotonic()
    sampled = await driver.sample(*(spec([1], tokens, seed=i) for i in range(count)))
    assert [len(s.token_ids) for s in sampled] == [tokens] * count
    return time.monotonic() - began


async def test_the_rate_is_that_of_each_sequence() -> None:
    async with running(engine(tokens_per_second=200)) as driver:
        for count in (1, 32):
            assert await seconds(driver, count, 40) >= 39 / 200


async def test_tokens_follow_from_seed_position_and_weights() -> None:
    async with running(engine(tokens_per_second=0)) as driver:
        (whole,) = await driver.sample(spec([1, 2], 30, seed=7))
        (rest,) = await driver.sample(spec([1, 2], 30, seed=7, prefix=whole.token_ids[:11]))
        assert whole.token_ids[:11] + rest.token_ids == whole.token_ids
        assert whole.logprobs == [-math.log(512)] * 30
        (other,) = await driver.sample(spec([1, 2], 30, seed=8))
        assert other.token_ids != whole.token_ids
        await driver.commit({"weight": torch.ones(1024)})
        (after,) = await driver.sample(spec([1, 2], 30, seed=7))
        assert after.token_ids != whole.token_ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens_per_second": -1.0},
        {"tokens_per_second": math.nan},
        {"vocab_size": 1},
        {"weight_bytes": 6},
    ],
)
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        engine(**wrong)


def test_the_help_names_its_settings() -> None:
    told = ServerSettings.model_fields["engine_arg"].description or ""
    names = re.findall(r"[a-z]+(?:-[a-z]+)+", told.partition("synthetic: ")[2])
    own = [field.name for field in fields(SyntheticConfig)][3:]
    assert [name.replace("-", "_") for name in names] == own

"""The embedded engine on a CUDA device, held against transformers on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.types import SleepingWeights
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_transport import Manifest, tensor_digest
from support import reference
from support.deltas import commit, own_tensors, prepare, snapshot_of
from support.engines import prompts, running, spec
from support.publishing import changed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollwire_server.engines.base import SequenceSpec
    from rollwire_server.engines.embedded.weights import Staging
    from support.engines import Driver
    from transformers import PreTrainedModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

LENGTHS = (1, 7, 16, 47, 130)


def config(model: str = "builtin:tiny", dtype: str = "auto") -> EmbeddedConfig:
    return EmbeddedConfig(
        model, dtype=dtype, device="cuda", max_running_sequences=4, prefill_tokens=48
    )


@pytest.fixture
async def gpu() -> AsyncIterator[Driver]:
    async with running(EmbeddedEngine(config())) as started:
        yield started


@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
async def test_logprobs_are_those_of_transformers(
    model: str, request: pytest.FixtureRequest
) -> None:
    own: PreTrainedModel = request.getfixturevalue(model)
    async with running(EmbeddedEngine(config(f"builtin:{model.replace('_', '-')}"))) as driver:
        assert not driver.engine.describe().deterministic
        asked = [spec(p, 20, seed=i, prompt_logprobs=True) for i, p in enumerate(prompts(*LENGTHS))]
        for one, got in zip(asked, await driver.sample(*asked), strict=True):
            values = torch.tensor([*got.prompt_logprobs, *got.logprobs])
            tokens = [*one.prompt[1:], *got.token_ids]
            expected = reference.logprobs(own, one.prompt[:1], tokens)
            torch.testing.assert_close(values, expected, atol=1e-4, rtol=0)


async def test_seeds_draw_what_they_draw_on_a_cpu(gpu: Driver) -> None:
    def asked() -> list[SequenceSpec]:
        return [spec(p, 30, seed=i, top_p=0.9) for i, p in enumerate(prompts(*LENGTHS))]

    there = await gpu.sample(*asked())
    async with running(EmbeddedEngine(EmbeddedConfig("builtin:tiny", device="cpu"))) as cpu:
        here = await cpu.sample(*asked())
    same = [a.token_ids == b.token_ids for a, b in zip(here, there, strict=True)]
    assert sum(same) >= len(same) - 1  # near-ties of floating point


@pytest.mark.parametrize("staging", ["auto", "device", "host"])
async def test_updates_wait_where_they_were_asked_to(
    tiny: PreTrainedModel, staging: Staging
) -> None:
    tensors = reference.changed(tiny)
    async with running(EmbeddedEngine(replace(config(), staging=staging))) as driver:
        schema = driver.engine.schema()
        staged = await driver.engine.stage(Manifest(tuple(schema), ()))
        on_host = staging == "host"
        assert {t.device.type for t in staged.values()} == {"cpu" if on_host else "cuda"}
        assert all(t.is_pinned() == on_host for t in staged.values())
        info = driver.engine.describe()
        assert info.staging == ("host" if on_host else "device")
        assert info.staging_bytes == sum(t.nbytes for t in staged.values())
        await driver.commit(tensors)
        assert await driver.engine.digests() == {
            spec.name: tensor_digest(spec, tensors[spec.name])
            for spec in schema
            if spec.alias_of is None
        }


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize(("model", "dtype"), [("tiny", "float32"), ("tiny-moe", "bfloat16")])
async def test_deltas_are_put_in_place_while_sequences_are_sampled(
    model: str, dtype: str, staging: Staging
) -> None:
    own = own_tensors(f"builtin:{model}")
    old = {name: tensor.to(getattr(torch, dtype)) for name, tensor in own.items()}
    started = replace(config(f"builtin:{model}", dtype), staging=staging)
    async with running(EmbeddedEngine(started)) as driver:
        assert driver.engine.describe().deltas
        sampled = driver.submit(*(spec(p, 1000, seed=1) for p in prompts(3, 9)))
        held = []
        for seed in range(8):
            new = changed(old, seed, (0.01, 0.2, 1.0)[seed % 3])
            snapshot = snapshot_of(old, new)
            await driver.tokens(len(sampled[0].token_ids) + 3, *sampled)
            staged, delta = await prepare(driver, snapshot)
            on_host = staging == "host"
            assert {t.device.type for t in staged.values()} == {"cpu" if on_host else "cuda"}
            assert delta.digests == snapshot.digests
            await commit(driver, staged, delta)
            assert await driver.engine.digests() == snapshot.digests
            old = new
            del staged, delta
            held.append(torch.cuda.memory_allocated())
        await driver.ended(*sampled)
        assert set(range(8)) <= set(sampled[0].revisions)
        assert max(held[3:]) - min(held[3:]) < 1 << 20


@pytest.mark.parametrize("max_kv_lag", [None, 0])
async def test_updates(gpu: Driver, tiny: PreTrainedModel, max_kv_lag: int | None) -> None:
    tensors = reference.changed(tiny)
    new = reference.with_tensors(tiny, tensors)
    (prompt,) = prompts(60)
    (got,) = gpu.submit(spec(prompt, 200, seed=1))
    await gpu.tokens(9, got)
    await gpu.commit(tensors, max_kv_lag)
    await gpu.ended(got)
    before = got.revisions.count(0)
    assert 0 < before < 200
    tokens, first = [*prompt, *got.token_ids], len(prompt) + before
    entries = first - 1 if max_kv_lag is None else 0
    if entries:
        expected = reference.logprobs_over_old_keys(tiny, new, tokens, entries, first)
    else:
        expected = reference.logprobs(new, prompt, got.token_ids)[before:]
    torch.testing.assert_close(torch.tensor(got.logprobs[before:]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("how", SleepingWeights)
async def test_sleep_frees_what_it_says(gpu: Driver, how: SleepingWeights) -> None:
    (prompt,) = prompts(30)
    (before,) = await gpu.sample(spec(prompt, seed=1))
    digests = await gpu.engine.digests()
    held = torch.cuda.memory_allocated()
    freed = await gpu.engine.sleep(how)
    assert held - torch.cuda.memory_allocated() == pytest.approx(freed, rel=0.05)
    cache = 2 * 2 * 4 * 4096 * 32 * 4  # layers, K and V, slots, tokens, dim, bytes
    weights = 4 * sum(math.prod(s.shape) for s in gpu.engine.schema() if s.alias_of is None)
    assert freed == cache + (0 if how is SleepingWeights.KEEP else weights)
    await gpu.engine.wake(reload_checkpoint=how is SleepingWeights.DISCARD)
    assert await gpu.engine.digests() == digests
    (after,) = await gpu.sample(spec(prompt, seed=1))
    assert after.token_ids == before.token_ids
    torch.testing.assert_close(torch.tensor(after.logprobs), torch.tensor(before.logprobs))


async def test_bfloat16(tiny: PreTrainedModel) -> None:
    async with running(EmbeddedEngine(config(dtype="bfloat16"))) as driver:
        asked = [spec(p, 20, seed=i) for i, p in enumerate(prompts(*LENGTHS))]
        for one, got in zip(asked, await driver.sample(*asked), strict=True):
            expected = reference.logprobs(tiny, one.prompt, got.token_ids)
            torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=0.1, rtol=0)

"""Deltas in the memory of the embedded engine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.types import SleepingWeights
from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_server.engines.embedded.checkpoint import build
from rollwire_server.engines.embedded.weights import ModelWeights
from rollwire_transport import ManifestError, describe_all, packed_nbytes, tensor_digests
from support.deltas import commit, own_tensors, prepare, snapshot_of, stage
from support.engines import prompts, running, spec
from support.publishing import changed

if TYPE_CHECKING:
    from support.engines import Driver
    from torch import Tensor


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["builtin:tiny", "builtin:tiny-moe"])
async def test_it_changes_what_has_changed_while_sequences_are_sampled(
    model: str, dtype: str
) -> None:
    policies = [{name: t.to(getattr(torch, dtype)) for name, t in own_tensors(model).items()}]
    for seed in range(3):
        policies.append(changed(policies[-1], seed))
    steps = [(old, snapshot_of(old, new)) for old, new in itertools.pairwise(policies)]
    config = EmbeddedConfig(model, dtype=dtype, device="cpu", max_running_sequences=4)
    async with running(EmbeddedEngine(config)) as driver:
        assert driver.engine.describe().deltas
        sampled = driver.submit(*(spec(p, 4000, seed=1) for p in prompts(3, 9)))
        for old, snapshot in steps:
            await driver.tokens(len(sampled[0].token_ids) + 3, *sampled)
            staged, delta = await prepare(driver, snapshot)
            assert await driver.engine.digests() == tensor_digests(describe_all(old), old)
            assert delta.digests == snapshot.digests
            await commit(driver, staged, delta)
            assert await driver.engine.digests() == snapshot.digests
        await driver.tokens(len(sampled[0].token_ids) + 3, *sampled)
        assert sampled[0].revisions == sorted(sampled[0].revisions)
        assert set(sampled[0].revisions) == {0, 1, 2, 3}


async def test_what_is_staged_is_as_large_as_what_is_sent(driver: Driver) -> None:
    old = own_tensors()
    delta = snapshot_of(old, changed(old, 1)).delta
    assert delta is not None
    staged = await driver.engine.stage(delta.manifest)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in staged.values()}
    allocated = sum(storage.nbytes() for storage in storages.values())
    assert allocated == packed_nbytes(describe_all(staged))
    assert allocated <= delta.nbytes + 64 * len(delta.manifest.buckets)
    assert delta.nbytes < sum(t.nbytes for t in old.values()) / 10


async def test_memory_that_has_lost_a_bit_is_noticed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = own_tensors()
    snapshot = snapshot_of(old, changed(old, 2, share=0.3))
    before = await driver.engine.digests()
    serving: list[Tensor] = []
    target = ModelWeights._target
    monkeypatch.setattr(
        ModelWeights, "_target", lambda self, name: serving.append(t := target(self, name)) or t
    )
    assert snapshot.delta is not None
    staged = await stage(driver, snapshot.delta)
    assert serving
    for tensor in serving:
        tensor.view(torch.int32).view(-1)[:20] ^= 1 << 20  # some of these words change
    delta = await driver.engine.prepare_delta(snapshot.delta.manifest, staged, before)
    assert delta.digests != snapshot.digests


@pytest.mark.parametrize("how", ["commit", "delta", "discard", "reload"])
async def test_it_is_not_put_over_weights_that_have_changed_since(driver: Driver, how: str) -> None:
    old = own_tensors()
    staged, delta = await prepare(driver, snapshot_of(old, changed(old, 3)))
    if how == "commit":
        await driver.commit({"model.norm.weight": old["model.norm.weight"] * 2})
    elif how == "delta":
        await commit(driver, *await prepare(driver, snapshot_of(old, changed(old, 4))))
    else:
        await driver.engine.sleep(SleepingWeights.DISCARD)
        await driver.engine.wake(reload_checkpoint=how == "reload")
    holds = await driver.engine.digests()
    with pytest.raises(EngineError, match="have changed since the delta was prepared"):
        await commit(driver, staged, delta)
    assert await driver.engine.digests() == holds


async def test_no_delta_is_prepared_of_weights_that_are_not_there(driver: Driver) -> None:
    old = own_tensors()
    delta = snapshot_of(old, changed(old, 5)).delta
    assert delta is not None
    staged = await driver.engine.stage(delta.manifest)
    await driver.engine.sleep(SleepingWeights.DISCARD)
    with pytest.raises(EngineError, match="wake the engine up first"):
        await driver.engine.prepare_delta(delta.manifest, staged, {})
    with pytest.raises(EngineError, match="wake the engine up first"):
        await driver.engine.stage(delta.manifest)


async def test_what_is_no_delta_is_refused_and_nothing_has_changed(driver: Driver) -> None:
    old = own_tensors()
    delta = snapshot_of(old, changed(old, 6)).delta
    assert delta is not None
    staged = await driver.engine.stage(delta.manifest)
    for tensor in staged.values():
        tensor.fill_(255)
    before = await driver.engine.digests()
    with pytest.raises(ManifestError, match="not the delta of a bucket"):
        await driver.engine.prepare_delta(delta.manifest, staged, before)
    assert await driver.engine.digests() == before


async def test_an_engine_whose_tensors_do_not_lie_as_they_are_sent_takes_none() -> None:
    model = build("builtin:tiny").eval().requires_grad_(requires_grad=False)
    assert ModelWeights(model).takes_deltas
    layer = model.model.layers[0].self_attn.o_proj
    layer.weight.data = layer.weight.data.T.contiguous().T
    assert not ModelWeights(model).takes_deltas

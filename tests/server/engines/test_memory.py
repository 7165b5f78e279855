from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire.types import SleepingWeights
from rollwire_server.engines.base import EngineError, NoMemoryError
from rollwire_server.engines.embedded.weights import ModelWeights
from rollwire_transport import Manifest
from support.engines import prompts, spec, staged_update

if TYPE_CHECKING:
    from support.engines import Driver

CACHE_BYTES = 2 * 2 * 4 * 4096 * 32 * 4  # layers, K and V, slots, tokens, dim, bytes an element


@pytest.mark.parametrize("how", [SleepingWeights.KEEP, SleepingWeights.HOST_BACKUP])
async def test_sleep_frees_the_cache_and_wakes_up_the_same(
    driver: Driver, how: SleepingWeights
) -> None:
    (prompt,) = prompts(20)
    (before,) = await driver.sample(spec(prompt, seed=1))
    digests = await driver.engine.digests()
    freed = await driver.engine.sleep(how)
    assert freed == CACHE_BYTES
    assert await driver.engine.sleep(how) == 0
    await driver.engine.wake(reload_checkpoint=False)
    await driver.engine.wake(reload_checkpoint=False)
    (after,) = await driver.sample(spec(prompt, seed=1))
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.cached_prompt_tokens == 0
    assert await driver.engine.digests() == digests


async def test_discarded_weights_come_back_with_the_checkpoint(driver: Driver) -> None:
    (prompt,) = prompts(20)
    (before,) = await driver.sample(spec(prompt, seed=1))
    digests = await driver.engine.digests()
    schema = driver.engine.schema()
    weights = 4 * sum(math.prod(s.shape) for s in schema if s.alias_of is None)
    assert await driver.engine.sleep(SleepingWeights.DISCARD) == CACHE_BYTES + weights
    with pytest.raises(EngineError, match="wake the engine up first"):
        await driver.engine.digests()
    with pytest.raises(EngineError, match="wake the engine up first"):
        await driver.engine.stage(Manifest(tuple(schema), ()))
    assert driver.engine.schema() == schema
    await driver.engine.wake(reload_checkpoint=True)
    (after,) = await driver.sample(spec(prompt, seed=1))
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert await driver.engine.digests() == digests


async def test_discarded_weights_come_back_with_a_full_update(driver: Driver) -> None:
    (prompt,) = prompts(20)
    (before,) = await driver.sample(spec(prompt, seed=1))
    kept = await driver.engine.stage(Manifest(tuple(driver.engine.schema()), ()))
    from rollwire_server.engines.embedded.checkpoint import build

    model = build("builtin:tiny").state_dict()
    for name, tensor in kept.items():
        tensor.copy_(model[name])
    await driver.engine.sleep(SleepingWeights.DISCARD)
    await driver.engine.wake(reload_checkpoint=False)
    await driver.engine.hold()
    name = "model.norm.weight"
    with pytest.raises(EngineError, match="send a full one"):
        await driver.engine.commit(staged_update({name: kept[name]}), driver.tag, max_kv_lag=None)
    await driver.engine.commit(staged_update(kept), driver.tag, max_kv_lag=None)
    await driver.engine.release()
    (after,) = await driver.sample(spec(prompt, seed=1))
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), NoMemoryError),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error"), EngineError),
        (RuntimeError("The size of tensor a must match"), RuntimeError),
    ],
)
async def test_a_device_that_is_full_or_fails_is_told_from_a_bug(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: type[Exception]
) -> None:
    def fails(_: ModelWeights) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(ModelWeights, "digests", fails)
        with pytest.raises(kind, match=str(error)) as caught:
            await driver.engine.digests()
    assert type(caught.value) is kind
    assert await driver.engine.digests()


async def test_an_engine_with_sequences_does_not_sleep(driver: Driver) -> None:
    (live,) = driver.submit(spec(prompts(5)[0], 30))
    await driver.engine.hold()
    with pytest.raises(EngineError, match="sequences are live"):
        await driver.engine.sleep(SleepingWeights.KEEP)
    await driver.engine.release()
    await driver.ended(live)

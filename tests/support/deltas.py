"""Deltas of the embedded engine's built-in models, by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rollwire.types import WeightTag
from rollwire_server.engines.base import StagedUpdate
from rollwire_server.engines.embedded.checkpoint import build, checkpoint_tensors
from rollwire_transport import PublishedCopy, describe_all, plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_server.engines.base import PreparedDelta
    from rollwire_transport import Delta, Snapshot
    from torch import Tensor

    from support.engines import Driver

CPU = torch.device("cpu")


def own_tensors(model: str = "builtin:tiny") -> dict[str, Tensor]:
    """The tensors of a built-in model, aliases left out."""
    tensors = checkpoint_tensors(build(model))
    return {s.name: tensors[s.name] for s in describe_all(tensors) if s.alias_of is None}


def snapshot_of(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Snapshot:
    """The new tensors, with a delta of many buckets."""
    manifest = plan(describe_all(old), bucket_bytes=4096)
    copy = PublishedCopy(CPU)
    copy.take(manifest, old.items, device=CPU)
    return copy.take(manifest, new.items, device=CPU)


async def stage(driver: Driver, delta: Delta) -> dict[str, Tensor]:
    staged = dict(await driver.engine.stage(delta.manifest))
    assert len(staged) == len(delta.manifest.buckets)
    for name, tensor in staged.items():
        part = delta.tensors[name]
        tensor.copy_(part if isinstance(part, torch.Tensor) else part())
    return staged


async def prepare(driver: Driver, snapshot: Snapshot) -> tuple[dict[str, Tensor], PreparedDelta]:
    assert snapshot.delta is not None
    staged, before = await stage(driver, snapshot.delta), await driver.engine.digests()
    return staged, await driver.engine.prepare_delta(snapshot.delta.manifest, staged, before)


async def commit(driver: Driver, staged: Mapping[str, Tensor], delta: PreparedDelta) -> None:
    """Under the next revision; the engine is held meanwhile."""
    tag = WeightTag(1, driver.tag.revision + 1, driver.tag.server_id, 7)
    await driver.engine.hold()
    try:
        await driver.engine.commit(StagedUpdate(staged, delta.digests, delta), tag, None)
    finally:
        await driver.engine.release()
    driver.tag = tag

"""A trainer that steps before the release: its servers keep the policy that they have, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import TensorsChangedError
from support.calls import connected
from support.fleets import policy, published, publisher
from support.publishing import no_update, status

if TYPE_CHECKING:
    from support.fleets import Servers


@pytest.mark.parametrize("fused", [False, True])
async def test_a_step_before_the_release_is_committed_nowhere(
    three: Servers, *, fused: bool
) -> None:
    old, lost, new = (three.next_version() for _ in range(3))
    async with three.fleet() as fleet:
        trainer = publisher(fleet, delta=False)
        before = await published(trainer, old)
        tensors = await policy(trainer, lost)
        learner = torch.optim.AdamW([t.requires_grad_() for t in tensors.values()], fused=fused)
        for tensor in tensors.values():
            tensor.grad = torch.ones_like(tensor)
        handle = await trainer.publish(lost, tensors)
        learner.step()
        with pytest.raises(TensorsChangedError, match="the servers keep the weights they have"):
            await handle.released
        for server in three.all:
            async with connected(server.address) as api:
                await no_update(api)
                told = await status(api, verify=True)
            assert told.intact
            assert (told.weights.version, told.weights.digest) == (old, before.digest)
        handle = await trainer.publish(lost, tensors)
        await handle.released
        learner.step()
        report = await handle.committed
        assert report.failed == ()
        assert {server.weights.digest for server in report.servers} == {report.digest}
        await published(trainer, new)

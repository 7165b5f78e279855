"""A callable that merges an adapter in place and gives the policy backwards, to real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from support.calls import connected
from support.fleets import policy, published, publisher
from support.publishing import status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fleets import Servers
    from torch import Tensor


GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
async def test_servers_take_any_order_and_the_adapter_is_unmerged(
    three: Servers, device: str
) -> None:
    first, part = three.next_version(), three.next_version()
    async with three.fleet() as fleet:
        trainer = publisher(fleet)
        weights = await policy(trainer, first)
        tensors = {name: tensor.to(device) for name, tensor in weights.items()}
        by_name = await published(trainer, first)
        adapted = [name for name in tensors if name.endswith("q_proj.weight")]
        before = {name: tensors[name].clone() for name in adapted}

        def merged(names: list[str]) -> Iterator[tuple[str, Tensor]]:
            for name in adapted:
                tensors[name].mul_(2)  # exact, and so is its undoing
            yield from ((name, tensors[name]) for name in names)
            for name in adapted:
                tensors[name].div_(2)

        for names, partial, version in (([*tensors][::-1], False, part), (adapted, True, None)):
            report = await trainer.publish_and_wait(
                version, lambda names=names: merged(names), partial=partial
            )
            assert all(torch.equal(tensors[name], before[name]) for name in adapted)
            assert report.digest != by_name.digest
            for server in three.all:
                async with connected(server.address) as api:
                    told = await status(api, verify=True)
                assert told.intact
                if not partial:
                    assert told.weights.digest == report.digest
        again = await trainer.publish_and_wait(
            three.next_version(), lambda: iter([*tensors.items()][::-1])
        )
        assert again.digest == by_name.digest  # whatever the order

"""What the ranks of a sharded trainer do where rank 0 keeps a copy of the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from client.publishing import holds
from client.ranks.support import NAMES, Source, errors, on_all, trainer
from client.scripted_weights import policy

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import Tensor


@pytest.mark.parametrize("lazy", [False, True])
async def test_they_iterate_once_whatever_fails_and_are_released_when_the_copy_is_there(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, *, lazy: bool
) -> None:
    async with trainer(monkeypatch, group, accept_deltas=True) as (servers, publisher, ranks):
        for version, bucket in ((1, 4), (2, 0)):
            servers[1].stop_receiving_at = bucket
            sources = [Source(lazy=lazy) for _ in ranks]
            handle, *others = await on_all(ranks, publisher, sources, version)
            assert others == [None, None]
            report = await handle.committed
            assert report.failed == ()
            assert all(holds(server) for server in servers)
            assert [source.taken for source in sources] == [NAMES] * 3
            assert [source.called for source in sources] == [NAMES if lazy else []] * 3
        assert report.encodings == ("delta",)
        assert len(servers[1].joins) == 3


@pytest.mark.parametrize("fault", ["changes", "raises"])
async def test_a_rank_that_fails_while_they_copy_ends_the_publish_before_it_is_announced(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, fault: str
) -> None:
    def failing() -> Iterator[tuple[str, Tensor]]:
        tensors = policy()
        for name in NAMES:
            yield name, tensors[name]
            if name == "layer.weight":
                if fault == "raises":
                    raise ZeroDivisionError("as scripted")
                tensors["embed.weight"].zero_()

    async with trainer(monkeypatch, group, accept_deltas=True) as (servers, publisher, ranks):
        handle, *_ = await on_all(ranks, publisher, [Source() for _ in ranks])
        assert (await handle.committed).failed == ()
        sources = [Source(), failing, Source()]
        first, second, third = errors(await on_all(ranks, publisher, sources, 2))
        if fault == "changes":
            assert first.startswith("TensorsChangedError: rank 1: embed.weight changed in place")
            assert second.startswith("TensorsChangedError: embed.weight changed in place")
        else:
            assert "rank 1 failed: ZeroDivisionError" in first
            assert "ZeroDivisionError" in second
        assert third.startswith("PublishError: rank 0 did not publish: ")
        assert [server.announced for server in servers] == [1, 1]
        handle, *_ = await on_all(ranks, publisher, [Source() for _ in ranks], 3)
        assert (await handle.committed).failed == ()
        assert all(holds(server) for server in servers)

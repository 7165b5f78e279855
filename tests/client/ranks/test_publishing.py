"""The ranks of a sharded trainer publish together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
import torch
from client.publishing import holds
from client.ranks.support import NAMES, Source, errors, on_all, trainer
from client.scripted_weights import policy
from rollwire_client import PublishInProgressError, Ranks

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import Tensor


async def test_what_a_sharded_trainer_gathers_is_cast(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    def masters() -> Iterator[tuple[str, Tensor]]:
        for name in NAMES:
            yield name, lambda name=name: policy()[name].double()

    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        handle, *others = await on_all(ranks, publisher, [masters for _ in ranks])
        assert others == [None, None]
        report = await handle.committed
        assert [cast.source for cast in report.casts] == ["float64", "float64"]
        assert all(holds(server) for server in servers)


@pytest.mark.parametrize("equal", [True, False])
async def test_ranks_gather_what_is_tied_on_the_servers_only(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, *, equal: bool
) -> None:
    def lazy(name: str) -> Tensor:
        return policy()[name] if equal or name != "head.weight" else torch.ones(16, 8)

    def source() -> Iterator[tuple[str, Tensor]]:
        for name in [*NAMES, "head.weight"]:
            yield name, lambda name=name: lazy(name)

    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        outcomes = await on_all(ranks, publisher, [source for _ in ranks])
        if equal:
            await outcomes[0].committed
            assert all(holds(server) for server in servers)
        else:
            assert all("head.weight is tied to embed.weight" in told for told in errors(outcomes))
            assert [server.commits for server in servers] == [[], []]


async def test_all_iterate_and_learn_of_the_release(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        for version in (1, 2):
            sources = [Source() for _ in ranks]
            handle, *others = await on_all(ranks, publisher, sources, version)
            assert others == [None, None]
            report = await handle.committed
            assert report.failed == ()
            assert [server.weights.version for server in servers] == [version] * 2
            assert all(holds(server) for server in servers)
            assert [source.taken for source in sources] == [NAMES] * 3


@pytest.mark.parametrize("partial", [False, True])
async def test_all_sources_are_run_to_their_ends_and_may_change_their_tensors_there(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, *, partial: bool
) -> None:
    ended: list[int] = []
    names = NAMES[:0:-1] if partial else NAMES[::-1]

    def source(rank: int) -> Iterator[tuple[str, Tensor]]:
        tensors = policy()
        for name in names:
            yield name, (lambda name=name: tensors[name]) if name == names[-1] else tensors[name]
        for tensor in tensors.values():
            tensor.zero_()
        ended.append(rank)

    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        for version in (1, 2):
            handle, *others = await asyncio.gather(
                *(
                    one.publish(
                        publisher, version, lambda rank=one.rank: source(rank), partial=partial
                    )
                    for one in ranks
                )
            )
            assert others == [None, None]
            assert (await handle.committed).failed == ()
            for server in servers:
                assert set(server.committed) == set(names)
                assert all(torch.equal(server.committed[n], policy()[n]) for n in names)
            assert sorted(ended) == sorted([0, 1, 2] * version)


async def test_after_a_failure_all_iterate_again_and_functions_are_called_if_needed(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        servers[1].stop_receiving_at = 6  # of layer.bias; those before were received
        sources = [Source(lazy=True) for _ in ranks]
        handle, *_ = await on_all(ranks, publisher, sources)
        assert (await handle.committed).failed == ()
        assert all(holds(server) for server in servers)
        for source in sources:
            assert source.taken == NAMES * 2
            assert source.called.count("embed.weight") == 1
            assert source.called[-1] == "layer.bias"
        assert sources[0].called == sources[1].called == sources[2].called


async def test_one_publish_at_a_time(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        first = asyncio.create_task(ranks[1].publish(None, 1, Source()))
        await asyncio.sleep(0)
        with pytest.raises(PublishInProgressError):
            await ranks[1].publish(None, 1, Source())
        handle = await ranks[0].publish(publisher, 1, Source())
        await first
        await handle.committed


async def test_nothing_to_catch_up_with_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        handle, _ = await on_all(ranks, publisher, [Source(), Source()])
        await handle.committed
        sources = [Source(), Source()]
        report, nothing = await asyncio.gather(
            *(one.catch_up(publisher, source) for one, source in zip(ranks, sources, strict=True))
        )
        assert (report.version, report.servers, nothing) == (1, (), None)
        assert [source.taken for source in sources] == [[], []]


async def test_the_default_group_is_never_taken_silently(group: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"torch\.distributed\.group\.WORLD"):
        Ranks(None)

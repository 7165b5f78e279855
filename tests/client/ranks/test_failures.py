"""What ends the publish of a sharded trainer, as each of its ranks is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest
from client.ranks.support import NAMES, Source, errors, on_all, tcp_pair, trainer
from client.scripted import until
from client.scripted_weights import policy
from rollwire_client import PublishError, SourceError
from rollwire_client._publishing.sharded.connection import Connection, Message
from rollwire_client._publishing.sharded.coordination import Participant

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch.distributed as dist
    from torch import Tensor


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
async def test_a_rank_that_raises_ends_it_for_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, error: type[BaseException]
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        sources = [Source() for _ in ranks]
        sources[2].raises_at, sources[2].error = "layer.weight", error
        over = threading.Event()

        def waits_for_rank_2() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in sources[0]():
                if name == "layer.weight":
                    over.wait(60)
                yield name, tensor

        running = asyncio.create_task(on_all(ranks, publisher, [waits_for_rank_2, *sources[1:]]))
        await until(lambda: ranks[0]._coordinator is not None and ranks[0]._coordinator.ended)
        over.set()
        told = errors(await running)
        assert "rank 2 failed: " in told[0]
        assert error.__name__ in told[0]
        assert told[1].startswith("PublishError: rank 0 did not publish: rank 2 failed")
        assert told[2].startswith("SourceError: the source of this rank raised ")
        assert [server.commits for server in servers] == [[], []]
        # They are in step still.
        handle, *others = await on_all(ranks, publisher, [Source() for _ in ranks])
        assert others == [None, None]
        await handle.committed


async def test_an_error_of_rank_0_is_told_to_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        for server in servers:
            server.refuse_update = ("VERSION_NOT_NEWER", {})
        told = errors(await on_all(ranks, publisher, [Source() for _ in ranks]))
        assert told[0].startswith("PublishFailedError")
        for other in told[1:]:
            assert other.startswith("PublishError: rank 0 did not publish: version 1 was not")


async def test_ranks_that_iterate_differently_are_found_out(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        sources = [Source(), Source()]
        sources[1].names = NAMES[::-1]
        outcome = await on_all(ranks, publisher, sources)
        assert "rank 0 is at embed.weight, this one at layer.bias" in str(outcome[1])
        assert isinstance(outcome[1], SourceError)


async def test_ranks_that_publish_something_else_are_found_out(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, ranks):
        told = errors(
            await asyncio.gather(
                ranks[0].publish(publisher, 1, Source()),
                ranks[1].publish(None, 2, Source()),
                return_exceptions=True,
            )
        )
        wrong = "the ranks differ: rank 1 publishes version 2, rank 0 publishes version 1"
        assert told == [f"SourceError: {wrong}", f"PublishError: rank 0 did not publish: {wrong}"]
        assert servers[0].announced == 0
        handle, _ = await on_all(ranks, publisher, [Source(), Source()])
        await handle.committed


async def test_what_is_no_version_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, (first, other)):
        outcomes = await asyncio.gather(
            first.publish(publisher, -1, policy()), other.publish(None, -1, policy()),
            return_exceptions=True,
        )  # fmt: skip
    assert [type(outcome) for outcome in outcomes] == [ValueError, PublishError]
    assert all("version is -1, not a version" in str(outcome) for outcome in outcomes)
    assert servers[0].announced == 0


async def test_a_rank_that_does_not_come_is_named(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, timeout=1) as (_, publisher, ranks):
        leader, other = await asyncio.gather(
            ranks[0].publish(publisher, 1, Source()),
            ranks[1].publish(None, 1, Source()),
            return_exceptions=True,
        )
        assert isinstance(leader, SourceError)
        for told in (leader, other):
            assert "rank 2 has not called within 1 s" in str(told)
        with pytest.raises(PublishError, match="rank 2 has not called within 1 s"):
            await ranks[2].publish(None, 1, Source())
        with pytest.raises(SourceError, match="rank 0 of the trainer is gone"):
            await ranks[2].publish(None, 2, Source())
        told = await asyncio.gather(
            ranks[0].publish(publisher, 2, Source()),
            ranks[1].publish(None, 2, Source()),
            return_exceptions=True,
        )
        assert "rank 2 of the trainer is gone" in str(told[0])
        assert "rank 2 of the trainer is gone" in str(told[1])


async def test_rank_0_that_does_not_come_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2, timeout=0.2) as (_, publisher, ranks):
        with pytest.raises(SourceError, match=r"rank 0 has been silent for 0\.2 s"):
            await ranks[1].publish(None, 1, Source())
        with pytest.raises(SourceError, match="rank 1 of the trainer is gone"):
            await ranks[0].publish(publisher, 1, Source())


async def test_a_rank_without_a_tensor_that_rank_0_gathers_says_so(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        sharded = policy()
        for tensor in sharded.values():
            tensor.full_tensor = tensor.clone
        part = {name: tensor for name, tensor in sharded.items() if name != "layer.bias"}
        outcome = await on_all(ranks, publisher, [sharded, part])
        assert "rank 1 failed: SourceError: rank 0 gathers layer.bias" in str(outcome[0])
        assert "layer.bias, which this rank does not have" in str(outcome[1])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"embed.weight": Source}, "embed.weight: a type is not a torch tensor"),
        (list(policy().items()), "a list is neither a mapping"),
    ],
)
async def test_a_rank_with_no_tensors_ends_it_for_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, wrong: object, why: str
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        over = threading.Event()

        def waits_for_the_others() -> Iterator[tuple[str, Tensor]]:
            over.wait(60)
            yield from Source()()

        sources = [waits_for_the_others, Source(), wrong]
        running = asyncio.create_task(on_all(ranks, publisher, sources))
        await until(lambda: ranks[0]._coordinator is not None and ranks[0]._coordinator.ended)
        over.set()
        told = errors(await running)
        assert told[0].startswith("SourceError: rank 2 failed: SchemaMismatchError: nothing was")
        assert told[1].startswith("PublishError: rank 0 did not publish: rank 2 failed")
        assert told[2].startswith("SchemaMismatchError: nothing was sent: ")
        assert all(why in one for one in told)
        assert [server.commits for server in servers] == [[], []]
        # They are in step still.
        handle, *others = await on_all(ranks, publisher, [Source() for _ in ranks])
        assert others == [None, None]
        await handle.committed


async def test_why_rank_0_did_not_publish_is_told_though_this_rank_fails_too() -> None:
    here, there = tcp_pair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    begun, over = threading.Event(), threading.Event()

    def fails_in_consequence() -> Iterator[tuple[str, Tensor]]:
        begun.set()
        over.wait(60)
        raise ConnectionResetError("by rank 0, in the middle of a gather")
        yield

    with (
        contextlib.closing(Connection(here)) as rank_0,
        contextlib.closing(Connection(there)) as connection,
    ):
        following = asyncio.create_task(
            Participant(connection, fails_in_consequence, 20).run("publishes")
        )
        assert await rank_0.receive() == (Message.CALLED, "publishes")
        rank_0.send(Message.RESTART)
        rank_0.send(Message.NEXT)
        assert await asyncio.to_thread(begun.wait, 20)
        rank_0.send(Message.ABORTED, "all servers are gone")
        rank_0.close()  # so that this rank cannot tell of its own failure
        over.set()
        with pytest.raises(PublishError, match="did not publish: all servers are gone") as caught:
            await following
        assert "in the middle of a gather" in str(caught.value.__cause__)


@pytest.mark.parametrize("lazy", [False, True])
async def test_a_change_on_any_rank_ends_the_publish_on_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, *, lazy: bool
) -> None:
    async with trainer(monkeypatch, group) as (servers, publisher, ranks):
        tensors = policy()

        def changing() -> Iterator[tuple[str, Tensor]]:
            for name in NAMES:
                yield name, (lambda name=name: tensors[name]) if lazy else tensors[name]
                if name == "layer.weight":
                    tensors["embed.weight"].zero_()

        sources = [Source(lazy=lazy), changing, Source(lazy=lazy)]
        told = "rank 1: embed.weight changed in place while being sent; nothing was committed"
        first, second, third = errors(await on_all(ranks, publisher, sources))
        assert first.startswith(f"TensorsChangedError: {told}")
        assert second.startswith("TensorsChangedError: embed.weight changed in place")
        assert third.startswith(f"PublishError: rank 0 did not publish: {told}")
        assert [server.commits for server in servers] == [[], []]
        # The next one is not hindered by what was said late.
        handle, *_ = await on_all(ranks, publisher, [Source() for _ in ranks])
        assert (await handle.committed).failed == ()

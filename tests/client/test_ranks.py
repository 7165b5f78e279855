"""The ranks of a sharded trainer, over real connections; here all of them live in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import TYPE_CHECKING

import pytest
import rollwire_client._publishing.sharded.ranks
import torch
import torch.distributed as dist
from client.publishing import TIMEOUTS, holds, publishing
from client.scripted import until
from client.scripted_weights import SCHEMA, policy
from rollwire_client import PublishError, PublishInProgressError, Ranks, SourceError
from rollwire_client._publishing.sharded.connection import Connection, Message
from rollwire_client._publishing.sharded.coordination import Participant

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from client.scripted_weights import PublishableServer
    from rollwire_client import Publisher
    from torch import Tensor

NAMES = [spec.name for spec in SCHEMA if spec.alias_of is None]


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        return here, listener.accept()[0]


def connected(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, size: int, timeout: float
) -> list[Ranks]:
    """Ranks whose connections exist already: how they connect is tested with real processes."""
    ends: list[dict[int, Connection]] = [{} for _ in range(size)]
    for rank in range(1, size):
        here, there = tcp_pair()
        ends[0][rank], ends[rank][0] = Connection(here), Connection(there)
    monkeypatch.setattr(
        rollwire_client._publishing.sharded.ranks, "connect_ranks", lambda *_: ends.pop(0)
    )
    ranks = [Ranks(group, timeout=timeout) for _ in range(size)]
    for number, one in enumerate(ranks):
        one.rank = number
    return ranks


@contextlib.asynccontextmanager
async def trainer(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, size: int = 3, timeout: float = 20
) -> AsyncIterator[tuple[list[PublishableServer], Publisher, list[Ranks]]]:
    ranks = connected(monkeypatch, group, size, timeout)
    timeouts = TIMEOUTS
    async with publishing(2, timeouts) as (servers, _, publisher):
        with contextlib.ExitStack() as stack:
            for one in ranks:
                stack.enter_context(one)
            yield servers, publisher, ranks


class Source:
    """A source that notes what it was asked for, and fails as a test says."""

    def __init__(self, *, lazy: bool = False) -> None:
        self.taken: list[str] = []
        self.called: list[str] = []
        self.raises_at = ""
        self.error: type[BaseException] = ZeroDivisionError
        self.names = NAMES
        self._lazy = lazy

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.names:
            if name == self.raises_at:
                raise self.error("as scripted")
            self.taken.append(name)
            yield name, (lambda name=name: self._give(name)) if self._lazy else policy()[name]

    def _give(self, name: str) -> Tensor:
        self.called.append(name)
        return policy()[name]


async def on_all(
    ranks: list[Ranks], publisher: Publisher, sources: list[Source], version: int = 1
) -> list[object]:
    return await asyncio.gather(
        *(
            one.publish(publisher if one.rank == 0 else None, version, source)
            for one, source in zip(ranks, sources, strict=True)
        ),
        return_exceptions=True,
    )


def errors(outcomes: list[object]) -> list[str]:
    return [f"{type(outcome).__name__}: {outcome}" for outcome in outcomes]


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


async def test_rank_0_that_does_not_come_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2, timeout=0.2) as (_, publisher, ranks):
        with pytest.raises(SourceError, match=r"rank 0 has been silent for 0\.2 s"):
            await ranks[1].publish(None, 1, Source())
        with pytest.raises(SourceError, match="rank 1 of the trainer is gone"):
            await ranks[0].publish(publisher, 1, Source())


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


async def test_a_cancelled_publish_ends_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, ranks):
        for server in servers:
            server.hangs_in = "JoinTransport"
        other = asyncio.create_task(ranks[1].publish(None, 1, Source()))
        leader = asyncio.create_task(ranks[0].publish(publisher, 1, Source()))
        await until(lambda: all(server.joins for server in servers))
        leader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leader
        with pytest.raises(PublishError, match="the publish ended with CancelledError"):
            await other


async def test_closing_the_ranks_ends_a_publish_on_all(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    async with trainer(monkeypatch, group, size=2) as (servers, publisher, ranks):
        for server in servers:
            server.hangs_in = "JoinTransport"
        running = asyncio.create_task(on_all(ranks, publisher, [Source(), Source()]))
        await until(lambda: all(server.joins for server in servers))
        ranks[0].close()
        told = errors(await running)
        assert told[0].startswith("SourceError: rank 1 of the trainer is gone")
        assert told[1].startswith("SourceError: rank 0 of the trainer is gone")


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


@pytest.mark.parametrize("who", ["leader", "other"])
async def test_a_cancelled_publish_stops_reading_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup, who: str
) -> None:
    async with trainer(monkeypatch, group, size=2) as (_, publisher, ranks):
        asked, go_on = threading.Event(), threading.Event()
        taken: list[str] = []
        closed: list[threading.Thread] = []

        def slow() -> Iterator[tuple[str, Tensor]]:
            try:
                for name in NAMES:
                    asked.set()
                    assert go_on.wait(60)
                    taken.append(name)
                    yield name, policy()[name]
            finally:
                closed.append(threading.current_thread())

        other = asyncio.create_task(ranks[1].publish(None, 1, slow))
        leader = asyncio.create_task(ranks[0].publish(publisher, 1, Source()))
        await asyncio.to_thread(asked.wait, 20)
        # The other falls behind: what it has to do yet is of no use any more.
        task = leader if who == "leader" else other
        task.cancel()
        if who == "other":
            with pytest.raises(asyncio.CancelledError):
                await other
        with pytest.raises((asyncio.CancelledError, SourceError)):
            await leader
        go_on.set()
        await asyncio.wait([other])
        await until(lambda: closed != [])
        assert taken == NAMES[:1]
        assert all(thread.name == "rollwire-blocking" for thread in closed)


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


async def test_a_cancelled_receive_loses_no_message() -> None:
    here, there = (Connection(end) for end in tcp_pair())
    with contextlib.closing(here), contextlib.closing(there):
        for number in range(200):
            listening = asyncio.create_task(there.receive())
            await asyncio.sleep(0)
            here.send(Message.NEXT, str(number))
            if number % 2:
                await asyncio.sleep(0)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await listening == (Message.NEXT, str(number))
                continue
            async with asyncio.timeout(60):
                assert await there.receive() == (Message.NEXT, str(number))


@pytest.mark.parametrize("said", [b"what?\n", b'["next"]\n', b"7\n", b'["no word", ""]\n'])
async def test_an_invalid_message_is_refused(said: bytes) -> None:
    raw, end = tcp_pair()
    with raw, contextlib.closing(Connection(end)) as connection:
        raw.sendall(said)
        with pytest.raises(ConnectionError, match="invalid message"):
            await connection.receive()


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

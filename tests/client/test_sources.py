"""Sources that raise, hang, or take their time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import policy
from rollwire.v1 import weights_pb2
from rollwire_client import Publisher, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_error_of_the_callable_is_the_publish_s(error: type[BaseException]) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed.weight", policy()["embed.weight"]
        raise error("of the trainer")

    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        told = rf"{error.__name__} when it was asked for layer\.weight: of the trainer"
        with pytest.raises(SourceError, match=told) as caught:
            await handle.committed
        assert isinstance(caught.value.__cause__, error)
        assert servers[0].commits == []
        await publish(publisher)  # the next one is not hindered


@dataclass
class Hanging:
    """A source that hangs at its second tensor."""

    asked: threading.Event = field(default_factory=threading.Event)
    let_go: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.threads.append(threading.current_thread())
        for name, tensor in policy().items():
            if name == "layer.weight":
                self.asked.set()
                self.let_go.wait(60)
            yield name, tensor
            self.taken.append(name)

    def end(self) -> None:
        self.let_go.set()
        for thread in self.threads:
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    source = Hanging()
    yield source
    source.end()


IMPATIENT = replace(TIMEOUTS, source=0.5)


async def test_a_source_that_hangs_ends_the_publish(hanging: Hanging) -> None:
    async with publishing(2, IMPATIENT) as (servers, fleet, publisher):
        handle = await publisher.publish(1, hanging)
        with pytest.raises(SourceError, match=r"did not provide layer\.weight within 0\.5 s"):
            await handle.released
        with pytest.raises(SourceError, match="the servers keep what they serve"):
            await handle.committed
        assert [server.commits for server in servers] == [[], []]
        await until(lambda: all(handle.update_id in s.discards for s in servers))
        assert all(member.problem is None for member in fleet._pool.servers)
        await publish(publisher)  # the next one is not hindered
        hanging.end()
        assert hanging.taken == ["embed.weight"]  # what comes too late goes nowhere
        assert all(holds(server) for server in servers)


async def test_a_publish_whose_source_hangs_can_be_cancelled(hanging: Hanging) -> None:
    async with publishing(2, IMPATIENT) as (servers, _, publisher):
        handle = await publisher.publish(1, hanging)
        await asyncio.to_thread(hanging.asked.wait, 60)
        await handle.cancel()
        with pytest.raises(asyncio.CancelledError):
            await handle.committed
        await until(lambda: all(handle.update_id in s.discards for s in servers))


@pytest.mark.parametrize("before", ["a cancel", "a death"])
async def test_a_publish_that_is_ending_is_not_cut_short(hanging: Hanging, before: str) -> None:
    async with publishing(2) as (servers, fleet, publisher):
        handle = await publisher.publish(1, hanging)
        await asyncio.to_thread(hanging.asked.wait, 60)
        if before == "a death":
            await servers[0].stop()
        else:
            ending = asyncio.create_task(handle.cancel())
        stalled = weights_pb2.UPDATE_PHASE_STALLED
        await until(lambda: servers[1].update is not None and servers[1].update.phase == stalled)
        closing = asyncio.create_task(fleet.close())
        assert not (await asyncio.wait([closing], timeout=0.5))[0]  # the tensors are in use
        assert not handle.done
        hanging.let_go.set()
        await closing
        with pytest.raises(asyncio.CancelledError):
            await handle.committed
        if before == "a cancel":
            await ending
        assert hanging.taken == ["embed.weight"]
        await until(lambda: not [t for t in threading.enumerate() if t.name == "rollwire-gloo"])


async def test_no_other_group_is_formed_for_a_source_that_hangs(hanging: Hanging) -> None:
    async with publishing(2, IMPATIENT) as (servers, _, publisher):
        handle = await publisher.publish(1, hanging)
        await asyncio.to_thread(hanging.asked.wait, 60)
        await servers[0].stop()
        with pytest.raises(SourceError, match=r"layer\.weight"):
            await handle.committed
        assert len(servers[1].joins) == 1
        assert servers[1].commits == []


async def test_a_slow_source_is_waited_for_when_a_server_dies(hanging: Hanging) -> None:
    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from hanging() if not hanging.threads else policy().items()

    async with publishing(2) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        await asyncio.to_thread(hanging.asked.wait, 60)
        await servers[0].stop()
        hanging.let_go.set()
        report = await handle.committed
        assert [s.weights is None for s in report.servers] == [True, False]
        assert holds(servers[1])


@dataclass
class Steady:
    """A source that is asked while it is ended: it gives its first tensor only then."""

    asked: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    given: list[str] = field(default_factory=list)
    closed_in: threading.Thread | None = None

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        reading = threading.current_thread()
        try:
            for name, tensor in policy().items():
                if name == "head.weight":
                    continue
                self.asked.set()
                assert self.ended.wait(60)
                self.given.append(name)
                yield name, tensor
        finally:
            assert threading.current_thread() is reading
            self.closed_in = reading


ONE_BUCKET = 1 << 20


@pytest.mark.parametrize("way", ["cancel", "close"])
async def test_a_source_that_is_read_is_asked_for_nothing_more(way: str) -> None:
    source = Steady()
    async with publishing(1) as (servers, fleet, _):
        publisher = Publisher(fleet, bucket_bytes=ONE_BUCKET, timeouts=TIMEOUTS)
        handle = await publisher.publish(1, source)
        await asyncio.to_thread(source.asked.wait, 60)
        ending = asyncio.create_task(handle.cancel() if way == "cancel" else fleet.close())
        stalled = weights_pb2.UPDATE_PHASE_STALLED
        await until(lambda: servers[0].update is not None and servers[0].update.phase == stalled)
        source.ended.set()
        await ending
        with pytest.raises(asyncio.CancelledError):
            await handle.committed
        assert source.given == ["embed.weight"]
        assert source.closed_in is not None


async def test_a_source_that_is_read_whole_is_closed_in_its_thread() -> None:
    source = Steady()
    source.ended.set()
    async with publishing(1) as (servers, _, publisher):
        await (await publisher.publish(1, source)).committed
        assert holds(servers[0])
    assert source.closed_in is not None
    assert source.closed_in.name == "rollwire-blocking"


class Reading(Mapping[str, "torch.Tensor"]):
    """A mapping that reads each tensor when it is asked for it, as of a checkpoint's files."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return policy()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(n for n in policy() if n != "head.weight")

    def __len__(self) -> int:
        return len(list(iter(self)))


async def test_a_mapping_is_read_once_to_be_checked_and_once_to_be_sent() -> None:
    tensors = Reading()
    async with publishing(1) as (servers, _, publisher):
        await (await publisher.publish(1, tensors)).committed
        assert holds(servers[0])
    # Where the tensors lie is seen by the first.
    assert tensors.read == [*tensors, "embed.weight", *tensors]

"""Sources that raise, hang, or take their time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import torch
from client.publishing import TIMEOUTS, holds, publish, publishing
from client.scripted import until
from client.scripted_weights import policy
from rollwire.v1 import weights_pb2
from rollwire_client import Publisher, SchemaMismatchError, SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, SystemExit])
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


class Adapted:
    """A source that merges an adapter before its first tensor, and unmerges it at its end, whether
    it comes there or is closed; each in place, as torch counts it.
    """

    def __init__(self, names: Sequence[str] = (), extra: Sequence[str] = ()) -> None:
        self.tensors = {n: t.clone() for n, t in policy().items() if n != "head.weight"}
        self.names = [*(names or self.tensors), *extra]
        self.merged = 0
        self.unmerged_in: list[threading.Thread] = []

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        reading = threading.current_thread()
        for tensor in self.tensors.values():
            tensor *= 2  # exact, and so is its undoing
        self.merged += 1
        try:
            for name in self.names:
                own = "embed.weight" if name == "head.weight" else name  # they are tied
                yield name, self.tensors.get(own, torch.zeros(3))
        finally:
            for tensor in self.tensors.values():
                tensor /= 2
            if threading.current_thread() is reading:
                self.unmerged_in.append(reading)


BACKWARDS = ("layer.bias", "layer.weight", "embed.weight")


@pytest.mark.parametrize("names", [(), BACKWARDS, ("head.weight", "layer.bias", "layer.weight")])
async def test_a_source_is_run_to_its_end_whatever_its_order(names: Sequence[str]) -> None:
    source = Adapted(names)
    want = {name: 2 * tensor for name, tensor in policy().items() if name != "head.weight"}
    async with publishing(2) as (servers, _, publisher):
        for version in (1, 2):
            report = await (await publisher.publish(version, source)).committed
            assert not report.failed
            assert source.merged == len(source.unmerged_in) == version
            for server in servers:
                assert server.committed.keys() == want.keys()
                assert all(torch.equal(server.committed[n], want[n]) for n in want)


async def test_an_update_is_laid_out_in_the_order_of_the_last_source() -> None:
    async with publishing(1) as (servers, _, publisher):
        laid_out = []
        for version in (1, 2):
            source = Adapted(BACKWARDS)
            await (await publisher.publish(version, source)).committed
            laid_out.append([spec.name for spec in servers[0].manifests[-1].tensors])
    assert laid_out == [
        ["embed.weight", "layer.weight", "layer.bias", "head.weight"],
        [*BACKWARDS, "head.weight"],
    ]


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (["v_head.summary.weight"], "a value or reward head is not part of the policy"),
        (["layer.bias"], r"the source gave layer\.bias twice"),
        (["base_model.model.layer.base_layer.weight"], "Merge the adapter first"),
        (["layer.lora_A.default.weight"], "Merge the adapter first"),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
async def test_what_is_too_much_is_refused_as_in_a_mapping(
    extra: list[str], told: str, *, partial: bool
) -> None:
    source = Adapted(extra=extra)
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(SchemaMismatchError, match=told):
            await (await publisher.publish(1, source, partial=partial)).committed
        assert servers[0].commits == []
        assert len(source.unmerged_in) == source.merged == 1
        await publish(publisher)  # the next one is not hindered


@pytest.mark.parametrize("wrong", [torch.zeros(8, 8), torch.zeros(8, dtype=torch.int16)])
async def test_another_shape_or_dtype_is_refused_with_advice(wrong: torch.Tensor) -> None:
    source = Adapted()
    source.tensors["layer.bias"] = wrong
    async with publishing(1) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        with pytest.raises(SchemaMismatchError, match=r"reshape it|cast before"):
            await handle.committed
        assert servers[0].commits == []


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("partial", [False, True])
async def test_a_sparse_tensor_is_refused_by_its_name(called: bool, partial: bool) -> None:
    async with publishing(1) as (servers, _, publisher):

        def source() -> Iterator[tuple[str, object]]:
            sparse = policy()["layer.bias"].to_sparse()
            yield "layer.bias", (lambda: sparse) if called else sparse

        with pytest.raises(SchemaMismatchError, match=r"layer\.bias.*sparse"):
            await (await publisher.publish(1, source, partial=partial)).committed
        assert servers[0].commits == []


@pytest.mark.parametrize("first", ["embed.weight", "head.weight"])
@pytest.mark.parametrize("way", ["equal", "the same", "another", "a function"])
async def test_tied_tensors_that_differ_are_refused_as_in_a_mapping(first: str, way: str) -> None:
    tensors = policy()
    embed = tensors["embed.weight"]
    embed[0, 0] = torch.nan  # whose copy is equal, for a publish
    head = embed if way == "the same" else embed.clone()
    if way == "another":
        head[1, 1] += 1
    tensors["head.weight"] = head
    second = "head.weight" if first == "embed.weight" else "embed.weight"
    names = dict.fromkeys([first, *tensors, second])

    def source() -> Iterator[tuple[str, object]]:
        for name in names:
            tensor = tensors[name]
            yield name, (lambda tensor=tensor: tensor) if way == "a function" else tensor

    async with publishing(1) as (servers, _, publisher):
        publishing_ = publisher.publish_and_wait(1, source)
        if way == "another":
            with pytest.raises(SchemaMismatchError, match=r"head\.weight is tied to embed\.weight"):
                await publishing_
            assert servers[0].commits == []
        else:
            await publishing_


async def test_a_callable_may_leave_tensors_out_too() -> None:
    source = Adapted(["layer.bias"])
    async with publishing(2) as (servers, _, publisher):
        await publish(publisher)
        report = await (await publisher.publish(2, source, partial=True)).committed
        assert not report.failed
        assert len(source.unmerged_in) == 1
        for server in servers:
            assert [spec.name for spec in server.manifests[-1].tensors] == ["layer.bias"]
            assert torch.equal(server.committed["layer.bias"], 2 * policy()["layer.bias"])


async def test_a_source_of_some_tensors_that_hangs_or_raises(hanging: Hanging) -> None:
    def raises() -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer.bias", policy()["layer.bias"]
        raise ZeroDivisionError("as scripted")

    async with publishing(1, IMPATIENT) as (servers, _, publisher):
        with pytest.raises(SourceError, match="did not provide its next tensor within"):
            await publisher.publish(1, hanging, partial=True)
        with pytest.raises(SourceError, match="raised ZeroDivisionError: as scripted") as caught:
            await publisher.publish(1, raises, partial=True)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert servers[0].announced == 0
        await publish(publisher)  # the next one is not hindered


async def test_a_cancelled_publish_waits_for_the_source_of_some_tensors(hanging: Hanging) -> None:
    async with publishing(1) as (_, _, publisher):
        publishing_ = asyncio.create_task(publisher.publish(1, hanging, partial=True))
        await asyncio.to_thread(hanging.asked.wait, 60)
        publishing_.cancel()
        assert not (await asyncio.wait([publishing_], timeout=0.2))[0]  # the tensors are in use
        hanging.let_go.set()
        with pytest.raises(asyncio.CancelledError):
            await publishing_
        assert hanging.taken == ["embed.weight"]


async def test_an_iterator_that_can_be_read_only_once_is_named_when_a_group_fails() -> None:
    once = Adapted()()
    async with publishing(2) as (servers, _, publisher):
        servers[1].stop_receiving_at = 6
        handle = await publisher.publish(1, lambda: once)
        with pytest.raises(SourceError, match="each call must return a fresh iterator"):
            await handle.committed
        assert [server.commits for server in servers] == [[], []]


async def test_a_source_that_hangs_at_its_end_ends_the_publish() -> None:
    let_go = threading.Event()

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        yield from Adapted()()
        let_go.wait(60)

    async with publishing(1, IMPATIENT) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        with pytest.raises(SourceError, match="did not provide its end within"):
            await handle.committed
        assert servers[0].commits == []
        let_go.set()


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError, SystemExit])
async def test_what_a_source_raises_as_it_is_closed_does_not_hide_why(
    error: type[BaseException],
) -> None:
    def source() -> Iterator[tuple[str, object]]:
        try:
            yield "embed.weight", lambda: torch.zeros(1)
        finally:
            raise error("of the trainer")

    async with publishing(1) as (_, _, publisher):
        handle = await publisher.publish(1, source)
        with pytest.raises(SchemaMismatchError, match=r"embed\.weight"):
            await handle.committed
        await publish(publisher)  # the next one is not hindered


async def test_a_source_that_hangs_as_it_is_closed_ends_the_publish() -> None:
    let_go = threading.Event()

    def source() -> Iterator[tuple[str, object]]:
        try:
            yield "embed.weight", lambda: torch.zeros(1)
        finally:
            let_go.wait(60)

    async with publishing(1, IMPATIENT) as (servers, _, publisher):
        handle = await publisher.publish(1, source)
        with pytest.raises(SourceError, match="did not provide its end within"):
            async with asyncio.timeout(20):
                await handle.committed
        assert servers[0].commits == []
        let_go.set()
        await publish(publisher)  # the next one is not hindered


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

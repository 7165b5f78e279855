"""Memory of an update: who holds it, into which a group that has failed may still write."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import rollwire_transport as transport
import torch
from rollwire.reasons import Reason
from rollwire.types import UpdatePhase
from rollwire_server.engines.base import EngineError
from rollwire_server.errors import ServiceError, result_of, spawn
from rollwire_server.weights.update import PublisherId, UpdateAnnouncement
from support.engine_room import joined, updating
from support.memory_link import MemoryLink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from concurrent.futures import Future

    from rollwire_server.engines.base import Engine
    from rollwire_server.weights.manager import UpdateManager
    from torch import Tensor

PUBLISHER = PublisherId("trainer", 1)


class Failing(MemoryLink):
    """Of a sender that is gone, to which something holds on, or not."""

    def __init__(self, *, lets_go: bool) -> None:
        super().__init__()
        self._lets_go = lets_go

    def close(self) -> bool:
        if self._lets_go:
            self.given.clear()  # an error of receiving may know this link for a moment longer
        return self._lets_go


class Lingering(MemoryLink):
    """Of a sender that is gone, and closed only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.may_close = threading.Event()

    def close(self) -> bool:
        return self.may_close.wait(60)


class Memory:
    """That of all updates so far, with what was staged while some of it was held."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stage = engine.stage
        self._storages: list[weakref.ref[object]] = []
        self.asked = asyncio.Event()
        self.may_stage = asyncio.Event()
        self.may_stage.set()
        self.held_while_staging: list[bool] = []
        self.staged = 0
        monkeypatch.setattr(engine, "stage", self.stage)

    @property
    def held(self) -> bool:
        return any(storage() is not None for storage in self._storages)

    async def stage(self, manifest: transport.Manifest) -> Mapping[str, Tensor]:
        self.held_while_staging.append(self.held)
        self.asked.set()
        await self.may_stage.wait()
        staged = await self._stage(manifest)
        self.staged += 1
        self._storages += [weakref.ref(t.untyped_storage()) for t in staged.values()]
        return staged


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the garbage collector would free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def the_next_waits(
    updates: UpdateManager,
    manifest: transport.Manifest,
    memory: Memory,
    go: asyncio.Event | threading.Event,
) -> None:
    """Another update is staged only after ``go``; both have been then."""
    memory.asked.clear()
    reports = updates.announce(UpdateAnnouncement(PUBLISHER, "next", 2, False, manifest, 30.0))
    ready = asyncio.create_task(anext(reports))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(memory.asked.wait(), 0.3)
    go.set()
    assert (await ready).phase is UpdatePhase.READY
    await reports.aclose()
    assert memory.held_while_staging == [False, False]
    assert memory.staged == 2


@pytest.mark.parametrize("lets_go", [True, False])
async def test_an_update_whose_memory_is_not_let_go_of_ends(
    monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    monkeypatch.setattr(transport, "open_link", lambda *_, **__: Failing(lets_go=lets_go))
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        assert (await anext(reports)).phase is UpdatePhase.READY
        await joined(updates, PUBLISHER, "u")

        async def until_stalled() -> None:
            async for report in reports:
                if report.phase is UpdatePhase.STALLED and lets_go:
                    return

        if lets_go:
            await until_stalled()
            assert updates.current is not None
        else:
            with pytest.raises(ServiceError, match="may still write") as caught:
                await until_stalled()
            assert caught.value.reason is Reason.NOT_STAGED
            assert updates.current is None
        await reports.aclose()


async def test_an_update_whose_link_breaks_in_an_unforeseen_way_has_a_lease_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("something unforeseen")

    monkeypatch.setattr(Failing, "connect", broken)
    monkeypatch.setattr(transport, "open_link", lambda *_, **__: Failing(lets_go=True))
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 0.2))
        await anext(reports)
        with pytest.raises(ServiceError, match="something unforeseen") as refused:
            await joined(updates, PUBLISHER, "u")
        assert refused.value.reason is Reason.TRANSPORT_FAILED
        assert (await anext(reports)).phase is UpdatePhase.STALLED

        async def until_discarded() -> None:
            async for _ in reports:
                pass

        with pytest.raises(ServiceError, match="its publisher did nothing"):
            await until_discarded()


@pytest.mark.usefixtures("no_collector")
async def test_a_discarded_update_keeps_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "open_link", lambda *_, **__: Failing(lets_go=True))
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        await anext(reports)
        assert updates.current is not None
        memory = [weakref.ref(t.untyped_storage()) for t in updates.current.staged.values()]
        await joined(updates, PUBLISHER, "u")
        while (await anext(reports)).phase is not UpdatePhase.STALLED:
            pass
        assert all(there() is not None for there in memory)
        await updates.discard(PUBLISHER, "u")
        assert all(there() is None for there in memory)
        with pytest.raises(ServiceError, match="was discarded"):
            await anext(reports)


@pytest.mark.usefixtures("no_collector")
async def test_no_update_is_staged_while_the_one_before_is_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine may have memory for one."""
    link = Lingering()
    monkeypatch.setattr(transport, "open_link", lambda *_, **__: link)
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        memory = Memory(room.engine, monkeypatch)
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        await anext(reports)
        await joined(updates, PUBLISHER, "u")
        while (await anext(reports)).phase is not UpdatePhase.STALLED:
            pass
        link.given.clear()
        await reports.aclose()  # its call has ended
        assert updates.current is None
        await the_next_waits(updates, manifest, memory, link.may_close)


@pytest.mark.usefixtures("no_collector")
async def test_no_update_is_staged_while_one_is_that_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It goes on: another process may be in the middle of obeying."""
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        memory = Memory(room.engine, monkeypatch)
        memory.may_stage.clear()
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        asking = asyncio.create_task(anext(reports))
        await memory.asked.wait()
        asking.cancel()
        await asyncio.wait([asking])
        del asking  # its error's frames know what it waited for
        await the_next_waits(updates, manifest, memory, memory.may_stage)


@pytest.mark.usefixtures("no_collector")
async def test_a_refusal_keeps_no_memory_of_what_was_refused() -> None:
    memory: list[weakref.ref[object]] = []

    async def fails() -> None:
        held = torch.empty(4)
        memory.append(weakref.ref(held.untyped_storage()))
        raise ServiceError(Reason.COMMIT_FAILED, "no room") from EngineError("no room")

    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(ServiceError, match="no room"):
            await result_of(spawn(tasks, fails(), "fails"))
    assert memory[0]() is None


class LastMoment(MemoryLink):
    """All has come, and its end is seen only when the group is left."""

    def __init__(self, sent: MemoryLink) -> None:
        super().__init__()
        self.messages = sent.messages
        self.left = threading.Event()

    def finish(self) -> None:
        super().finish()
        assert self.left.wait(60)

    def abort(self) -> None:
        self.left.set()


async def test_an_update_that_is_staged_as_it_leaves_a_group_stays_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new group has nothing for it, and may fail."""
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        sender, sent = transport.Sender(manifest), MemoryLink()
        weight = torch.ones(manifest.tensors[0].shape)
        sender.send(sent, {"weight": weight}.items, first_bucket=0, bucket_timeout=5)
        links = [LastMoment(sent), Failing(lets_go=True)]
        monkeypatch.setattr(transport, "open_link", lambda *_, **__: links.pop(0))
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        await anext(reports)
        for epoch in ("first", "second"):
            await joined(updates, PUBLISHER, "u", epoch)
        while (await anext(reports)).phase is not UpdatePhase.STAGED:
            pass
        assert updates.current is not None
        if updates.current.receiving is not None:  # in whatever group
            await updates.current.receiving
        commit = await updates.commit(PUBLISHER, "u", sender.digest, max_kv_lag=None)
        assert commit.weights.version == 1


class Failed(MemoryLink):
    """Its sender is gone as soon as the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = threading.Event()

    def receive(self, header: Tensor, payload: Tensor) -> transport.Transfer:
        assert self.failed.wait(60)
        return super().receive(header, payload)


class Noting(ThreadPoolExecutor):
    """Notes its last job."""

    def submit(self, *work: Any, **named: Any) -> Future[Any]:
        self.last = super().submit(*work, **named)
        return self.last


async def test_a_group_that_fails_as_it_is_left_is_not_taken_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that a trainer has kept, and does not use again."""
    first, may_open = Failed(), threading.Event()

    def open_link(*_: object, epoch: str, **__: object) -> MemoryLink:
        assert epoch == "first" or may_open.wait(60)
        return first if epoch == "first" else Failing(lets_go=True)

    executor = Noting()
    asyncio.get_running_loop().set_default_executor(executor)
    monkeypatch.setattr(transport, "open_link", open_link)
    async with updating() as room, asyncio.timeout(60):
        updates, manifest = room.updates, room.manifest
        reports = updates.announce(UpdateAnnouncement(PUBLISHER, "u", 1, False, manifest, 30.0))
        await anext(reports)
        await joined(updates, PUBLISHER, "u", "first")
        over = threading.Event()
        executor.last.add_done_callback(lambda _: over.set())
        first.failed.set()
        assert over.wait(60)  # the event loop is about to learn that it has failed
        joining = asyncio.create_task(joined(updates, PUBLISHER, "u", "second"))
        for _ in range(3):
            progress = await anext(reports)
            assert (progress.epoch, progress.phase) == ("first", UpdatePhase.RECEIVING)
        may_open.set()
        await joining
        while (progress := await anext(reports)).phase is not UpdatePhase.STALLED:
            pass
        assert progress.epoch == "second"
        await reports.aclose()

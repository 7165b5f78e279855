"""Deltas at a server: what they wait for, what ends them, and whose memory is free then."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import rollwire_transport as transport
import torch
from rollwire.reasons import Reason
from rollwire.types import ServerState, SleepingWeights, UpdatePhase
from rollwire_server.counters import UpdateOutcome
from rollwire_server.engines.base import EngineError, NoMemoryError, TornWeightsError
from rollwire_server.errors import ServiceError
from rollwire_server.weights.transport_group import JoinRequest, JoinStep
from rollwire_server.weights.update import PublisherId, UpdateAnnouncement
from structlog.testing import capture_logs
from support.engine_room import joined, updating
from support.memory_link import MemoryLink
from support.publishing import changed
from support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from rollwire_server.engines.base import PreparedDelta
    from rollwire_server.weights.update import UpdateProgress
    from rollwire_transport import Snapshot
    from support.engine_room import Room
    from torch import Tensor

CPU = torch.device("cpu")
PUBLISHER = PublisherId("trainer", 1)


class Trainer:
    """Publishes to the server of a room: first all of the weights, then what has changed."""

    def __init__(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = room
        self.weight = torch.zeros(room.manifest.tensors[0].shape)
        self._copy = transport.PublishedCopy(CPU)
        self._monkeypatch = monkeypatch
        self.take()

    def take(self) -> Snapshot:
        return self._copy.take(self.room.manifest, {"weight": self.weight}.items, device=CPU)

    def step(self, seed: int = 1) -> Snapshot:
        """What has changed."""
        self.weight = changed({"weight": self.weight}, seed, 0.05)["weight"]
        return self.take()

    def announce(
        self, snapshot: Snapshot, update_id: str = "u", **fields: Any
    ) -> AsyncGenerator[UpdateProgress, None]:
        assert snapshot.delta is not None
        manifest = snapshot.delta.manifest
        fields = {"publisher": PUBLISHER, "version": 1, "stage_lease": 30.0, **fields}
        announcement = UpdateAnnouncement(
            update_id=update_id, allow_version_rollback=False, manifest=manifest, **fields
        )
        return self.room.updates.announce(announcement)

    async def send(
        self, sent: dict[str, Tensor], manifest: transport.Manifest, update_id: str = "u"
    ) -> None:
        link = MemoryLink()
        layout = transport.delta_layout(manifest)
        transport.Sender(layout).send(link, sent.items, bucket_timeout=5)
        self._monkeypatch.setattr(transport, "open_link", lambda *_, **__: link)
        self.link = link
        await joined(self.room.updates, PUBLISHER, update_id, update_id)

    async def stage(
        self, snapshot: Snapshot, update_id: str = "u", **fields: Any
    ) -> UpdateProgress:
        reports = self.announce(snapshot, update_id, **fields)
        await anext(reports)
        assert snapshot.delta is not None
        await self.send(dict(snapshot.delta.tensors), snapshot.delta.manifest, update_id)  # type: ignore[arg-type]
        progress = await staged(reports)
        self.link.given.clear()  # no other link holds on to where it received
        return progress


async def staged(reports: AsyncGenerator[UpdateProgress, None]) -> UpdateProgress:
    async for progress in reports:
        if progress.phase is UpdatePhase.STAGED:
            return progress
    raise AssertionError


async def refused(reports: AsyncGenerator[UpdateProgress, None]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        async for _ in reports:
            pass
    return caught.value


class Preparing:
    """In the place of an engine's ``prepare_delta``: goes on when the test says so."""

    def __init__(self, room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
        self._prepare = room.engine.prepare_delta
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.memory: list[weakref.ref[object]] = []
        monkeypatch.setattr(room.engine, "prepare_delta", self.prepare)

    async def prepare(self, manifest: Any, staged: Any, before: Any) -> PreparedDelta:
        self.begun.set()
        await self.may_end.wait()
        prepared = await self._prepare(manifest, staged, before)
        self.memory = [weakref.ref(t.untyped_storage()) for t in staged.values()]
        self.memory.append(weakref.ref(prepared.changes.received))  # type: ignore[attr-defined]
        return prepared

    @property
    def held(self) -> bool:
        return any(memory() is not None for memory in self.memory)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the garbage collector would free stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_what_is_staged_is_what_the_weights_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        for version in range(1, 4):
            snapshot, update_id = trainer.step(version), f"u{version}"
            received = room.counters.received_bytes
            progress = await trainer.stage(snapshot, update_id, version=version)
            assert progress.digest == snapshot.digest != room.updates.weights.current.digest
            sent = room.counters.received_bytes - received
            assert progress.received_bytes == sent < trainer.weight.nbytes / 2
            with capture_logs() as lines:
                result = await room.updates.commit(PUBLISHER, update_id, progress.digest, None)
            assert result.weights.digest == snapshot.digest
            (line,) = [line for line in lines if line["event"] == "committed"]
            assert (line["encoding"], line["received_bytes"]) == ("delta", sent)
            assert await room.updates.verify()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["commit", "discard", "sleep", "successor", "shutdown", "lease"])
async def test_no_memory_of_a_delta_is_left(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        preparing = Preparing(room, monkeypatch)
        preparing.may_end.set()
        lease = 0.2 if how == "lease" else 30.0
        progress = await trainer.stage(trainer.step(), stage_lease=lease)
        if how != "lease":
            assert preparing.held
        if how == "commit":
            await room.updates.commit(PUBLISHER, "u", progress.digest, None)
        elif how == "discard":
            await room.updates.discard(PUBLISHER, "u")
        elif how == "sleep":
            await room.sleep.sleep(SleepingWeights.KEEP)
        elif how == "successor":
            successor = trainer.announce(trainer.step(2), "next", publisher=PublisherId("b", 2))
            assert (await refused(successor)).reason is Reason.BASE_MISMATCH
            assert preparing.held  # which is refused before anything is touched
            restarted = Trainer(room, monkeypatch)
            successor = restarted.announce(restarted.step(2), "next", publisher=PublisherId("b", 2))
            await anext(successor)
            await successor.aclose()
        elif how == "shutdown":
            await room.updates.discard_current(Reason.DRAINING, "the server stops")
        await until(lambda: room.updates.current is None and not preparing.held)
        with pytest.raises(ServiceError) as gone:
            await room.updates.commit(PUBLISHER, "other", progress.digest, None)
        expected = {"sleep": Reason.SLEEPING, "successor": Reason.STALE_PUBLISHER}
        assert gone.value.reason is expected.get(how, Reason.NOT_STAGED)


@pytest.mark.usefixtures("no_collector")
async def test_a_delta_that_is_discarded_while_it_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine is not done with its memory before, so nothing is staged in it."""
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        preparing = Preparing(room, monkeypatch)
        snapshot = trainer.step()
        reports = trainer.announce(snapshot)
        await anext(reports)
        assert snapshot.delta is not None
        await trainer.send(dict(snapshot.delta.tensors), snapshot.delta.manifest)  # type: ignore[arg-type]
        await preparing.begun.wait()
        assert (await anext(reports)).phase is UpdatePhase.RECEIVING
        with pytest.raises(ServiceError) as early:
            await room.updates.commit(PUBLISHER, "u", snapshot.digest, None)
        assert early.value.reason is Reason.NOT_STAGED
        discarding = asyncio.create_task(room.updates.discard(PUBLISHER, "u"))
        falling_asleep = asyncio.create_task(room.sleep.sleep(SleepingWeights.DISCARD))
        assert (await refused(reports)).reason is Reason.NOT_STAGED
        assert not discarding.done()
        assert not falling_asleep.done()
        trainer.link.given.clear()
        preparing.may_end.set()
        await discarding
        await falling_asleep
        assert not preparing.held
        assert room.counters.updates[UpdateOutcome.DISCARDED] == 1


async def test_a_new_group_has_nothing_for_a_server_that_prepares_what_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when another server has died: this one is left out, and staged."""
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        preparing = Preparing(room, monkeypatch)
        snapshot = trainer.step()
        reports = trainer.announce(snapshot)
        await anext(reports)
        assert snapshot.delta is not None
        await trainer.send(dict(snapshot.delta.tensors), snapshot.delta.manifest)  # type: ignore[arg-type]
        await preparing.begun.wait()
        step = JoinRequest(JoinStep.PREPARE, "next", "gloo", rank=1, world_size=2, host="127.0.0.1")
        joining = asyncio.create_task(room.updates.join(PUBLISHER, "u", step, 5))
        await anext(reports)
        assert not joining.done()
        preparing.may_end.set()
        assert await joining == (b"", 1)
        assert (await staged(reports)).digest == snapshot.digest
        await room.updates.commit(PUBLISHER, "u", snapshot.digest, None)
        assert await room.updates.verify()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (transport.ManifestError(["no delta"]), Reason.MANIFEST_MISMATCH),
        (NoMemoryError("the device is full"), Reason.STAGING_FAILED),
        (EngineError("the device fails"), Reason.ENGINE_FAILED),
        (ValueError("a bug"), Reason.INTERNAL),
    ],
)
async def test_a_delta_that_cannot_be_prepared_ends_and_its_group_moves_the_next_update(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason
) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        serves = room.updates.weights.current

        async def fails(*_: object) -> None:
            raise error

        monkeypatch.setattr(room.engine, "prepare_delta", fails)
        snapshot = trainer.step()
        reports = trainer.announce(snapshot)
        await anext(reports)
        assert snapshot.delta is not None
        await trainer.send(dict(snapshot.delta.tensors), snapshot.delta.manifest)  # type: ignore[arg-type]
        ended = await refused(reports)
        assert ended.reason is reason
        assert str(error) in ended.message
        assert "the server serves" in ended.message
        assert room.updates.weights.current == serves
        assert room.updates.current is None
        full = UpdateAnnouncement(
            PUBLISHER, "full", 1, False, room.manifest, 30.0, kept_epoch="u", kept_transfers=0
        )
        reports = room.updates.announce(full)
        while (progress := await anext(reports)).phase is UpdatePhase.READY:
            pass
        assert (progress.phase, progress.epoch) == (UpdatePhase.RECEIVING, "u")
        await reports.aclose()


async def test_weights_that_are_not_those_any_more_are_noticed_at_the_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        progress = await trainer.stage(trainer.step())
        await room.updates.commit(PUBLISHER, "u", progress.digest, None)
        progress = await trainer.stage(trainer.step(), "next", version=2)
        await room.engine.sleep(SleepingWeights.DISCARD)
        await room.engine.wake(reload_checkpoint=True)
        await room.updates.weights.reloaded()
        checkpoint = room.updates.weights.current
        with pytest.raises(ServiceError, match="publish in full encoding") as caught:
            await room.updates.commit(PUBLISHER, "next", progress.digest, None)
        assert caught.value.reason is Reason.BASE_MISMATCH
        assert room.updates.weights.current == checkpoint
        assert await room.updates.verify()


async def test_servers_without_complete_weights_take_no_deltas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        snapshot = trainer.step()
        await room.sleep.sleep(SleepingWeights.DISCARD)
        assert (await refused(trainer.announce(snapshot))).reason is Reason.SLEEPING
        await room.sleep.wake(reload_checkpoint=False)
        assert room.state.current is ServerState.AWAITING_WEIGHTS
        refusal = await refused(trainer.announce(snapshot))
        assert refusal.reason is Reason.BASE_MISMATCH
        assert "awaiting_weights" in refusal.message


async def test_a_delta_that_is_torn_is_cured_by_a_full_update_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        progress = await trainer.stage(trainer.step())

        async def tears(*_: object, **__: object) -> None:
            raise TornWeightsError("half of it")

        monkeypatch.setattr(room.engine, "commit", tears)
        with pytest.raises(ServiceError) as caught:
            await room.updates.commit(PUBLISHER, "u", progress.digest, None)
        assert caught.value.reason is Reason.QUARANTINED
        refusal = await refused(trainer.announce(trainer.step(), "next"))
        assert refusal.reason is Reason.BASE_MISMATCH
        assert "quarantined" in refusal.message


async def test_an_engine_that_takes_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with updating() as room, asyncio.timeout(60):
        trainer = Trainer(room, monkeypatch)
        info = room.engine.describe()
        object.__setattr__(info, "deltas", False)
        monkeypatch.setattr(room.engine, "describe", lambda: info)
        refusal = await refused(trainer.announce(trainer.step()))
        assert refusal.reason is Reason.UNSUPPORTED_ENCODING
        assert "the synthetic engine takes no deltas" in refusal.message

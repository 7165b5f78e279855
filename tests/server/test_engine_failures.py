"""An engine that cannot do what is asked: what the caller is told, and where the server stands."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import rollwire_transport as transport
import torch
from rollwire.reasons import Reason
from rollwire.types import ServerState, SleepingWeights, UpdatePhase
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_server.counters import UpdateOutcome
from rollwire_server.engines.base import ChangedWeightsError, EngineError, TornWeightsError
from rollwire_server.errors import ServiceError
from rollwire_server.weights.update import PublisherId, UpdateAnnouncement
from structlog.testing import capture_logs
from support.calls import connected, generate, reason_of, request
from support.checkpoints import dense
from support.engine_room import Room, joined, updating
from support.memory_link import MemoryLink
from support.publishing import Update, status
from support.servers import memory_limit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.servers import StartServer

PUBLISHER = PublisherId("trainer", 1)


def raising(error: Exception) -> Callable[..., Any]:
    async def call(*_: Any, **__: Any) -> None:
        raise error

    return call


async def staged(room: Room, monkeypatch: pytest.MonkeyPatch, value: float) -> int:
    """Update "u" of version 1, until it is staged; returns its digest."""
    link, sender = MemoryLink(), transport.Sender(room.manifest)
    tensors = {"weight": torch.full(room.manifest.tensors[0].shape, value)}
    sender.send(link, tensors.items, first_bucket=0, bucket_timeout=5)
    monkeypatch.setattr(transport, "open_link", lambda *_, **__: link)
    reports = room.updates.announce(
        UpdateAnnouncement(PUBLISHER, "u", 1, False, room.manifest, 30.0)
    )
    await anext(reports)
    await joined(room.updates, PUBLISHER, "u")
    while (await anext(reports)).phase is not UpdatePhase.STAGED:
        pass
    return sender.digest


# Commits.


@pytest.mark.parametrize(
    ("error", "reason", "state"),
    [
        (EngineError("it would not"), Reason.COMMIT_FAILED, ServerState.SERVING),
        (TornWeightsError("half of it"), Reason.QUARANTINED, ServerState.QUARANTINED),
    ],
)
async def test_a_commit_that_fails_is_told_by_the_log_first(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason, state: ServerState
) -> None:
    """Also where nobody waits for its answer any more."""
    async with updating() as room, asyncio.timeout(60):
        digest = await staged(room, monkeypatch, 1.0)
        monkeypatch.setattr(room.engine, "commit", raising(error))
        with capture_logs() as lines, pytest.raises(ServiceError) as caught:
            await room.updates.commit(PUBLISHER, "u", digest, max_kv_lag=None)
        assert caught.value.reason is reason
        assert room.state.current is state
        (failed,) = (line for line in lines if line["event"] == "commit failed")
        assert (failed["update_id"], failed["version"]) == ("u", 1)
        assert failed["reason"] == reason.name
        assert str(error) in failed["why"]
        states = [line for line in lines if line["event"] == "state"]
        assert all(lines.index(failed) < lines.index(line) for line in states)
        assert room.counters.updates == {UpdateOutcome.FAILED: 1}
        assert room.updates.current is None


async def test_a_version_with_other_content_is_a_failed_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        digest = await staged(room, monkeypatch, 1.0)
        await room.updates.commit(PUBLISHER, "u", digest, max_kv_lag=None)
        room.updates._commits.clear()  # as after many others
        digest = await staged(room, monkeypatch, 2.0)
        with capture_logs() as lines, pytest.raises(ServiceError) as caught:
            await room.updates.commit(PUBLISHER, "u", digest, max_kv_lag=None)
        assert caught.value.reason is Reason.VERSION_CONFLICT
        (failed,) = (line for line in lines if line["event"] == "commit failed")
        assert failed["reason"] == "VERSION_CONFLICT"
        assert room.counters.updates == {UpdateOutcome.COMMITTED: 1, UpdateOutcome.FAILED: 1}


# Whether what serves is intact.


async def test_only_weights_that_changed_are_not_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    async with updating() as room, asyncio.timeout(60):
        assert await room.updates.verify()
        monkeypatch.setattr(room.engine, "digests", raising(ChangedWeightsError("a bit")))
        assert not await room.updates.verify()
        monkeypatch.setattr(room.engine, "digests", raising(EngineError("they could not obey")))
        with pytest.raises(ServiceError, match="they could not obey") as caught:
            await room.updates.verify()
        assert caught.value.reason is Reason.ENGINE_FAILED


async def test_who_sleeps_is_not_verified(start_server: StartServer) -> None:
    async with connected(start_server().address) as api:
        await api.rollouts.Sleep(
            rollout_pb2.SleepRequest(weights=rollout_pb2.SLEEPING_WEIGHTS_DISCARD), timeout=60
        )
        assert (await status(api)).state == common_pb2.SERVER_STATE_SLEEPING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(api, verify=True)
        assert reason_of(caught.value) == "SLEEPING"


# Sleeping.


async def test_what_an_engine_cannot_do_to_its_weights_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        able = dataclasses.replace(
            room.engine.describe(),
            unsupported_sleep={SleepingWeights.HOST_BACKUP: "ask for DISCARD"},
        )
        monkeypatch.setattr(room.engine, "describe", lambda: able)
        await staged(room, monkeypatch, 1.0)
        with pytest.raises(ServiceError, match="ask for DISCARD") as caught:
            await room.sleep.sleep(SleepingWeights.HOST_BACKUP)
        assert caught.value.reason is Reason.UNSUPPORTED_SLEEP
        assert caught.value.reason.code is grpc.StatusCode.FAILED_PRECONDITION
        assert room.state.current is ServerState.SERVING
        assert room.updates.current is not None
        assert room.updates.current.phase is UpdatePhase.STAGED
        await room.sleep.sleep(SleepingWeights.DISCARD)
        assert room.state.current is ServerState.SLEEPING


@pytest.mark.parametrize("paused", [False, True])
async def test_a_server_whose_engine_does_not_fall_asleep_serves_on(
    monkeypatch: pytest.MonkeyPatch, paused: bool
) -> None:
    async with updating() as room, asyncio.timeout(60):
        if paused:
            await room.state.pause("p", 0)
        before = room.state.current
        with monkeypatch.context() as patch:
            patch.setattr(room.engine, "sleep", raising(EngineError("it did not end its steps")))
            with capture_logs() as lines, pytest.raises(ServiceError) as caught:
                await room.sleep.sleep(SleepingWeights.KEEP)
        assert caught.value.reason is Reason.ENGINE_FAILED
        assert caught.value.message == (
            f"it did not end its steps; nothing was freed, and the server is {before.value}"
        )
        assert room.state.current is before
        events = [(line["event"], line.get("state")) for line in lines]
        assert events == [
            ("state", "sleeping"), ("the server cannot fall asleep", None), ("state", before.value),
        ]  # fmt: skip
        await room.sleep.sleep(SleepingWeights.KEEP)
        assert room.state.current is ServerState.SLEEPING


# Memory that is not there, and checkpoints that are not.


async def test_an_update_without_memory_for_it(start_server: StartServer) -> None:
    size = 1 << 28
    server = start_server("--engine", "synthetic", "--engine-arg", f"weight_bytes={size}")
    async with connected(server.address) as api:
        tensors = {"weight": torch.empty(size // 4)}
        with memory_limit(server.process.pid, spare=size // 2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await Update(api, tensors, 1).announce()
            assert reason_of(caught.value) == "STAGING_FAILED"
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "an update of 256 MiB" in caught.value.details()
            assert (await generate(api, request((1,), 2))).reason == "LENGTH"
        again = Update(api, tensors, 1)
        await again.announce()
        await again.discard()


async def test_a_server_without_memory_to_wake_up_sleeps_on(start_server: StartServer) -> None:
    server = start_server("--context-length", "4096")  # 128 MiB of keys and values
    async with connected(server.address) as api:
        before = await generate(api, request((4, 5), 30, seed=1))
        kept = rollout_pb2.SleepRequest(weights=rollout_pb2.SLEEPING_WEIGHTS_KEEP)
        assert (await api.rollouts.Sleep(kept, timeout=60)).freed_bytes >= 1 << 27
        with memory_limit(server.process.pid, spare=80 << 20):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
            assert reason_of(caught.value) == "NO_MEMORY"
            assert "still sleeps" in caught.value.details()
            assert (await api.info()).state == common_pb2.SERVER_STATE_SLEEPING
        await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
        after = await generate(api, request((4, 5), 30, seed=1))
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


async def test_a_checkpoint_that_is_gone_when_the_server_wakes_up(
    start_server: StartServer, tmp_path: Path
) -> None:
    model = dense(tmp_path / "model")
    async with connected(start_server("--model", str(model)).address) as api:
        discard = rollout_pb2.SleepRequest(weights=rollout_pb2.SLEEPING_WEIGHTS_DISCARD)
        await api.rollouts.Sleep(discard, timeout=60)
        reload = rollout_pb2.WakeUpRequest(reload_checkpoint=True)
        shutil.move(model, tmp_path / "elsewhere")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await api.rollouts.WakeUp(reload, timeout=30)
        assert reason_of(caught.value) == "ENGINE_FAILED"
        assert "there is no such directory; the server still sleeps" in caught.value.details()
        assert (await api.info()).state == common_pb2.SERVER_STATE_SLEEPING
        shutil.move(tmp_path / "elsewhere", model)
        await api.rollouts.WakeUp(reload, timeout=30)
        assert (await generate(api, request((1,), 2))).reason == "LENGTH"


async def test_an_engine_that_fails_at_staging_lacks_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with updating() as room, asyncio.timeout(60):
        monkeypatch.setattr(room.engine, "stage", raising(EngineError("SGLang is dead")))
        announcement = UpdateAnnouncement(PUBLISHER, "u", 1, False, room.manifest, 30.0)
        held = "the server holds weights without a version, revision 0"
        with pytest.raises(ServiceError, match=f"SGLang is dead; {held}") as caught:
            await anext(room.updates.announce(announcement))
        assert caught.value.reason is Reason.ENGINE_FAILED

"""Much at once: streams that nobody reads, large manifests, calls that take the engine's time."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import rollwire_transport as transport
from rollwire.reasons import Reason
from rollwire.v1 import weights_pb2
from rollwire_server.counters import ServerCounters
from rollwire_server.engines.base import SamplingParams, SequenceSpec
from rollwire_server.errors import ServiceError
from rollwire_server.rpc.weight_service import MAX_ANNOUNCEMENTS, WeightService
from rollwire_server.sequences import registry
from rollwire_server.sequences.sequence import ReadyQueue, Request
from rollwire_server.weights.manager import UpdateManager
from rollwire_server.weights.state import WeightState
from support.calls import Generation, connected, reason_of, request, until
from support.engine_room import serving
from support.publishing import no_update

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_server.sequences.manager import Sequences
    from rollwire_server.sequences.sequence import Cursor
    from support.calls import Api
    from support.servers import StartServer


def tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "t", "dtype": "float32", "shape": [1], **fields}


def update(**manifest: Any) -> weights_pb2.UpdateWeightsRequest:
    """An announcement."""
    return weights_pb2.UpdateWeightsRequest(
        publisher={"id": "me", "term": 1}, update_id=uuid.uuid4().hex, version=1, manifest=manifest
    )


# What has ended.


def asked(sequences: Sequences, prompt: int, *, grace: float = 0.0) -> Request:
    key = sequences.next_key()
    spec = SequenceSpec(key, (7,) * prompt, SamplingParams(1))
    return Request(f"request {key}", 0, spec, detach_grace=grace)


def read(cursor: Cursor) -> None:
    while cursor.next_output(100) is not None:
        pass
    assert cursor.done


async def test_who_never_reads_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_BYTES", 1 << 20)
    async with serving() as (sequences, _, _), asyncio.timeout(60):
        unread = []
        for _ in range(8):  # of some 150 KB each
            unread.append(sequences.start(asked(sequences, 4000), ReadyQueue()))
            await sequences.wait_idle()
        with pytest.raises(ServiceError) as caught:
            sequences.start(asked(sequences, 4000), ReadyQueue())
        assert caught.value.reason is Reason.QUEUE_FULL
        for cursor in unread:
            read(cursor)
            sequences.detach(cursor)
        sequences.start(asked(sequences, 4000), ReadyQueue())
        await sequences.wait_idle()


async def test_of_what_is_kept_large_ones_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "MAX_BYTES", 1 << 20)
    async with serving() as (sequences, _, _), asyncio.timeout(60):
        ended = []
        for _ in range(20):
            cursor = sequences.start(asked(sequences, 4000, grace=60), ReadyQueue())
            await sequences.wait_idle()
            sequences.detach(cursor)
            ended.append(cursor.sequence.request)
        newest = sequences.start(ended[-1], ReadyQueue())
        assert newest.sequence.end is not None  # picked up
        sequences.detach(newest)
        oldest = sequences.start(ended[0], ReadyQueue())
        assert oldest.sequence.end is None  # begun anew


async def test_who_is_superseded_holds_nothing() -> None:
    async with serving() as (sequences, _, _), asyncio.timeout(60):
        asks = asked(sequences, 4000, grace=60)
        old = sequences.start(asks, ReadyQueue())
        new = sequences.start(asks, ReadyQueue())
        assert old.sequence is not new.sequence
        assert not old.sequence.request.spec.prompt
        chunk = old.next_output(10)
        assert chunk is not None
        assert chunk.end is not None
        sequences.detach(old)
        await sequences.wait_idle()
        read(new)


# Manifests.


def large_manifest(tensors: int) -> bytes:
    """An announcement of many tensors, each with a span, as bytes; a thousand again and again."""
    size = 2 * 64 * 64
    thousand = weights_pb2.Manifest(
        tensors=[
            tensor(name=f"model.layers.{i // 100}.mlp.experts.{i % 100}.down_proj.weight",
                   dtype="bfloat16", shape=(64, 64))
            for i in range(1000)
        ],
        buckets=[
            {
                "size": 1000 * size,
                "spans": [
                    {"tensor": i, "bucket_offset": i * size, "length": size} for i in range(1000)
                ],
            }
        ],
    )  # fmt: skip
    part = weights_pb2.UpdateWeightsRequest(manifest=thousand).SerializeToString()
    return update().SerializeToString() + part * (tensors // 1000)


BUCKETS = 150_000  # of 64 bytes, each with a part of the one tensor of a synthetic server


def many_buckets() -> bytes:
    """An announcement that is right."""
    spec = tensor(name="weight", shape=[64 * BUCKETS // 4])
    buckets = [
        {"size": 64, "spans": [{"tensor_offset": 64 * i, "length": 64}]} for i in range(BUCKETS)
    ]
    return update(tensors=[spec], buckets=buckets).SerializeToString()


@pytest.mark.parametrize(
    ("announced", "reason"),
    [(lambda: large_manifest(100_000), "MANIFEST_MISMATCH"), (many_buckets, "")],
    ids=["refused", "taken"],
)
async def test_others_are_served_while_a_large_manifest_is_read(
    start_server: StartServer, announced: Callable[[], bytes], reason: str
) -> None:
    """A stream goes on while 100,000 tensors, or as many buckets, are looked through."""
    server = start_server(
        "--engine", "synthetic", "--engine-arg", "tokens-per-second=50",
        "--engine-arg", f"weight-bytes={64 * BUCKETS}", "--context-length", "1000000",
    )  # fmt: skip
    async with connected(server.address) as api, connected(server.address) as other:
        stream = Generation(api, request((1,), None))
        arrivals: list[float] = []

        async def follow() -> None:
            while True:
                await stream.some(len(stream.output.tokens) + 1)
                arrivals.append(time.monotonic())

        following = asyncio.create_task(follow())
        silences = []
        for _ in range(5):  # a machine that is busy with other things is silent by itself too
            began, told, ended = await announce_raw(other, announced())
            assert told == reason
            between = [began, *(at for at in arrivals if began < at < ended), ended]
            longest = max(b - a for a, b in itertools.pairwise(between))
            # Of a loop that waits for it, the silence is nearly all.
            silences.append(longest / (ended - began))
            if silences[-1] < 0.3:
                break
            await no_update(other)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        stream.call.cancel()
    assert min(silences) < 0.3


async def announce_raw(api: Api, announcement: bytes) -> tuple[float, str, float]:
    """When an announcement began and was READY or refused, and the refusal if it was one."""
    method = api.channel.unary_stream("/rollwire.v1.WeightService/UpdateWeights")
    began, told = time.monotonic(), ""
    call = method(announcement, timeout=120)
    try:
        assert await call.read()  # ANNOUNCED
        assert await call.read()
    except grpc.aio.AioRpcError as error:
        told = reason_of(error)
    ended = time.monotonic()
    call.cancel()
    return began, told, ended


class Caller:
    """The other side of a call that only listens."""

    def time_remaining(self) -> None:
        return None

    async def write(self, message: object) -> None:
        pass


async def test_what_many_ask_for_at_once_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading all weights takes the engine's time; each announcement holds a manifest."""
    async with serving() as (sequences, state, engine), asyncio.TaskGroup() as tasks:
        weights = WeightState(engine, state, sequences, ServerCounters())
        await weights.loaded(sequences.weights)
        updates = UpdateManager(
            engine, state, weights, ServerCounters(), tasks, frozen=False, bucket_timeout=1,
            listen=transport.ListenOptions(),
        )  # fmt: skip
        service = WeightService(engine, state, updates)
        ready = asyncio.Event()
        looks = []
        digests, stage = engine.digests, engine.stage

        async def slow_digests() -> dict[str, int]:
            looks.append(1)
            await ready.wait()
            return await digests()

        async def slow_stage(manifest: transport.Manifest) -> Any:
            await ready.wait()
            return await stage(manifest)

        monkeypatch.setattr(engine, "digests", slow_digests)
        monkeypatch.setattr(engine, "stage", slow_stage)
        makers = []

        def receiver(*arguments: Any) -> transport.Receiver:
            makers.append(threading.current_thread())
            return make(*arguments)

        make = transport.Receiver
        monkeypatch.setattr(transport, "Receiver", receiver)

        async def verify() -> bool:
            asked = weights_pb2.GetWeightStatusRequest(verify=True)
            return (await service.GetWeightStatus(asked, Caller())).intact

        def announce() -> Any:
            manifest = {
                "tensors": [tensor(name="weight", shape=[1024])],
                "buckets": [{"size": 4096, "spans": [{"length": 4096}]}],
            }
            return service.UpdateWeights(update(**manifest), Caller())

        looking = [asyncio.create_task(verify()) for _ in range(50)]
        announcing = [asyncio.create_task(announce()) for _ in range(MAX_ANNOUNCEMENTS)]
        await until_waiting(looking + announcing)
        with pytest.raises(ServiceError, match="16 announcements are under way") as caught:
            await announce()
        assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
        ready.set()
        assert await asyncio.gather(*looking) == [True] * 50
        assert len(looks) == 1
        assert await verify()
        assert len(looks) == 2

        async def one_is_taken() -> bool:
            return updates.current is not None

        await until(one_is_taken, 60)
        assert threading.current_thread() not in makers  # it goes through the whole manifest
        for task in announcing:
            task.cancel()
        ends = await asyncio.gather(*announcing, return_exceptions=True)
        assert all(isinstance(end, ServiceError | asyncio.CancelledError) for end in ends)
        await updates.discard_current(Reason.DRAINING, "the test ends")


async def until_waiting(tasks: list[asyncio.Task[Any]]) -> None:
    """Lets tasks go on as far as they can."""
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)

"""Whatever a caller sends, it gets an answer with a name, and the server serves on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollwire.conversion import duration_to_proto
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2
from rollwire_client._rpc import conversion
from rollwire_transport import describe_all, plan
from support.calls import Api, connected, generate, reason_of, request
from support.examples import examples
from support.fuzzing import changed, messages
from support.publishing import DeltaUpdate, Update, publish, random_weights, status
from support.publishing import changed as modified

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message
    from support.servers import ServerProcess, StartServer

SERVICES = [
    rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"],
    weights_pb2.DESCRIPTOR.services_by_name["WeightService"],
]
METHODS = {m.name: m for service in SERVICES for m in service.methods}
SECONDS = 10
# A bug would be UNKNOWN, or INTERNAL without a reason of ours.
EXPECTED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.CANCELLED,  # by the test, which has seen enough
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def call(
    address: str,
    method: MethodDescriptor,
    sent: Sequence[Message | bytes],
    seconds: float = SECONDS,
) -> grpc.StatusCode:
    """How a call ends that sends some messages and reads a few; or a sequence of it, if a bug ended
    that.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda sent: (
                sent if isinstance(sent, bytes) else sent.SerializeToString()
            ),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )(timeout=seconds)
        bugs = {code.value[0]: code for code in grpc.StatusCode if code not in EXPECTED}
        try:
            for message in sent:
                await stream.write(message)
            await stream.done_writing()
            for _ in range(3):
                if (answer := await stream.read()) is grpc.aio.EOF:
                    break
                for event in getattr(answer, "events", ()):
                    if (code := bugs.get(event.error.code)) is not None and event.error.code:
                        return code
            else:
                stream.cancel()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass
        code: grpc.StatusCode = await stream.code()
        # What grpc.aio's client makes of a write to a call that the server has just ended.
        own = await stream.details() == "Internal error from Core"
        return grpc.StatusCode.CANCELLED if own else code


async def put_right(api: Api) -> None:
    """Takes back what fuzzed calls may have done: sleeping, pausing, an update under way."""
    await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
    await api.resume()
    await api.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=60)
    if (await api.info()).state == common_pb2.SERVER_STATE_AWAITING_WEIGHTS:
        await publish(api, await random_weights(api, 1))  # it had slept and discarded them


async def is_sound(server: ServerProcess) -> None:
    async with connected(server.address) as api:
        await put_right(api)
        assert (await generate(api, request((1, 2), 3))).reason == "LENGTH"
        await api.idle()


@pytest.mark.parametrize("name", METHODS)
def test_any_message_gets_an_answer(
    server: ServerProcess, runner: asyncio.Runner, name: str
) -> None:
    method = METHODS[name]
    count = 3 if method.client_streaming else 1
    sent = st.lists(messages(method.input_type), min_size=1, max_size=count)

    @settings(
        max_examples=examples(60),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sent=sent)
    def fuzz(sent: list[Message]) -> None:
        code = runner.run(call(server.address, method, sent))
        assert code is grpc.StatusCode.OK or code in EXPECTED

    fuzz()
    runner.run(is_sound(server))


async def sensible(api: Api, name: str) -> Message:
    """A message that a method would take, for a field of it to be changed."""
    ids: dict[str, Any] = {"update_id": "u", "publisher": {"id": "me", "term": 1 << 50}}
    generation = request(
        (1, 2), 3, prefix=(4,), temperature=0.5, top_p=0.9, top_k=5, min_p=0.01, seed=1,
        min_new_tokens=1, stop_token_ids=[7], top_logprobs=1, prompt_logprobs=True,
        timeout=5.0, grace=0.01, attempt=1, min_weight_version=None, max_weight_version=1 << 50,
    )  # fmt: skip
    manifest = conversion.manifest_to_proto(
        plan(describe_all(await random_weights(api, 1)), bucket_bytes=65536)
    )
    made: dict[str, Message] = {
        "Generate": generation,
        "StreamRollouts": rollout_pb2.StreamRolloutsRequest(handle=1, start=generation),
        "Abort": rollout_pb2.AbortRequest(sequences=[rollout_pb2.SequenceKey(request_id="r")]),
        "Pause": rollout_pb2.PauseRequest(pause_id="p", lease=duration_to_proto(0.1)),
        "UpdateWeights": weights_pb2.UpdateWeightsRequest(
            **ids, version=1, allow_version_rollback=True, manifest=manifest,
            stage_lease=duration_to_proto(5.0),
        ),
        "JoinTransport": weights_pb2.JoinTransportRequest(
            **ids, step=weights_pb2.JOIN_STEP_PREPARE, epoch="e", backend="gloo", ranks=[1],
            world_size=2, host="127.0.0.1",
        ),
        "CommitWeights": weights_pb2.CommitWeightsRequest(**ids, expected_digest=1),
        "DiscardUpdate": weights_pb2.DiscardUpdateRequest(**ids),
    }  # fmt: skip
    return made.get(name) or GetMessageClass(METHODS[name].input_type)()


async def sensible_delta(api: Api) -> Message:
    """An announcement that a server takes which serves the checkpoint of the synthetic engine."""
    base = {name: torch.zeros_like(t) for name, t in (await random_weights(api, 1)).items()}
    delta = DeltaUpdate(api, modified(base, 1), base=base, bucket_bytes=1024)
    announcement = await sensible(api, "UpdateWeights")
    assert isinstance(announcement, weights_pb2.UpdateWeightsRequest)
    announcement.manifest.CopyFrom(conversion.manifest_to_proto(delta.manifest))
    return announcement


async def under_way(api: Api, *, staged: bool) -> Update:
    """An update of the publisher of ``sensible``."""
    change = Update(api, await random_weights(api, 1), publisher="me", term=1 << 50)
    await change.announce()
    if staged:
        await change.transfer()
    return change


def aim(message: Any, told: str, at: Update) -> None:
    """Makes a message one about this update, but for the field that was changed."""
    for name in ("update_id", "epoch", "expected_digest"):
        if name not in message.DESCRIPTOR.fields_by_name or told.startswith(name):
            continue
        right = at.sender.digest if name == "expected_digest" else at.update_id
        setattr(message, name, f"{right}{told}" if name == "epoch" else right)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
async def test_any_value_of_any_field_gets_an_answer(start_server: StartServer, name: str) -> None:
    """All else of the message makes sense, so that the value comes as far as it can."""
    samples = name in ("Generate", "StreamRollouts")
    server = start_server("--engine", "embedded" if samples else "synthetic")
    async with connected(server.address) as api:
        right = await sensible(api, name)
        if samples:
            assert await call(server.address, METHODS[name], [right]) is grpc.StatusCode.OK
        sent = list(changed(right))
        if name == "UpdateWeights":
            delta = await sensible_delta(api)
            assert await call(server.address, METHODS[name], [delta]) is grpc.StatusCode.CANCELLED
            sent += changed(delta)
        for told, message in sent:
            if samples:  # else it would pick the last one up
                generation = getattr(message, "start", message)
                if "request_id" not in told:
                    generation.request_id = uuid.uuid4().hex
                if "min_weight_version" in told:  # it waits for weights that do not come
                    generation.timeout.CopyFrom(duration_to_proto(0.1))
            if name in ("JoinTransport", "CommitWeights", "DiscardUpdate"):
                if not (await status(api)).update_id:
                    change = await under_way(api, staged=name == "CommitWeights")
                aim(message, told, change)
            seconds = 0.2 if name == "JoinTransport" else SECONDS  # nobody is there to be met
            code = await call(server.address, METHODS[name], [message], seconds)
            assert code is grpc.StatusCode.OK or code in EXPECTED, told
            if name in ("Sleep", "WakeUp", "Pause"):
                await put_right(api)
            await api.info()
            await status(api)
    await is_sound(server)


@pytest.mark.parametrize("version", [0, 2**31, 2**63 - 1])
async def test_a_version_that_is_taken_is_served(start_server: StartServer, version: int) -> None:
    """Committed, told, bound to and rolled back, whatever it is."""
    server = start_server("--engine", "synthetic", "--metrics-listen", "127.0.0.1:0")
    async with connected(server.address) as api:
        tensors = await random_weights(api, 1)
        await Update(api, tensors, version).publish()
        for message in (
            request((1,), 3, min_weight_version=version),
            request((1,), 3, max_weight_version=version),
        ):
            assert {tag.version for tag in (await generate(api, message)).tags} == {version}
        assert (await api.info()).highest_version == version
        assert (await status(api)).weights.version == version
        await Update(api, await random_weights(api, 2), 0, rollback=True).publish()
        info = await api.info()
        assert (info.weights.version, info.highest_version) == (0, version)


@pytest.mark.parametrize("version", [-1, -(2**63)])
async def test_a_negative_version_is_refused_before_anything_is_touched(
    server: ServerProcess, version: int
) -> None:
    async with connected(server.address) as api:
        before = await status(api)
        change = Update(api, await random_weights(api, 1), version, term=1 << 50, rollback=True)
        with pytest.raises(grpc.aio.AioRpcError, match=f"version {version} is negative") as caught:
            await change.announce()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert reason_of(caught.value) == "BAD_REQUEST"
        assert await status(api) == before
        await api.info()


@pytest.mark.parametrize("name", METHODS)
def test_any_bytes_get_an_answer(server: ServerProcess, runner: asyncio.Runner, name: str) -> None:
    """Bytes of no meaning, and messages of which some are missing or changed."""
    method = METHODS[name]

    @settings(
        max_examples=examples(40),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sent=st.binary(max_size=60), message=messages(method.input_type), data=st.data())
    def fuzz(sent: bytes, message: Message, data: st.DataObject) -> None:
        whole = message.SerializeToString()
        start, stop = sorted(data.draw(st.integers(0, len(whole))) for _ in range(2))
        for raw in (sent, whole[:start] + sent[:4] + whole[stop:]):
            code = runner.run(call(server.address, method, [raw]))
            assert code is grpc.StatusCode.OK or code in EXPECTED

    fuzz()
    runner.run(is_sound(server))


@pytest.mark.parametrize("name", METHODS)
async def test_what_is_no_message_is_refused_by_name(server: ServerProcess, name: str) -> None:
    method = METHODS[name]
    async with grpc.aio.insecure_channel(server.address) as channel:
        path = f"/{method.containing_service.full_name}/{name}"
        stream = channel.stream_stream(path)(iter([b"\xff\xff\xff"]), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match=f"it is not a request of {name}") as caught:
            await stream.read()
        assert reason_of(caught.value) == "BAD_REQUEST"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS, where there is none
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 1000,
        random.Random(1).randbytes(100_000),
    ],
)
async def test_what_comes_over_tcp_hurts_nobody(server: ServerProcess, sent: bytes) -> None:
    host, _, port = server.address.rpartition(":")
    for _ in range(20):
        _, writer = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError):
            writer.write(sent)
            await writer.drain()
        writer.close()
    await is_sound(server)

"""Whatever a caller sends, it gets an answer with a name, and the server serves on."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2
from support.calls import Api, connected, generate, reason_of, request
from support.fuzzing import messages
from support.publishing import publish, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from google.protobuf.descriptor import MethodDescriptor
    from google.protobuf.message import Message
    from support.servers import ServerProcess

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
    grpc.StatusCode.CANCELLED,  # by the test, which has seen enough
}


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def call(
    address: str, method: MethodDescriptor, sent: Sequence[Message | bytes]
) -> grpc.StatusCode:
    """How a call ends that sends some messages and reads a few."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda sent: (
                sent if isinstance(sent, bytes) else sent.SerializeToString()
            ),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )(timeout=SECONDS)
        try:
            for message in sent:
                await stream.write(message)
            await stream.done_writing()
            for _ in range(3):
                if await stream.read() is grpc.aio.EOF:
                    break
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
    await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=SECONDS)
    await api.resume()
    await api.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=SECONDS)
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
        max_examples=60, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(sent=sent)
    def fuzz(sent: list[Message]) -> None:
        code = runner.run(call(server.address, method, sent))
        assert code is grpc.StatusCode.OK or code in EXPECTED

    fuzz()
    runner.run(is_sound(server))


@pytest.mark.parametrize("name", METHODS)
def test_any_bytes_get_an_answer(server: ServerProcess, runner: asyncio.Runner, name: str) -> None:
    """Bytes of no meaning, and messages of which some are missing or changed."""
    method = METHODS[name]

    @settings(
        max_examples=40, deadline=None, derandomize=True, database=None,
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
        stream = channel.stream_stream(path)(iter([b"\xff\xff\xff"]), timeout=SECONDS)
        with pytest.raises(grpc.aio.AioRpcError, match=f"not what {name} takes") as caught:
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

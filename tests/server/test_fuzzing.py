"""Whatever a caller sends, it gets an answer with a name, and the server serves on."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2
from support.calls import Api, connected, generate, request
from support.fuzzing import messages
from support.publishing import publish, random_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

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


async def call(address: str, method: MethodDescriptor, sent: list[Message]) -> grpc.StatusCode:
    """How a call ends that sends some messages and reads a few."""
    async with grpc.aio.insecure_channel(address) as channel:
        stream: Any = channel.stream_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
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

    async def is_sound() -> None:
        async with connected(server.address) as api:
            await put_right(api)
            assert (await generate(api, request((1, 2), 3))).reason == "LENGTH"
            await api.idle()

    fuzz()
    runner.run(is_sound())

"""Calls that are many, and messages that are large, do not come whole, or are nothing but parts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given, settings
from rollwire.reasons import Reason
from rollwire.v1 import rollout_pb2, weights_pb2
from rollwire_server.counters import ServerCounters
from rollwire_server.endpoints import MAX_HEALTH_CALLS
from rollwire_server.errors import ServiceError, abort
from rollwire_server.rpc import interceptor
from rollwire_server.rpc.interceptor import (
    CONCURRENT_MESSAGES,
    LARGE_BYTES,
    CallInterceptor,
    has_at_most,
    message_fields,
)
from support.calls import connected, generate, reason_of, request, until
from support.examples import examples
from support.fuzzing import messages
from support.raw_calls import RawCalls, give_up
from support.servers import resident_bytes, servers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from google.protobuf.message import Message
    from support.servers import ServerProcess, StartServer

SYNTHETIC = ("--engine", "synthetic", "--health-listen", "127.0.0.1:0")
ROLLOUTS = "/rollwire.v1.RolloutService/"
ELSEWHERE = "127.0.0.2"
LARGE = bytes(LARGE_BYTES - 100)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server without a model, with a port for health."""
    with servers(tmp_path_factory.mktemp("limits")) as start:
        yield start(*SYNTHETIC)


@contextlib.asynccontextmanager
async def under_way(
    server: ServerProcess, calls: RawCalls, local: str | None = None, *, least: int = 0
) -> AsyncIterator[None]:
    """Calls of which the server has taken in what it takes in, ``least`` bytes at the least."""
    task = asyncio.create_task(calls.run(server.address, local))
    try:
        before, quiet_since = -1, time.monotonic()
        while calls.sent <= least or time.monotonic() - quiet_since < 1.0:
            if calls.sent != before:
                before, quiet_since = calls.sent, time.monotonic()
            await asyncio.sleep(0.05)
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("method", ["Generate", "StreamRollouts", "Pause"])
async def test_who_has_no_token_sends_nothing(
    start_server: StartServer, tmp_path: Path, method: str
) -> None:
    flags = []
    for scope in ("rollout", "control"):
        (tmp_path / scope).write_text(scope)
        flags += [f"--{scope}-token-file", str(tmp_path / scope)]
    server = start_server(*SYNTHETIC, *flags)
    calls = RawCalls(ROLLOUTS + method, 10, LARGE)
    async with under_way(server, calls):
        assert calls.sent < len(LARGE)  # what goes out before the refusal has come back


async def test_messages_that_do_not_come_whole_take_little_and_hinder_nobody_else(
    quick: ServerProcess,
) -> None:
    before = resident_bytes(quick.process.pid)
    calls = RawCalls(ROLLOUTS + "GetServerInfo", CONCURRENT_MESSAGES * 2, LARGE)
    async with under_way(quick, calls, ELSEWHERE, least=len(LARGE)):
        assert calls.sent < 1.2 * CONCURRENT_MESSAGES * len(LARGE)
        grown = resident_bytes(quick.process.pid) - before
        assert grown < 1.5 * CONCURRENT_MESSAGES * LARGE_BYTES
        async with connected(quick.address) as api:
            assert (await generate(api, request((1,), 3))).reason == "LENGTH"


@contextlib.asynccontextmanager
async def receiving(most_calls: int) -> AsyncIterator[grpc.aio.Channel]:
    """A server of two methods that answer at once, one of them to a stream; two more fail."""

    async def answer(_: Any, __: Any) -> bytes:
        return b""

    async def fail(_: Any, __: Any) -> bytes:
        raise ServiceError(Reason.INTERNAL, "as it always does")

    server = grpc.aio.server(interceptors=[CallInterceptor(most_calls, ServerCounters())])
    handlers = {
        "One": grpc.unary_unary_rpc_method_handler(answer, bytes),
        "Many": grpc.stream_unary_rpc_method_handler(answer, bytes),
        "Fails": grpc.unary_unary_rpc_method_handler(fail, bytes),
        "StreamFails": grpc.unary_stream_rpc_method_handler(fail, bytes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


async def test_streams_that_wait_for_a_command_keep_none(quick: ServerProcess) -> None:
    large = rollout_pb2.GenerateRequest(session_id="n" * len(LARGE))  # and no request_id
    command = rollout_pb2.StreamRolloutsRequest(handle=1, start=large)
    before = resident_bytes(quick.process.pid)
    async with connected(quick.address) as api:
        calls = [api.rollouts.StreamRollouts(timeout=60) for _ in range(6)]
        for call in calls:
            await call.write(command)
            (refused,) = (await call.read()).events
            assert refused.error.reason == "BAD_REQUEST"
        assert resident_bytes(quick.process.pid) - before < 3 * LARGE_BYTES


async def test_answers_that_nobody_takes_take_little(quick: ServerProcess) -> None:
    keys = [rollout_pb2.SequenceKey(request_id="n" * 250)] * 10_000
    abort = rollout_pb2.AbortRequest(sequences=keys).SerializeToString()
    calls = RawCalls(ROLLOUTS + "Abort", 100, abort, whole=True, takes=0)
    async with under_way(quick, calls, ELSEWHERE, least=len(abort)):
        assert calls.sent < 2 * CONCURRENT_MESSAGES * len(abort)  # the others wait their turn
        async with connected(quick.address) as api:
            assert (await generate(api, request((1,), 3))).reason == "LENGTH"
            assert await api.abort("unknown") == (0, ["unknown"])


async def test_a_message_that_does_not_come_is_waited_for_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(interceptor, "MESSAGE_SECONDS", 0.1)
    async with receiving(10) as channel:
        for _ in range(20):  # more than there may be at once
            with pytest.raises(grpc.aio.AioRpcError, match="did not arrive completely") as caught:
                await channel.stream_stream("/a/One")(timeout=60).read()
            assert reason_of(caught.value) == "TIMED_OUT"
        monkeypatch.undo()
        assert await channel.unary_unary("/a/One")(b"", timeout=60) == b""
        assert await channel.stream_stream("/a/Many")(timeout=60).read() == b""


async def test_a_call_without_a_message(server: ServerProcess) -> None:
    async with connected(server.address) as api:
        for name in ("GetServerInfo", "Generate"):
            call = api.channel.stream_stream(ROLLOUTS + name)(iter([]), timeout=60)
            with pytest.raises(grpc.aio.AioRpcError, match="no message arrived") as caught:
                await call.read()
            assert reason_of(caught.value) == "BAD_REQUEST"


REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


@pytest.mark.parametrize("method", [ROLLOUTS + "StreamRollouts", REFLECTION])
async def test_what_is_no_message_in_a_stream(server: ServerProcess, method: str) -> None:
    async with connected(server.address) as api:
        call = api.channel.stream_stream(method)(iter([b"\x0a\x05a"]), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed") as caught:
            await call.read()
        assert reason_of(caught.value) == "BAD_REQUEST"


# Many calls.


async def test_calls_of_a_method_are_counted() -> None:
    """And they may be as many again once those are gone, however they went."""
    async with receiving(3) as channel:
        for _ in range(3):
            silent = [channel.stream_stream("/a/One")(timeout=60) for _ in range(4)]
            ends = [asyncio.ensure_future(call.code()) for call in silent]
            done, waiting = await asyncio.wait(
                ends, timeout=30, return_when=asyncio.FIRST_COMPLETED
            )
            assert [end.result() for end in done] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert len(waiting) == 3
            with pytest.raises(grpc.aio.AioRpcError, match="3 calls of One by ipv4") as caught:
                await channel.unary_unary("/a/One")(b"", timeout=60)
            assert reason_of(caught.value) == "TOO_MANY_CALLS"
            assert await channel.stream_unary("/a/Many")(iter([b""]), timeout=60) == b""
            for call in silent:
                call.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

            async def is_open() -> bool:
                call = channel.unary_unary("/a/One")(b"", timeout=60)
                return await call.code() is grpc.StatusCode.OK

            await until(is_open, 60)


@pytest.mark.parametrize("method", ["/a/Fails", "/a/StreamFails"])
async def test_a_call_counts_until_its_error_is_sent(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The error holds the message, which may be large, and goes no faster than the client reads."""
    failed, reads = asyncio.Event(), asyncio.Event()

    async def abort_slowly(context: Any, error: ServiceError) -> None:
        if error.reason is Reason.INTERNAL:
            failed.set()
            await reads.wait()
        await abort(context, error)

    monkeypatch.setattr(interceptor, "abort", abort_slowly)
    async with receiving(1) as channel:
        call = channel.stream_stream(method)

        async def reason() -> str | None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(iter([b""]), timeout=60).read()
            return reason_of(caught.value)

        first = asyncio.create_task(reason())
        async with asyncio.timeout(60):
            await failed.wait()
            assert await reason() == "TOO_MANY_CALLS"
            reads.set()
            assert await first == "INTERNAL"


@pytest.mark.parametrize("port", ["listen", pytest.param("health_listen", marks=pytest.mark.slow)])
async def test_calls_that_are_given_up_at_once_take_nothing(
    start_server: StartServer, port: str
) -> None:
    """Each would be some twelve kilobytes, for as long as the server is behind with them."""
    server = start_server(*SYNTHETIC)
    address = server.listens(port)
    before = resident_bytes(server.process.pid)
    await give_up(address, "/grpc.health.v1.Health/Check", 40_000)
    assert resident_bytes(server.process.pid) - before < 120 << 20
    async with connected(server.address) as api:
        assert (await generate(api, request((1,), 3))).reason == "LENGTH"


async def test_health_takes_names_of_services(quick: ServerProcess) -> None:
    """Whoever watches a service, without any token, has its name kept."""
    name = health_pb2.HealthCheckRequest(service="n" * (1 << 20))
    for address in (quick.address, quick.listens("health_listen")):
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for call in (health.Check(name, timeout=60), health.Watch(name, timeout=60).read()):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED,
                )  # fmt: skip
            await health.Check(health_pb2.HealthCheckRequest(), timeout=60)


async def test_watchers_of_health_are_counted(quick: ServerProcess) -> None:
    every = health_pb2.HealthCheckRequest()
    own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with (
        grpc.aio.insecure_channel(quick.listens("health_listen"), options=own) as many,
        grpc.aio.insecure_channel(quick.listens("health_listen"), options=own) as channel,
    ):
        watched = health_pb2_grpc.HealthStub(many).Watch
        watching = [watched(every, timeout=60) for _ in range(MAX_HEALTH_CALLS)]
        for call in watching:
            await call.read()
        health = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health.Watch(every, timeout=60).read()
        assert reason_of(caught.value) == "TOO_MANY_CALLS"
        await health.Check(every, timeout=60)  # probes are answered all the same


# Messages of many parts.


@pytest.mark.parametrize(
    ("method", "part"),
    [
        (ROLLOUTS + "Abort", b"\x0a\x00"),
        pytest.param(
            "/rollwire.v1.WeightService/UpdateWeights",
            b"\x2a\x02\x0a\x00",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_what_is_nothing_but_parts_is_not_parsed(
    server: ServerProcess, method: str, part: bytes
) -> None:
    """Others are served meanwhile."""
    name = method.rpartition("/")[2]
    size = (LARGE_BYTES if name == "UpdateWeights" else 4 << 20) // len(part)
    before = resident_bytes(server.process.pid)
    async with connected(server.address) as api:
        call = api.channel.stream_stream(method)(iter([part * size]), timeout=60)
        with pytest.raises(grpc.aio.AioRpcError, match="the limit of") as caught:
            await call.read()
        assert reason_of(caught.value) == "BAD_REQUEST"
        assert (await generate(api, request((1,), 3))).reason == "LENGTH"
    assert resident_bytes(server.process.pid) - before < 5 * LARGE_BYTES


def counted(message: Message) -> int:
    """Fields of a message, and of those inside that hold messages, as they go over a wire."""
    count = 0
    for field, value in message.ListFields():
        values = list(value) if field.is_repeated else [value]
        packed = field.is_repeated and field.is_packed
        count += 1 if packed else len(values)
        if field.message_type is not None and message_fields(field.message_type):
            count += sum(counted(inner) for inner in values)
    return count


ANNOUNCEMENT = weights_pb2.UpdateWeightsRequest


@settings(max_examples=examples(60))
@given(message=messages(ANNOUNCEMENT.DESCRIPTOR))
def test_fields_are_counted_as_they_are(message: Message) -> None:
    fields, data = message_fields(ANNOUNCEMENT.DESCRIPTOR), message.SerializeToString()
    count = counted(message)
    assert has_at_most(count, data, fields)
    assert not count or not has_at_most(count - 1, data, fields)


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05a", b"\x2a\x02\x0a\x05", b"\x80" * 20, b"\x0b\x0c", b"\x0d\x00"]
)
def test_what_cannot_be_read_has_no_number_of_fields(data: bytes) -> None:
    assert not has_at_most(1000, data, message_fields(ANNOUNCEMENT.DESCRIPTOR))

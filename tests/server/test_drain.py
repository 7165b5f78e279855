"""SIGTERM in every state: what runs may end, the rest goes on elsewhere, the server goes."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from rollwire.v1 import common_pb2, rollout_pb2, weights_pb2
from support.calls import (
    Api,
    Generation,
    Output,
    Stream,
    connected,
    generate,
    reason_of,
    request,
)
from support.health import ready
from support.publishing import Update, random_weights

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.servers import StartServer

LONG = 4000


async def test_sigterm_drains(start_server: StartServer) -> None:
    server = start_server("--drain-seconds", "300")
    async with connected(server.address) as api:
        generation = Generation(api, request((1,), 400))
        await generation.some(5)
        await api.pause()  # so that it does not end before it is looked at
        server.process.send_signal(signal.SIGTERM)
        await api.reaches(common_pb2.SERVER_STATE_DRAINING)
        assert not await ready(server.address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request())
        assert reason_of(caught.value) == "DRAINING"
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await api.resume()
        output = await generation.all()
        assert output.reason == "LENGTH"
        assert len(output.tokens) == 400
    assert await asyncio.to_thread(server.ended) == 0


@pytest.mark.parametrize("how", ["limit", "second signal"])
async def test_a_drain_ends_what_takes_too_long(start_server: StartServer, how: str) -> None:
    server = start_server("--drain-seconds", "0.2" if how == "limit" else "100")
    async with connected(server.address) as api:
        generation = Generation(api, request((1,), LONG))
        held = Generation(api, request((2,), LONG))
        await generation.some(5)
        await held.some(1)
        await api.pause()
        server.process.send_signal(signal.SIGTERM)
        if how == "second signal":
            await api.reaches(common_pb2.SERVER_STATE_DRAINING)
            server.process.send_signal(signal.SIGTERM)
        for one in (generation, held):
            output = await one.all()
            assert output.reason == "INTERRUPTED"
            assert output.finish is not None
            assert output.finish.output_tokens == len(output.tokens) > 0
    assert await asyncio.to_thread(server.ended) == 0


async def test_a_drain_discards_an_update_and_the_server_goes(start_server: StartServer) -> None:
    server = start_server()
    async with connected(server.address) as api:
        change = Update(api, await random_weights(api, 1), 1)
        await change.announce()
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await change.until(0)
        assert reason_of(caught.value) == "DRAINING"
    assert await asyncio.to_thread(server.ended) == 0


async def test_a_cut_stream_is_picked_up_while_the_server_drains(
    start_server: StartServer,
) -> None:
    server = start_server("--engine", "synthetic", "--engine-arg", "tokens-per-second=20")
    async with connected(server.address) as api:
        message = request((1,), 100, request_id="mine", grace=20.0)
        first = Generation(api, message)
        got = list((await first.some(5)).tokens)
        server.process.send_signal(signal.SIGTERM)
        await api.reaches(common_pb2.SERVER_STATE_DRAINING)
        first.call.cancel()
        message.output_token_ids.extend(got)
        rest = await generate(api, message)
        assert len(got) + len(rest.tokens) == 100
        assert rest.reason == "LENGTH"
    assert await asyncio.to_thread(server.ended) == 0


async def _ended(call: Awaitable[object]) -> str:
    """How a call ended: a sequence's finish, an error's reason, "done" or "gone"."""
    try:
        output = await call
    except grpc.aio.AioRpcError as error:
        if "grpc-status-details-bin" not in dict(error.trailing_metadata() or ()):
            return "gone"  # it came when the server listened no more: gRPC itself hung up
        return reason_of(error)
    return output.reason if isinstance(output, Output) else "done"


async def _asleep(api: Api) -> list[Awaitable[object]]:
    await api.rollouts.Sleep(rollout_pb2.SleepRequest(), timeout=60)
    return []


async def _paused_for_ever(api: Api) -> list[Awaitable[object]]:
    await api.rollouts.Pause(rollout_pb2.PauseRequest(lease=Duration()), timeout=60)
    held = [generate(api, request((i,), LONG)) for i in range(3)]
    calls = [asyncio.create_task(call) for call in held]
    await api.held(3)
    return [*calls]


async def _detached(api: Api) -> list[Awaitable[object]]:
    generation = Generation(api, request((1,), LONG, grace=60))
    await generation.some(1)
    generation.call.cancel()
    return []


async def _awaiting_a_version(api: Api) -> list[Awaitable[object]]:
    call = asyncio.create_task(generate(api, request(min_weight_version=9, timeout=100)))
    await api.waits(1)
    return [call]


async def _deaf(api: Api) -> list[Awaitable[object]]:
    """A stream that nobody reads."""
    stream = Stream(api)
    for handle in range(8):
        await stream.start(handle, request((handle + 1,), LONG, top_logprobs=20))
    await api.until(lambda info: info.kv_tokens_used > 8 * 100)
    return []


async def _announced(api: Api) -> list[Awaitable[object]]:
    change = Update(api, await random_weights(api, 1), 1)
    await change.announce()
    return [change.until(weights_pb2.UPDATE_PHASE_STAGED)]


async def _joining(api: Api) -> list[Awaitable[object]]:
    """A server in a group of which the others never come."""
    change = Update(api, await random_weights(api, 1), 1)
    await change.announce()
    await change.prepare("e", world_size=3)
    return [change.until(weights_pb2.UPDATE_PHASE_STAGED)]


async def _staged(api: Api) -> list[Awaitable[object]]:
    await Update(api, await random_weights(api, 1), 1, lease=100).stage()
    return []


async def _committing(api: Api) -> list[Awaitable[object]]:
    change = Update(api, await random_weights(api, 1), 1)
    await change.stage()
    return [asyncio.create_task(change.commit())]


STATES: dict[str, tuple[Callable[[Api], Awaitable[list[Awaitable[object]]]], set[str]]] = {
    "asleep": (_asleep, set()),
    "paused": (_paused_for_ever, {"INTERRUPTED"}),
    "with a sequence that nobody reads any more": (_detached, set()),
    "with one that waits for a version": (_awaiting_a_version, {"INTERRUPTED"}),
    "with a reader that is deaf": (_deaf, set()),
    "with an update announced": (_announced, {"DRAINING"}),
    "with a group that never meets": (_joining, {"DRAINING"}),
    "with an update staged": (_staged, set()),
    "in a commit": (_committing, {"done", "DRAINING", "gone"}),
}


FAST = {"paused", "in a commit"}


@pytest.mark.parametrize(
    "state",
    [pytest.param(s, marks=[] if s in FAST else [pytest.mark.slow]) for s in STATES],
)
async def test_sigterm_in_any_state(start_server: StartServer, state: str) -> None:
    server = start_server("--drain-seconds", "1")
    prepare, ends = STATES[state]
    async with connected(server.address) as api:
        calls = await prepare(api)
        server.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert {await _ended(call) for call in calls} <= ends
            assert await asyncio.to_thread(server.ended) == 0

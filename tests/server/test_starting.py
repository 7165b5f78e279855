"""What ends a server before it serves: here the server is in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import grpc
import pytest
import rollwire_transport
import structlog
from rollwire_server.endpoints import Endpoints
from rollwire_server.engines.synthetic import SyntheticEngine
from rollwire_server.server import EngineDied, RolloutServer
from rollwire_server.settings import ServerSettings
from support.calls import Stream, connected, generate, reason_of, request

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from rollwire_server.metrics import Metrics

SETTINGS = ServerSettings(model="none", engine="synthetic", listen="127.0.0.1:0")


@pytest.fixture(autouse=True)
def handlers_of_signals() -> Iterator[None]:
    """A server keeps those that it has set: its process ends with it."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def run(
    preparing: Callable[[RolloutServer], Coroutine[object, object, object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs a server, which must never serve, to its end."""
    loop = asyncio.get_running_loop()
    server = RolloutServer(SETTINGS)

    def prepare(*_: object) -> None:
        asyncio.run_coroutine_threadsafe(preparing(server), loop).result(60)

    monkeypatch.setattr(rollwire_transport, "warm_up", prepare)
    with structlog.testing.capture_logs() as lines:
        try:
            async with asyncio.timeout(60):
                await server.run()
        finally:
            assert "ready" not in [line["event"] for line in lines]
            states = [line["state"] for line in lines if line["event"] == "state"]
            assert set(states) <= {"draining"}
            died = [line["exc_info"] for line in lines if line["event"] == "the engine died"]
            assert all(isinstance(error, MemoryError) for error in died), "a bug has a traceback"


def failing_step(self: SyntheticEngine, state: object) -> None:
    raise MemoryError("out of luck")


async def test_an_engine_that_dies_while_the_server_prepares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def dies(server: RolloutServer) -> None:
        monkeypatch.setattr(SyntheticEngine, "_step", failing_step)
        server._engine._changed.set()
        await server._engine._task

    with pytest.raises(EngineDied, match="out of luck"):
        await run(dies, monkeypatch)


async def test_an_engine_that_dies_as_soon_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(server: RolloutServer) -> None:
        await server._engine._task

    monkeypatch.setattr(SyntheticEngine, "_step", failing_step)
    with pytest.raises(EngineDied, match="out of luck"):
        await run(nothing, monkeypatch)


async def test_a_signal_while_the_server_prepares(monkeypatch: pytest.MonkeyPatch) -> None:
    async def signalled(server: RolloutServer) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await server._stopping.wait()

    await run(signalled, monkeypatch)


async def test_requests_while_the_model_loads_are_called_what_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Endpoints] = []
    start = Endpoints.start

    async def starting(self: Endpoints, metrics: Metrics) -> None:
        await start(self, metrics)
        started.append(self)

    async def asked(server: RolloutServer) -> None:
        async with connected(started[0].addresses["listen"]) as api:
            with pytest.raises(grpc.aio.AioRpcError, match="Generate is refused") as caught:
                await generate(api, request((1,), 3))
            assert reason_of(caught.value) == "STARTING"
            stream = Stream(api)
            await stream.start(1, request((1,), 3))
            (output,) = (await stream.all()).values()
            assert output.error is not None
            assert output.error.reason == "STARTING"
            assert output.error.message.startswith("Generate is refused while the server is")
        server._stopping.set()

    monkeypatch.setattr(Endpoints, "start", starting)
    await run(asked, monkeypatch)

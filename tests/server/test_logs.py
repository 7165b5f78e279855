"""What the log says of a server's life, and what it never says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import structlog
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_server import logs
from rollwire_server.counters import ServerCounters
from rollwire_server.logs import REFUSALS_A_SECOND
from rollwire_server.rpc.interceptor import CallInterceptor
from support.calls import Api, Generation, Stream, connected, generate, reason_of, request
from support.certificates import Authority
from support.publishing import Update, no_update, random_weights

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from rollwire.v1 import weights_pb2
    from support.servers import ServerProcess, StartServer

ROLLOUT, CONTROL = "a-token-for-rollouts", "a-token-for-control"
WRONG = ["a-token-of-somebody-else", CONTROL[:-1], ROLLOUT + "x"]

Line = dict[str, Any]


@dataclass
class Noting(Update):
    """An update that remembers the names of its groups."""

    epochs: list[str] = field(default_factory=list)

    async def prepare(self, epoch: str, **change: object) -> weights_pb2.JoinTransportResponse:
        self.epochs.append(epoch)
        return await super().prepare(epoch, **change)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@contextlib.asynccontextmanager
async def calling(
    server: ServerProcess, authority: Authority, token: str | None
) -> AsyncIterator[Api]:
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    if token is not None:
        own = grpc.access_token_call_credentials(token)
        credentials = grpc.composite_channel_credentials(credentials, own)
    async with grpc.aio.secure_channel(server.address, credentials) as channel:
        yield Api(channel)


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return reason_of(caught.value)


async def test_a_life_at_debug_level(
    start_server: StartServer, authority: Authority, tmp_path: Path
) -> None:
    (tmp_path / "rollout").write_text(ROLLOUT)
    (tmp_path / "control").write_text(CONTROL)
    own = authority.sign("server")
    server = start_server(
        "--engine", "synthetic", "--log-level", "debug", "--log-format", "json",
        "--tls-cert", str(own.certificate), "--tls-key", str(own.key),
        "--rollout-token-file", str(tmp_path / "rollout"),
        "--control-token-file", str(tmp_path / "control"), "--max-running", "2",
    )  # fmt: skip

    for token in (None, *WRONG):
        async with calling(server, authority, token) as api:
            assert await refused(generate(api, request())) == "UNAUTHENTICATED"
    async with calling(server, authority, ROLLOUT) as api:
        assert await refused(api.pause()) == "PERMISSION_DENIED"
        await generate(api, request((1,), 3, request_id="plain", attempt=2))
        unnamed = await generate(api, request((1,), 3, request_id=""))
        assert unnamed.reason == "LENGTH"
        assert await refused(generate(api, request((), request_id="empty"))) == "EMPTY_PROMPT"
        assert await refused(generate(api, request(request_id="y" * 300))) == "BAD_REQUEST"
        stream = Stream(api)
        await stream.start(1, request((1,), 3, request_id="column"))
        await stream.start(2, request((9999,), 3, request_id="wild", attempt=5))
        assert (await stream.all())[2].error is not None
        endless = Generation(api, request((1,), 4000, request_id="endless", grace=30))
        await endless.some()
        assert (
            await refused(api.rollouts.Abort(rollout_pb2.AbortRequest(all=True)))
            == "PERMISSION_DENIED"
        )
        assert await api.abort("endless") == (1, [])
        await endless.all()

    async with calling(server, authority, CONTROL) as api:
        await api.resume((await api.pause("for a test")).pause_id)
        published = Noting(api, await random_weights(api, 1), 7)
        await published.publish()
        again = Noting(api, await random_weights(api, 1), 7)
        await again.publish()
        untagged = Noting(api, await random_weights(api, 2))
        await untagged.stage()
        held = Generation(api, request((1, 2, 3), 4000, request_id="held"))
        await held.some()
        answer = await untagged.commit(common_pb2.KV_POLICY_RECOMPUTE)
        assert answer.timing.kv_tokens_to_recompute > 3
        assert await api.abort("held") == (1, [])
        await held.all()
        lost = Noting(api, await random_weights(api, 3), 8)
        await lost.announce()
        nowhere = lost.prepare(uuid.uuid4().hex, host="256.0.0.1")
        assert await refused(nowhere) == "TRANSPORT_FAILED"
        assert await refused(lost.commit(digest=1)) == "NOT_STAGED"
        lost.call.cancel()
        await no_update(api)
        old = Noting(api, await random_weights(api, 1), 3)
        assert await refused(old.announce()) == "VERSION_NOT_NEWER"
    assert server.stop() == 0

    text = server.log.read_text()
    lines = [json.loads(line) for line in text.splitlines()]  # each of them
    assert all({"event", "level", "timestamp"} <= line.keys() for line in lines)
    keys = [line for line in own.key.read_text().splitlines() if "-----" not in line]
    epochs = [epoch for change in (published, again, untagged, lost) for epoch in change.epochs]
    assert len(epochs) == 4
    for secret in (ROLLOUT, CONTROL, *WRONG[:1], *keys, *epochs):
        assert secret not in text

    sequences = [line for line in lines if line["event"].startswith("sequence ")]
    assert all({"request_id", "attempt"} <= line.keys() for line in sequences)
    ends = [(s["request_id"], s["attempt"], s["reason"]) for s in sequences if "reason" in s]
    assert ("plain", 2, "LENGTH") in ends
    assert ("column", 0, "LENGTH") in ends
    assert ("endless", 0, "ABORTED") in ends
    assert ("held", 0, "ABORTED") in ends
    assert len(ends) == 5
    assert len({request_id for request_id, *_ in ends}) == 5

    why = {(line.get("request_id"), line["reason"]) for line in lines if "rpc" in line}
    assert ("empty", "EMPTY_PROMPT") in why
    assert ("y" * 256, "BAD_REQUEST") in why
    (wild,) = (line for line in lines if line.get("request_id") == "wild")
    assert (wild["event"], wild["attempt"]) == ("refused", 5)
    assert wild["reason"] == "TOKEN_OUT_OF_RANGE"

    ended = [
        (published, "committed"),
        (again, "already current"),
        (untagged, "committed"),
        (lost, "update discarded"),
    ]
    last_lines = {end for _, end in ended}
    for change, end in ended:
        told = [line for line in lines if line.get("update_id") == change.update_id]
        assert {line.get("version") for line in told} == {change.version}
        phases = [line["phase"] for line in told if line["event"] == "update"]
        last = ["stalled"] if change is lost else ["receiving", "staged"]
        assert phases == ["ready", *last]
        assert [line["event"] for line in told if line["event"] in last_lines] == [end]
    costs = [
        (line["kv_policy"], line["kv_tokens_to_recompute"])
        for line in lines
        if line["event"] == "committed"
    ]
    assert costs == [("keep", 0), ("recompute", answer.timing.kv_tokens_to_recompute)]
    updates = [line for line in lines if line["event"] in {"update", *last_lines}]
    assert all({"update_id", "version"} <= line.keys() for line in updates)
    by_rpc = {line["rpc"]: line for line in lines if line.get("update_id") == lost.update_id
              and line["event"] == "refused"}  # fmt: skip
    assert by_rpc["JoinTransport"]["version"] == by_rpc["CommitWeights"]["version"] == 8
    (too_old,) = (line for line in lines if line.get("update_id") == old.update_id)
    assert (too_old["version"], too_old["reason"]) == (3, "VERSION_NOT_NEWER")


LIBRARIES = """
import logging, sys, warnings
import structlog
from rollwire_server.logs import configure
configure(sys.argv[1], "info")
def fails(token):
    raise ValueError("it failed")
logging.getLogger("rollwire_transport._links").info("a link says\\nsomething")
logging.getLogger("somebody.else").info("chatter")
structlog.get_logger().info("refused", request_id="\\x1b[2J\\nred", why="\\x9b1m and\\rmore")
logging.getLogger("somebody.else").warning("a warning")
warnings.warn("that is old")
for log in (structlog.get_logger(), logging.getLogger("rollwire_server")):
    try:
        fails("a-secret" + " in a variable")
    except ValueError:
        log.exception("a bug")
"""


def said_by_libraries(style: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", LIBRARIES, style], capture_output=True, text=True, timeout=240,
        check=True,
    )  # fmt: skip
    assert not done.stdout
    return done.stderr


def test_libraries_say_what_they_say_in_the_same_form() -> None:
    lines = [json.loads(line) for line in said_by_libraries("json").splitlines()]
    events = [(line["level"], line["event"].partition("\n")[0]) for line in lines]
    assert events[0] == ("info", "a link says")
    assert lines[1]["request_id"] == "\x1b[2J\nred"
    assert events[2] == ("warning", "a warning")
    assert "that is old" in events[3][1]
    assert events[4:] == [("error", "a bug")] * 2
    for line in lines[4:]:
        assert "ValueError: it failed" in line["exception"]


@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_show_no_values(style: str) -> None:
    text = said_by_libraries(style)
    assert text.count("it failed") >= 2
    assert "a-secret in a variable" not in text


@pytest.mark.parametrize("style", ["text", "json"])
def test_callers_reach_no_terminal(style: str) -> None:
    text = said_by_libraries(style)
    (line,) = (line for line in text.splitlines() if "request_id" in line)
    assert "[2J" in line
    assert "more" in line
    assert not {"\x1b", "\x9b", "\r"} & set(text)


def test_an_answer_that_finds_its_caller_gone_is_no_fault_of_the_server() -> None:
    class ExecuteBatchError(Exception):
        """As gRPC's, which only its own code can raise."""

    def told(error: Exception) -> bool:
        return logs._is_not_caller_fault(
            logging.LogRecord("a", 40, "", 0, "", (), (type(error), error, None))
        )

    assert not told(ExecuteBatchError())
    assert told(RuntimeError())
    assert logs._is_not_caller_fault(logging.LogRecord("a", 40, "", 0, "", (), None))


async def test_who_hangs_up_is_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """An answer that finds its caller gone, before the server has heard of that."""

    class ExecuteBatchError(Exception):
        pass

    class Context:
        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def read(self) -> bytes:
            return b""

        async def write(self, message: Any) -> None:
            raise AssertionError("there is no answer")

    async def handler_of(error: Exception) -> Any:
        async def fail(_: Any, __: Any) -> None:
            raise error

        async def continuation(_: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(fail, lambda data: data)

        details = SimpleNamespace(method="/a/Call")
        interceptor = CallInterceptor(10, ServerCounters())
        return await interceptor.intercept_service(continuation, details)  # type: ignore[arg-type]

    for error, told in ((ExecuteBatchError(), False), (RuntimeError(), True)):
        handler = await handler_of(error)
        with pytest.raises(type(error)):
            await handler.stream_stream(None, Context())
        assert ("a bug" in capsys.readouterr().out) is told


async def test_refusals_do_not_fill_the_log(start_server: StartServer) -> None:
    server = start_server("--engine", "synthetic")
    async with connected(server.address) as api:
        began = time.monotonic()
        for _ in range(20):
            await asyncio.gather(*(refused(generate(api, request(()))) for _ in range(50)))
        seconds = time.monotonic() - began
    said = server.log.read_text().count('"event": "refused"')
    assert 0 < said <= REFUSALS_A_SECOND * (seconds + 2)


def test_what_is_left_out_of_the_log_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    limiter = logs.RefusalLimiter()

    def said(event: str) -> dict[str, Any] | None:
        try:
            return dict(limiter(None, "", {"event": event}))
        except structlog.DropEvent:
            return None

    for _ in range(REFUSALS_A_SECOND):
        assert said("refused") == {"event": "refused"}
    assert said("refused") is None
    assert said("refused") is None
    assert said("state") == {"event": "state"}
    now += 1.0
    assert said("refused") == {"event": "refused", "unsaid": 2}
    assert said("refused") == {"event": "refused"}

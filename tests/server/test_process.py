"""The command: flags, ports, readiness, signals, states that last a server's whole life."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2
from rollwire.v1 import common_pb2, rollout_pb2
from rollwire_server.settings import ServerSettings, read_settings
from support.calls import Generation, Stream, connected, details_of, generate, reason_of, request
from support.health import ready
from support.publishing import Update, random_weights, status
from support.servers import COMMAND, START_SECONDS, StartServer, failed_start

if TYPE_CHECKING:
    from pathlib import Path

LONG = 4000


def test_the_help_has_every_flag_and_its_default_if_it_has_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--help"])
    shown = capsys.readouterr().out
    assert all("--" + n.replace("_", "-") in shown for n in ServerSettings.model_fields)
    assert "(default: 1024)" in shown
    assert "null" not in shown


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nonsense"], "--nonsense"),
        (["--model"], "--model"),
        ([], "--model (or ROLLWIRE_MODEL) is not given"),
        (["--model", "builtin:tiny", "--listen", "here"], "HOST:PORT"),
        (["--model", "builtin:tiny", "--listen", "127.0.0.1:99999"], "HOST:PORT"),
        (["--model", "builtin:tiny", "--listen", "http://127.0.0.1:50051"], "HOST:PORT"),
        (["--model", "builtin:tiny", "--max-running", "0"], "--max-running"),
        (["--model", "builtin:tiny", "--drain-seconds", "-1"], "--drain-seconds"),
        (["--model", "builtin:tiny", "--engine", "steam"], "--engine"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        read_settings(flags)
    assert exited.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rollwire-server: ")
    assert said in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--model", "x", "--engine-arg", "a=1"], "the embedded engine has none"),
        (["--model", "x", "--engine", "synthetic", "--engine-arg", "a=1"], "has no a, only"),
        (["--model", "x", "--engine", "sglang", "--engine-arg", "pp-size=2"], "use tp-size"),
        (
            ["--model", "x", "--engine", "sglang", "--engine-arg", "dp-size=2"],
            "sets this itself",
        ),
        (
            # A long pause would run into it.
            ["--model", "x", "--engine", "sglang", "--engine-arg", "watchdog-timeout=6"],
            "watchdog_timeout: the server sets this itself",
        ),
        (["--model", "builtin:tiny", "--engine", "sglang"], "takes a directory"),
        (["--model", "x", "--engine", "synthetic", "--engine-arg", "a"], "is not name=value"),
        (["--model", "/nowhere/at/all", "--listen", "127.0.0.1:0"], "/nowhere/at/all"),
        (["--model", "builtin:giant", "--listen", "127.0.0.1:0"], "builtin:giant"),
        (["--model", "builtin:tiny", "--listen", "127.0.0.1:0", "--device", "cuda:9"], "cuda"),
        (["--model", "builtin:tiny", "--listen", "192.0.2.1:5000"], "192.0.2.1:5000"),
    ],
)
def test_a_wrong_start_is_one_clear_line(tmp_path: Path, flags: list[str], said: str) -> None:
    listen = [] if "--listen" in flags else ["--listen", "127.0.0.1:0"]
    failed = failed_start(tmp_path, *flags, *listen, "--log-level", "error")
    assert failed.code == 1
    assert failed.line.startswith("rollwire-server: ")
    assert said in failed.line


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    failed = failed_start(
        tmp_path, "--model", str(tmp_path), "--listen", "127.0.0.1:0", "--log-level", "error"
    )
    assert failed.code == 1
    assert str(tmp_path) in failed.line


def test_a_port_in_use(start_server: StartServer, tmp_path: Path) -> None:
    address = start_server("--engine", "synthetic").address
    failed = failed_start(tmp_path, "--model", "builtin:tiny", "--listen", address)
    assert failed.code == 1
    assert address in failed.line


def test_flags_are_environment_variables(tmp_path: Path) -> None:
    wrong = {"ROLLWIRE_MODEL": "/not/there", "ROLLWIRE_LISTEN": "x:y", "ROLLWIRE_FROZEN": "so so"}
    failed = failed_start(tmp_path, "--max-running", "none", environment=wrong)
    assert failed.code == 2
    assert "ROLLWIRE_LISTEN is 'x:y': must be HOST:PORT" in failed.line
    assert "ROLLWIRE_FROZEN is 'so so': " in failed.line
    assert "--max-running is 'none': " in failed.line


def test_a_misspelt_environment_variable_is_told(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLWIRE_AWAIT_WEIGHT", "1")
    monkeypatch.setenv("ROLLWIRE_MAX_RUNNING", "3")
    log = start_server("--engine", "synthetic").log.read_text()
    (line,) = [line for line in log.splitlines() if "no settings" in line]
    assert "ROLLWIRE_AWAIT_WEIGHT" in line
    assert "ROLLWIRE_MAX_RUNNING" not in line


async def test_a_server_that_awaits_weights_serves_nothing_before(
    start_server: StartServer,
) -> None:
    server = start_server("--await-weights")
    assert not await ready(server.address)
    async with connected(server.address) as api:
        assert (await api.info()).state == common_pb2.SERVER_STATE_AWAITING_WEIGHTS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request())
        assert reason_of(caught.value) == "AWAITING_WEIGHTS"
        tensors = await random_weights(api, 1)
        part = Update(api, dict(list(tensors.items())[:1]), 1, partial=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await part.announce()
        assert reason_of(caught.value) == "BASE_MISMATCH"
        await Update(api, tensors, 7).publish()
        assert await ready(server.address)
        output = await generate(api, request())
        assert {tag.version for tag in output.tags} == {7}


async def test_a_frozen_server_takes_no_updates(start_server: StartServer) -> None:
    async with connected(start_server("--frozen").address) as api:
        assert not (await api.info()).accepts_updates
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await Update(api, await random_weights(api, 1), 1).announce()
        assert reason_of(caught.value) == "FROZEN"
        assert caught.value.details().endswith("keeps weights without a version, revision 0")
        assert (await generate(api, request())).reason == "LENGTH"
        assert (await status(api, verify=True)).intact


async def test_a_full_queue_refuses_and_says_when_to_come_back(start_server: StartServer) -> None:
    server = start_server("--max-running", "2", "--max-waiting", "1")
    async with connected(server.address) as api:
        generations = [Generation(api, request((i,), LONG)) for i in (1, 2)]
        for generation in generations:
            await generation.some(1)
        waiting = Generation(api, request((3,), 3))
        await api.waits(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason_of(caught.value) == "QUEUE_FULL"
        retry = error_details_pb2.RetryInfo()
        assert details_of(caught.value, retry)
        assert retry.retry_delay.seconds > 0
        stream = Stream(api)
        await stream.start(1, request())
        error = (await stream.all())[1].error
        assert error is not None
        assert (error.reason, error.retry_delay) == ("QUEUE_FULL", retry.retry_delay)
        await api.rollouts.Abort(rollout_pb2.AbortRequest(all=True), timeout=60)
        await asyncio.gather(*(one.all() for one in (*generations, waiting)))
        await api.idle()


async def test_sighup_ends_nothing(start_server: StartServer) -> None:
    """Whatever renews certificates sends it, or the terminal's end does: a server has none."""
    server = start_server("--engine", "synthetic")
    async with connected(server.address) as api:
        stream = Generation(api, request((1,), 100))
        server.process.send_signal(signal.SIGHUP)
        assert (await stream.all()).reason == "LENGTH"
        await generate(api, request((1,), 1))
    assert server.stop() == 0
    assert "SIGHUP" in server.log.read_text()


def test_as_many_files_as_the_system_allows() -> None:
    command = (
        "import resource as r; from rollwire_server.main import raise_open_file_limit;"
        "hard = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, hard)); raise_open_file_limit();"
        "print(r.getrlimit(r.RLIMIT_NOFILE) == (min(hard, 65536) if hard >= 0 else 65536, hard))"
    )
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == "True\n"


@pytest.mark.slow
async def test_a_signal_while_loading_ends_it_without_serving(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--model", "builtin:tiny", "--listen", "127.0.0.1:0", "--ready-file", str(ready),
        "--log-format", "text", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    async with asyncio.timeout(START_SECONDS):
        await process.stderr.readuntil(b"loading")
        process.terminate()
        said = (await process.stderr.read()).decode()
        assert await process.wait() == 0
    assert "Traceback" not in said
    assert "ready" not in said
    assert not ready.exists()


def test_the_ready_file_goes_with_the_server(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--engine", "synthetic")
    assert (tmp_path / "server-0.json").exists()
    assert server.stop() == 0
    assert not (tmp_path / "server-0.json").exists()


@pytest.mark.parametrize("where", ["nowhere/ready.json", "."])
def test_a_ready_file_that_cannot_be_written(tmp_path: Path, where: str) -> None:
    path = tmp_path / where
    flags = ["--model", "builtin:tiny", "--listen", "127.0.0.1:0", "--ready-file", str(path)]
    failed = failed_start(tmp_path, *flags)
    assert failed.code == 1
    assert str(path) in failed.line

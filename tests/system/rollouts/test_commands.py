"""The `rollwire` command against a real server, as a user runs it."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

import grpc
import pytest
from rollwire.v1 import rollout_pb2, rollout_pb2_grpc
from support.programs import ROLLWIRE, SECONDS, rollwire, rollwire_here

if TYPE_CHECKING:
    from support.servers import ServerProcess, StartServer


def generate(server: ServerProcess, *more: str) -> list[str]:
    return ["generate", "--server", server.address, "--prompt-ids", "1,2,3", "--seed", "5", *more]


def test_generate_writes_token_ids(both: list[ServerProcess]) -> None:
    done = rollwire(*generate(both[0], "--max-new-tokens", "12", "--ignore-eos"))
    assert done.returncode == 0
    assert len([int(word) for word in done.stdout.split()]) == 12
    assert "12 tokens in" in done.stderr
    assert done.stderr.count("\n") == 1


def test_generate_writes_json(both: list[ServerProcess], capfd: pytest.CaptureFixture[str]) -> None:
    plain = rollwire_here(capfd, *generate(both[0], "--max-new-tokens", "12"))
    done = rollwire_here(capfd, *generate(both[0], "--max-new-tokens", "12", "--json"))
    assert (done.returncode, done.stderr) == (0, "")
    chunks = [json.loads(line) for line in done.stdout.splitlines()]
    tokens = [token for chunk in chunks for token in chunk["token_ids"]]
    assert tokens == [int(word) for word in plain.stdout.split()]
    assert all(len(chunk["logprobs"]) == len(chunk["token_ids"]) for chunk in chunks)
    assert chunks[-1]["finish"]["output_tokens"] == len(tokens)
    assert chunks[0]["weights"]["server_id"] == both[0].server_id


def test_generate_colours_tokens_on_a_terminal(both: list[ServerProcess]) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*ROLLWIRE, *generate(both[0], "--max-new-tokens", "5", "--ignore-eos")],
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
    ) as process:
        assert process.wait(SECONDS) == 0
        os.close(theirs)
        shown = os.read(ours, 65536).decode()
        os.close(ours)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert "\x1b[36m" in shown
    assert "revision" in shown
    assert "5 tokens" in shown


@pytest.mark.slow
def test_generate_waits_for_a_server_that_is_not_up_yet(start_server: StartServer) -> None:
    # An address of loopback where nobody else listens, so that the port is free later too.
    with socket.create_server(("127.0.94.1", 0)) as probe:
        address = f"127.0.94.1:{probe.getsockname()[1]}"
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*ROLLWIRE, "generate", "--server", address, "--prompt-ids", "1", "--max-new-tokens", "3"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"},
        text=True,
    ) as process:
        os.close(theirs)
        shown = ""
        while f"waiting: {address}: cannot be reached" not in shown:
            shown += os.read(ours, 65536).decode()
        start_server("--listen", address)
        told, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0
        os.close(ours)
    assert len(told.split()) == 3


@pytest.mark.parametrize("rests", ["paused", "sleeping", "awaiting_weights"])
def test_generate_says_at_once_what_it_waits_for(
    both: list[ServerProcess], start_server: StartServer, rests: str
) -> None:
    server = start_server("--await-weights") if rests == "awaiting_weights" else both[0]
    with grpc.insecure_channel(server.address) as channel:
        api = rollout_pb2_grpc.RolloutServiceStub(channel)
        if rests == "paused":
            api.Pause(rollout_pb2.PauseRequest(pause_id="eval"), timeout=SECONDS)
        elif rests == "sleeping":
            api.Sleep(rollout_pb2.SleepRequest(), timeout=SECONDS)
        with subprocess.Popen(
            [*ROLLWIRE, *generate(server, "--max-new-tokens", "3", "--ignore-eos")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stderr is not None
            by = " by 'eval'" if rests == "paused" else ""
            assert process.stderr.readline() == f"waiting: {server.address}: is {rests}{by}\n"
            if rests == "awaiting_weights":
                process.kill()
                return
            api.WakeUp(rollout_pb2.WakeUpRequest(), timeout=SECONDS)
            api.Resume(rollout_pb2.ResumeRequest(), timeout=SECONDS)
            told, summary = process.communicate(timeout=SECONDS)
    assert len(told.split()) == 3
    assert summary.count("\n") == 1  # the reason is not repeated
    assert "3 tokens in" in summary
    assert "the first after" in summary
    assert "a second" not in summary


@pytest.mark.slow
def test_generate_as_json_says_nothing_of_what_it_waits_for(start_server: StartServer) -> None:
    server = start_server("--await-weights")
    done = rollwire(*generate(server, "--timeout", "3", "--json"))
    assert done.returncode == 1
    assert done.stderr.startswith("rollwire: sequence ")
    assert done.stderr.count("\n") == 1


def test_ctrl_c_ends_cleanly(both: list[ServerProcess], capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(
        [*ROLLWIRE, *generate(both[0], "--max-new-tokens", "4000", "--ignore-eos")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
        assert b"Traceback" not in process.stderr.read()
    done = rollwire_here(capfd, "info", both[0].address, "--json")
    assert json.loads(done.stdout)[0]["running_sequences"] == 0


def test_info_shows_each_server(
    both: list[ServerProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    done = rollwire_here(capfd, "info", both[0].address, both[1].address, "127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("rollwire: 127.0.0.1:9: cannot be reached: ")
    assert "Connection refused" in done.stderr
    assert done.stderr.count("\n") == 1
    for server in both:
        (line,) = [line for line in done.stdout.splitlines() if server.address in line]
        assert "serving" in line
        assert "builtin:tiny" in line


def test_info_as_json(both: list[ServerProcess], capfd: pytest.CaptureFixture[str]) -> None:
    done = rollwire_here(capfd, "info", both[0].address, "--json")
    (told,) = json.loads(done.stdout)
    assert told["server_id"] == both[0].server_id
    assert told["state"] == "serving"


@pytest.mark.parametrize("wrong", [("--top-p", "7"), ("--min-p", "3")])
def test_what_the_server_refuses_is_one_line(
    both: list[ServerProcess], wrong: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    done = rollwire_here(capfd, *generate(both[0], *wrong))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"rollwire: {both[0].address}: ")
    assert done.stderr.count("\n") == 1

"""`rollwire top` and `rollwire publish` against real servers, as a user runs them."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rollwire_client._cli.app import run
from rollwire_client.sync import SyncFleet, SyncPublisher
from safetensors.torch import save_file
from support.programs import ROLLWIRE, SECONDS, rollwire, rollwire_here
from support.servers import ServerProcess, servers
from support.synthetic import PROMPT, sampling, start_synthetic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOBODY = "127.0.0.1:9"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with servers(tmp_path_factory.mktemp("commands")) as start:
        yield [start_synthetic(start, 50) for _ in range(2)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path / "checkpoint", 1.0)


def saved(folder: Path, value: float, name: str = "weight") -> Path:
    folder.mkdir()
    save_file({name: torch.full((1024,), value)}, folder / "model.safetensors")
    return folder


def publish(folder: Path, *addresses: str) -> list[str]:
    return ["publish", str(folder), *(f"--server={address}" for address in addresses)]


def on_a_terminal(*arguments: str) -> subprocess.Popen[bytes]:
    """The command with a terminal of 160 columns; read its output from ``process.terminal``."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*ROLLWIRE, *arguments], stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)
    process.terminal = ours  # type: ignore[attr-defined]
    return process


def read(terminal: int) -> str:
    """What came; "" once the other end is closed."""
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:
        return ""


def test_publish_makes_a_checkpoint_the_policy(
    two: list[ServerProcess], checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [server.address for server in two]
    with SyncFleet(addresses) as fleet:
        version = (fleet.newest_version() or 0) + 1
    assert run([*publish(checkpoint, *addresses), "--version", str(version)]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    title, _, *lines = out.splitlines()
    assert title.startswith(f"version {version}, digest ")
    for server, line in zip(two, lines, strict=True):
        assert line.startswith(server.address)
        assert "committed" in line
    digest = title.split()[3].rstrip(":")
    with SyncFleet(addresses) as fleet:
        served = {info.weights for info in fleet.info().values()}
        publisher = SyncPublisher(fleet)
        again = publisher.publish(None, {"weight": torch.full((1024,), 1.0)}).committed()
    assert {(w.version, f"{w.digest:016x}") for w in served} == {(version, digest)}
    assert f"{again.digest:016x}" == digest  # the content is the checkpoint's


@pytest.mark.slow
def test_a_server_that_failed_is_told(two: list[ServerProcess], checkpoint: Path) -> None:
    done = rollwire(*publish(checkpoint, two[0].address, NOBODY), "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert [server["address"] for server in told["servers"]] == [two[0].address, NOBODY]
    assert told["servers"][0]["error"] is None
    assert "cannot be reached" in told["servers"][1]["error"]
    assert done.stderr.startswith(f"rollwire: {NOBODY}: cannot be reached")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit(two: list[ServerProcess], tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 1.0, name="bias")
    (tmp_path / "empty").mkdir()
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "model.safetensors").write_bytes(b"torn")
    for folder, why in ((other, "bias"), (tmp_path / "empty", "no .safetensors"), (torn, "read")):
        done = rollwire(*publish(folder, two[0].address))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("rollwire: ")
        assert why in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_publish_shows_a_bar_on_a_terminal(two: list[ServerProcess], checkpoint: Path) -> None:
    with on_a_terminal(*publish(checkpoint, two[0].address)) as process:
        shown = ""
        while piece := read(process.terminal):
            shown += piece
        assert process.wait(SECONDS) == 0
        os.close(process.terminal)
    assert "━" in shown
    assert "an update without a version, digest" in shown


def test_top_off_a_terminal_looks_once(
    two: list[ServerProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    done = rollwire_here(capfd, "top", two[0].address, two[1].address, NOBODY, "--interval", "0.2")
    assert done.returncode == 1
    header, *rows = done.stdout.splitlines()
    assert header.split()[:4] == ["server", "state", "version", "lag"]
    for server, row in zip(two, rows, strict=False):
        assert row.startswith(server.address)
        assert "serving" in row
        assert "0/512" in row
    assert "no answer" in rows[2]
    assert rows[-1].startswith("3 servers")
    assert done.stderr.startswith(f"rollwire: {NOBODY}: cannot be reached: ")
    assert "Connection refused" in done.stderr
    assert done.stderr.count("\n") == 1


def test_top_as_json_has_rates(two: list[ServerProcess], capfd: pytest.CaptureFixture[str]) -> None:
    with SyncFleet([two[0].address]) as fleet:
        streams = [fleet.stream(PROMPT, sampling(seed, 4000)) for seed in range(4)]
        for stream in streams:
            next(stream)
        done = rollwire_here(capfd, "top", two[0].address, "--json", "--interval", "1")
    assert (done.returncode, done.stderr) == (0, "")
    (told,) = json.loads(done.stdout)
    assert told["running_sequences"] == 4
    assert 0 < told["tokens_per_second"] < 400  # four times 50, on a quiet machine
    assert told["commits_per_minute"] == 0


def test_top_lives_on_a_terminal_until_it_is_interrupted(two: list[ServerProcess]) -> None:
    addresses = [server.address for server in two]
    with (
        on_a_terminal("top", *addresses, "--interval", "0.1") as process,
        SyncFleet(addresses) as f,
    ):
        shown = ""
        while "commits/min" not in shown:
            shown += read(process.terminal)
        stream = f.stream(PROMPT, sampling(1, 4000))
        next(stream)
        shown = ""
        while not re.search(r"1/512", shown):  # it goes on looking
            shown += read(process.terminal)
        process.send_signal(signal.SIGINT)
        while piece := read(process.terminal):
            shown += piece
        assert process.wait(SECONDS) == 130
        os.close(process.terminal)
    assert "Traceback" not in shown


def test_trace_shows_states_updates_and_sequences(two: list[ServerProcess], tmp_path: Path) -> None:
    addresses, file = [server.address for server in two], tmp_path / "trace.json"
    with SyncFleet(addresses) as fleet:
        publisher, version = SyncPublisher(fleet), 100  # above those of other tests
        publisher.publish(version, {"weight": torch.full((1024,), 5.0)}).committed()
        with subprocess.Popen(
            [*ROLLWIRE, "trace", *addresses, "--output", str(file), "--seconds", "60"],
            stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            running = 0
            while running < 4:  # its own sequences
                running = sum(info.running_sequences for info in fleet.info().values())
            fleet.generate(PROMPT, sampling(1, 50))  # while those bring as many, at one pace
            publisher.publish(version + 1, {"weight": torch.full((1024,), 6.0)}).committed()
            fleet.generate(PROMPT, sampling(1, 150))
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert said == f"{file}: open it at https://ui.perfetto.dev\n"
    events = json.loads(file.read_text())["traceEvents"]
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == sorted(["sequences", *addresses])
    old, new = f"version {version}", f"version {version + 1}"
    slices = [event for event in events if event["ph"] == "X"]
    for group, name in names.items():
        seen = [s["name"] for s in slices if s["pid"] == group]
        assert {old, new} <= set(seen)
        assert name == "sequences" or "serving" in seen
    assert sum(s["args"].get("tokens", 0) for s in slices if s["name"] == new) > 0
    commits = [e for e in events if e["ph"] == "i" and e["name"].startswith(f"commit: {new}")]
    assert {names[commit["pid"]] for commit in commits} == set(addresses)
    for row in {(s["pid"], s["tid"]) for s in slices}:  # nothing overlaps
        mine = sorted((s["ts"], s["ts"] + s["dur"]) for s in slices if (s["pid"], s["tid"]) == row)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(mine))


def told(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    """What a command prints as JSON, without the addresses, which are in order."""
    assert run([*arguments, "--json"]) == code
    return [
        {key: value for key, value in row.items() if key != "address"}
        for row in json.loads(capfd.readouterr().out)
    ]


def test_servers_sleep_and_wake_up(
    two: list[ServerProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [server.address for server in two]
    asleep = {"result": "asleep", "weights": "keep", "freed_bytes": 0}
    try:
        assert told(capfd, "sleep", *addresses, "--weights", "keep") == [asleep] * 2
        again = told(capfd, "sleep", addresses[0], "--weights", "keep")
        assert again == [{**asleep, "result": "already asleep"}]
        (info,) = told(capfd, "info", addresses[0])
        assert (info["state"], info["sleeping_weights"]) == ("sleeping", "keep")
        (refused,) = told(capfd, "sleep", addresses[0], "--weights", "discard", code=1)
        assert "sleeps already, with weights KEEP, and was asked for DISCARD" in refused["error"]
        (refused,) = told(capfd, "wake", addresses[0], "--reload-checkpoint", code=1)
        assert "for weights that were discarded" in refused["error"]
    finally:
        woken = told(capfd, "wake", *addresses)
    assert [row["result"] for row in woken] == ["serving"] * 2


def test_servers_pause_and_resume(
    two: list[ServerProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = [server.address for server in two]
    try:
        paused = told(capfd, "pause", *addresses, "--pause-id", "mine", "--lease", "60")
        assert paused == [{"result": "paused", "pause_id": "mine", "held_sequences": 0}] * 2
        (another,) = told(capfd, "pause", addresses[0])
        assert another["pause_id"] not in {"", "mine"}
        one, other = told(capfd, "resume", *addresses, "--pause-id", "mine")
        assert (one["result"], one["remaining_pauses"]) == ("still paused", 1)
        assert (other["result"], other["remaining_pauses"]) == ("resumed", 0)
    finally:
        resumed = told(capfd, "resume", *addresses)
    assert [row["remaining_pauses"] for row in resumed] == [0, 0]


def test_a_server_that_does_not_do_as_asked_is_told(
    two: list[ServerProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["pause", two[0].address, NOBODY, "--lease", "60", "--pause-id", "mine"]) == 1
    out, err = capfd.readouterr()
    header, row = out.splitlines()
    assert header.split() == ["server", "result", "pause", "id", "held", "sequences"]
    assert row.split() == [two[0].address, "paused", "mine", "0"]
    assert err.startswith(f"rollwire: {NOBODY}: cannot be reached")
    assert err.count("\n") == 1
    assert run(["resume", two[0].address]) == 0

"""The library in plain scripts, against real servers."""

from __future__ import annotations

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import (
    ClosedError,
    FinishReason,
    Fleet,
    InvalidRequestError,
    Publisher,
    PublishFailedError,
    ServerInfo,
    Session,
    Timeouts,
    UnavailableError,
)
from rollwire_client.sync import SyncFleet, SyncPublisher, SyncSession
from support.servers import ServerProcess, servers
from support.synthetic import PROMPT, sampling, start_synthetic, undisturbed

if TYPE_CHECKING:
    from collections.abc import Iterator

ENDLESS = sampling(1, 4000)  # at 50 tokens a second


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    with servers(tmp_path_factory.mktemp("sync")) as start:
        yield [start_synthetic(start, 50) for _ in range(2)]


@pytest.fixture
def fleet(two: list[ServerProcess]) -> Iterator[SyncFleet]:
    with SyncFleet([server.address for server in two]) as fleet:
        yield fleet


def running(fleet: SyncFleet) -> int:
    """Sequences, on all servers."""
    infos = [info for info in fleet.info().values() if isinstance(info, ServerInfo)]
    assert len(infos) == 2
    return sum(info.running_sequences for info in infos)


def assert_idle(servers: list[ServerProcess]) -> None:
    """Fails unless the servers have nothing under way soon."""
    with SyncFleet([server.address for server in servers]) as fleet:
        deadline = time.monotonic() + 30
        while running(fleet):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_generate_and_stream(fleet: SyncFleet, two: list[ServerProcess]) -> None:
    (want,) = asyncio.run(undisturbed(two[0], 1, 20))
    assert fleet.generate(PROMPT, sampling(0, 20)).token_ids == want
    chunks = list(fleet.stream(PROMPT, sampling(0, 20)))
    assert sum((chunk.token_ids for chunk in chunks), ()) == want
    assert chunks[-1].finish is not None
    assert fleet.newest_version() is None


def test_leaving_a_stream_aborts_it(fleet: SyncFleet, two: list[ServerProcess]) -> None:
    for chunk in fleet.stream(PROMPT, ENDLESS):
        assert chunk.token_ids
        break
    assert_idle(two)


def test_any_number_of_threads(fleet: SyncFleet, two: list[ServerProcess]) -> None:
    want = asyncio.run(undisturbed(two[0], 16, 20))
    with ThreadPoolExecutor(16) as pool:
        got = pool.map(lambda seed: fleet.generate(PROMPT, sampling(seed, 20)), range(16))
        assert [trajectory.token_ids for trajectory in got] == want


def test_a_conversation(fleet: SyncFleet) -> None:
    session = fleet.session(PROMPT)
    first = session.generate(sampling(0, 5))
    session.append([9, 9])
    second = [token for chunk in session.stream(sampling(1, 5)) for token in chunk.token_ids]
    assert session.token_ids == (*PROMPT, *first.token_ids, 9, 9, *second)
    assert session.conversation().mask.count(True) == 10
    assert session.conversation().session_id == session.id


def test_publishing(fleet: SyncFleet) -> None:
    publisher = SyncPublisher(fleet, id="plain")
    assert [spec.name for spec in publisher.schema()] == ["weight"]
    tensors = {"weight": torch.ones(1024)}
    handle = publisher.publish(1, tensors)
    handle.released()
    report = handle.committed()
    assert (report.version, report.failed, len(report.servers)) == (1, (), 2)
    assert (handle.version, handle.sent_bytes, handle.done) == (1, handle.total_bytes, True)
    assert publisher.catch_up(tensors).servers == ()
    assert fleet.newest_version() == 1
    assert fleet.generate(PROMPT, sampling(1, 3), min_weight_version=1).versions == (1, 1, 1)
    publisher.publish(None, {"weight": torch.zeros(1024)}).committed()  # as it was


def test_a_publish_can_be_cancelled(fleet: SyncFleet) -> None:
    go = threading.Event()

    def tensors():
        go.wait(30)
        return [("weight", torch.ones(1024))]

    handle = SyncPublisher(fleet, delta=False).publish(None, tensors)
    go.set()
    handle.cancel()
    assert handle.done
    with pytest.raises((ClosedError, PublishFailedError)):
        handle.committed()


def test_errors_are_those_of_the_library(fleet: SyncFleet) -> None:
    with pytest.raises(InvalidRequestError, match="99999"):
        fleet.generate([99999])
    with pytest.raises(TypeError, match="no option bogus"):
        fleet.stream(PROMPT, bogus=1)  # type: ignore[call-arg]
    with (
        pytest.raises(UnavailableError, match=r"127\.0\.0\.1:9"),
        SyncFleet(["127.0.0.1:9"], timeouts=Timeouts(start=0)),
    ):
        pass
    closed = SyncFleet(["127.0.0.1:9"])
    with pytest.raises(ClosedError, match="use it within `with`"):
        closed.generate(PROMPT)
    closed.close()


def test_closing_ends_what_other_threads_wait_for(two: list[ServerProcess]) -> None:
    with ThreadPoolExecutor(1) as pool:
        with SyncFleet([server.address for server in two]) as fleet:
            stream = fleet.stream(PROMPT, ENDLESS)
            next(stream)
            waiting = pool.submit(fleet.generate, PROMPT, ENDLESS)
            while running(fleet) < 2:
                time.sleep(0.02)
        assert waiting.result(60).finish.reason is FinishReason.ABORTED
        with pytest.raises(ClosedError):
            next(stream)
    assert_idle(two)


def test_names_and_arguments_are_those_of_the_async_library() -> None:
    for sync, its in ((SyncFleet, Fleet), (SyncPublisher, Publisher), (SyncSession, Session)):
        names = {name for name in vars(its) if not name.startswith("_")}
        own = {name for name in vars(sync) if not name.startswith("_")}
        # A session's id is no property there, and two methods are of threads and loops.
        assert own - {"id", "of", "submit"} == names
        for name in names:
            if callable(method := getattr(its, name)):
                arguments = inspect.signature(getattr(sync, name)).parameters
                assert arguments == inspect.signature(method).parameters


SCRIPT = """
import sys
from rollwire_client import Sampling
from rollwire_client.sync import SyncFleet

with SyncFleet(sys.argv[1:]) as fleet:
    print("open", flush=True)
    try:
        fleet.generate([1, 2], Sampling(max_new_tokens=4000))
    except KeyboardInterrupt:
        infos = fleet.info().values()
        print("running", sum(info.running_sequences for info in infos), flush=True)
        raise
"""


def test_ctrl_c_ends_the_rollout(two: list[ServerProcess]) -> None:
    addresses = [server.address for server in two]
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *addresses],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process, SyncFleet(addresses) as fleet:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        deadline = time.monotonic() + 30
        while not any(
            info.running_sequences for info in fleet.info().values() if isinstance(info, ServerInfo)
        ):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT, complaint
    assert said.startswith("running ")
    assert complaint.rstrip().endswith("KeyboardInterrupt")
    assert complaint.count("Traceback") == 1
    assert_idle(two)

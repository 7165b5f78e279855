"""Groups over NCCL and CUDA IPC: moving, failing, going on.

With NCCL each member has a GPU of its own; on a machine with one GPU, NCCL is told of two hosts,
and moves bytes by sockets. With CUDA IPC all are on one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from rollwire_transport import (
    Receiver,
    Sender,
    TransportError,
    TransportTimeout,
    UnsuitableDevices,
    available_backends,
    describe_all,
    open_link,
    plan,
)
from rollwire_transport._links.base import sealed
from support import gpu_member

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rollwire_transport import Link

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

TIMEOUT = 60.0  # what starts a process and NCCL in it
MIB = 64
HERE = torch.device("cuda", 0)
THERE, ELSEWHERE = (
    ("cuda:1", {}) if torch.cuda.device_count() > 1 else ("cuda:0", {"NCCL_HOSTID": "elsewhere"})
)


@dataclass(frozen=True)
class Place:
    """A backend, and where the other member is."""

    backend: str
    device: str
    environment: Mapping[str, str] = field(default_factory=dict)


PLACES = [Place("nccl", THERE, ELSEWHERE), Place("cuda_ipc", "cuda:0")]
NCCL, CUDA_IPC = PLACES


@pytest.fixture(params=PLACES, ids=lambda place: place.backend)
def place(request: pytest.FixtureRequest) -> Place:
    assert isinstance(request.param, Place)
    return request.param


@contextlib.contextmanager
def member(place: Place, role: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of ``support/gpu_member.py``."""
    words = [role, place.backend, place.device, MIB, *arguments]
    command = [sys.executable, gpu_member.__file__, *map(str, words)]
    env = {**os.environ, **place.environment}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def group(place: Place, epoch: str) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """Rank 0's link, here, and the process that receives."""
    link = open_link(place.backend, epoch=epoch, rank=0, world_size=2, device=HERE)
    try:
        with member(place, "receive", epoch, 1, 2) as process:
            offers = link.offers({1: bytes.fromhex(read(process))})
            write(process, offers[1].hex())
            link.connect(TIMEOUT)
            yield link, process
    finally:
        link.close()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


@contextlib.contextmanager
def driven(link: Link, dies: Callable[[], bool]) -> Iterator[None]:
    """Aborts the link once the other end has died, as whoever drives a group does."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            if dies():
                link.abort()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(watch)
        try:
            yield
        finally:
            over.set()


def send(
    link: Link, timeout: float = TIMEOUT, progress: Callable[[int], None] | None = None
) -> Sender:
    tensors = gpu_member.weights(MIB, HERE)
    sender = Sender(plan(describe_all(tensors), bucket_bytes=gpu_member.BUCKET_BYTES))
    sender.send(link, tensors.items, bucket_timeout=timeout, progress=progress)
    return sender


def transfer(place: Place, epoch: str) -> None:
    """A whole transfer, which the receiver compares bit for bit."""
    with group(place, epoch) as (link, process):
        sender = send(link)
        assert int(read(process)) == sender.digest
        write(process, "close")
        assert process.wait(TIMEOUT) == 0


def test_it_is_available(place: Place) -> None:
    assert available_backends()[place.backend].ok


def test_everything_arrives_bit_for_bit_beside_the_trainers_own_group(
    place: Place, trainers_own_group: None
) -> None:
    for epoch in ("one", "two"):
        transfer(place, epoch)
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("blow", "timeout"),
    [(signal.SIGKILL, TIMEOUT), (signal.SIGSTOP, 1.0)],
    ids=["killed", "stopped"],
)
def test_a_receiver_dies_and_the_sender_goes_on(
    place: Place, blow: signal.Signals, timeout: float
) -> None:
    hit_at = 0.0
    with group(place, "first") as (link, process):

        def hit(sent: int) -> None:
            nonlocal hit_at
            if sent == 10 << 20:
                process.send_signal(blow)
                hit_at = time.monotonic()

        with (
            driven(link, lambda: process.poll() is not None),
            pytest.raises(TransportError) as caught,
        ):
            send(link, timeout, hit)
        assert isinstance(caught.value, TransportTimeout) == (blow is signal.SIGSTOP)
        assert time.monotonic() - hit_at < TIMEOUT / 2
    transfer(place, "second")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_dies_and_the_receiver_goes_on(place: Place, blow: signal.Signals) -> None:
    wanted = gpu_member.weights(MIB, HERE)
    manifest = plan(describe_all(wanted), bucket_bytes=gpu_member.BUCKET_BYTES)
    receiver = Receiver(manifest, {name: torch.zeros_like(t) for name, t in wanted.items()})
    for epoch, dies in (("first", True), ("second", False)):
        with member(place, "send", epoch, 2) as process:
            link = open_link(place.backend, epoch=epoch, rank=1, world_size=2, device=HERE)
            try:
                write(process, link.answer.hex())
                link.connect(TIMEOUT, bytes.fromhex(read(process)))
                assert read(process) == "connected"
                if dies:
                    process.send_signal(blow)
                    hit_at = time.monotonic()
                    with (
                        driven(link, lambda: process.poll() is not None),
                        pytest.raises(TransportError),
                    ):
                        receiver.receive(link, first_bucket=0, bucket_timeout=1)
                    assert time.monotonic() - hit_at < TIMEOUT / 2
                else:
                    receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
                    write(process, "close")
            finally:
                link.close()
    assert receiver.complete


def test_an_abort_from_another_thread_ends_it(place: Place) -> None:
    with group(place, "epoch") as (link, _), ThreadPoolExecutor(1) as pool:

        def abort(sent: int) -> None:
            if sent == 10 << 20:
                pool.submit(link.abort).result()

        with pytest.raises(TransportError, match="aborted"):
            send(link, progress=abort)
    transfer(place, "next")


def test_what_an_aborted_link_refuses_is_not_kept(place: Place) -> None:
    with group(place, "epoch") as (link, _):
        link.abort()
        with pytest.raises(TransportError, match="aborted"):
            send(link)
        assert link.close()


def test_nccl_refuses_two_members_on_one_gpu() -> None:
    place = Place("nccl", "cuda:0")
    with pytest.raises(UnsuitableDevices, match="on the GPU of another"), group(place, "epoch"):
        pass


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_cuda_ipc_refuses_a_member_on_another_gpu() -> None:
    place = Place("cuda_ipc", "cuda:1")
    with pytest.raises(UnsuitableDevices, match="not on the GPU"), group(place, "epoch"):
        pass


def test_a_stranger_is_no_member() -> None:
    """Nor does it hold up those that are."""
    link = open_link("cuda_ipc", epoch="epoch", rank=0, world_size=2, device=HERE)
    try:
        with member(CUDA_IPC, "receive", "epoch", 1, 2) as process:
            offers = link.offers({1: bytes.fromhex(read(process))})
            port = int.from_bytes(offers[1][32:34], "little")
            with (
                socket.create_connection(("127.0.0.1", port)) as stranger,
                socket.create_connection(("127.0.0.1", port)),  # and one that says nothing
            ):
                stranger.sendall(bytes(36))
                write(process, offers[1].hex())
                link.connect(TIMEOUT)
                sender = send(link)
            assert int(read(process)) == sender.digest
    finally:
        link.close()


def test_nothing_of_a_gpu_is_kept_by_a_link_that_is_closed() -> None:
    transfer(CUDA_IPC, "first")
    torch.cuda.synchronize(HERE)
    before, _ = torch.cuda.mem_get_info(HERE)
    for epoch in ("second", "third"):
        transfer(CUDA_IPC, epoch)
    after, _ = torch.cuda.mem_get_info(HERE)
    assert before - after < 32 << 20


def test_a_member_that_never_connects_is_given_up_in_bounded_time(place: Place) -> None:
    link = open_link(place.backend, epoch="epoch", rank=0, world_size=2, device=HERE)
    start = time.monotonic()
    answer = b"another device" if place is NCCL else sealed("epoch", link.answer)
    link.offers({1: answer})
    with pytest.raises(TransportTimeout, match=r"did not form the group|did not connect in time"):
        link.connect(0.3)
    assert link.close()
    assert time.monotonic() - start < TIMEOUT / 2


def test_a_group_moves_several_updates(place: Place) -> None:
    with group(place, "epoch") as (link, process):
        for number in range(3):
            assert link.transfers == number
            sender = send(link)
            assert int(read(process)) == sender.digest
            write(process, "again" if number < 2 else "close")
        assert process.wait(TIMEOUT) == 0


def test_the_streams_and_their_memory_are_used_again(place: Place) -> None:
    transfer(place, "first")
    torch.cuda.synchronize(HERE)
    before = torch.cuda.memory_reserved(HERE)
    for epoch in ("second", "third"):
        transfer(place, epoch)
    assert torch.cuda.memory_reserved(HERE) == before

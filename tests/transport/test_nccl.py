"""Groups over NCCL: moving, failing, going on.

Each member has a GPU of its own; on a machine with one GPU, NCCL is told of two hosts, and moves
bytes by sockets.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from rollwire_transport import (
    Receiver,
    Sender,
    TransportError,
    TransportTimeout,
    available_backends,
    describe_all,
    join_group,
    open_rendezvous,
    plan,
)
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


@contextlib.contextmanager
def member(
    *arguments: object, environment: Mapping[str, str] = ELSEWHERE
) -> Iterator[subprocess.Popen[str]]:
    """A process of ``support/gpu_member.py``."""
    command = [sys.executable, gpu_member.__file__, *map(str, arguments)]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def group(
    epoch: str, device: str = THERE, environment: Mapping[str, str] = ELSEWHERE
) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """Rank 0's link, here, and the process that receives."""
    rendezvous = open_rendezvous("nccl", epoch=epoch, world_size=2, device=HERE)
    told = ("receive", device, MIB, rendezvous.address, epoch, 1, 2)
    with member(*told, environment=environment) as process:
        try:
            link = rendezvous.form_group(TIMEOUT)
        finally:
            rendezvous.close()
        try:
            yield link, process
        finally:
            link.close()


def send(
    link: Link, timeout: float = TIMEOUT, progress: Callable[[int], None] | None = None
) -> Sender:
    tensors = gpu_member.weights(MIB, HERE)
    sender = Sender(plan(describe_all(tensors), bucket_bytes=gpu_member.BUCKET_BYTES))
    sender.send(link, tensors.items, bucket_timeout=timeout, progress=progress)
    return sender


def transfer(epoch: str) -> None:
    """A whole transfer, which the receiver compares bit for bit."""
    with group(epoch) as (link, process):
        sender = send(link)
        link.close()  # a receiver keeps its end until rank 0 has left
        output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 0
        assert int(output.split()[-1]) == sender.digest


def test_it_is_available() -> None:
    assert available_backends()["nccl"].ok


def test_everything_arrives_bit_for_bit_beside_the_trainers_own_group(
    trainers_own_group: None,
) -> None:
    for epoch in ("one", "two"):
        transfer(epoch)
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("blow", "timeout"),
    [(signal.SIGKILL, TIMEOUT), (signal.SIGSTOP, 1.0)],
    ids=["killed", "stopped"],
)
def test_a_receiver_that_dies_is_named_and_the_sender_goes_on(
    blow: signal.Signals, timeout: float
) -> None:
    hit_at = 0.0
    with group("first") as (link, process):

        def hit(sent: int) -> None:
            nonlocal hit_at
            if sent == 10 << 20:
                process.send_signal(blow)
                hit_at = time.monotonic()

        with pytest.raises(TransportError, match="rank 1") as caught:
            send(link, timeout, hit)
        assert caught.value.peer == "rank 1"
        assert isinstance(caught.value, TransportTimeout) == (blow is signal.SIGSTOP)
        assert time.monotonic() - hit_at < TIMEOUT / 2
    transfer("second")


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_sender_that_dies_is_named_and_the_receiver_goes_on(blow: signal.Signals) -> None:
    wanted = gpu_member.weights(MIB, HERE)
    manifest = plan(describe_all(wanted), bucket_bytes=gpu_member.BUCKET_BYTES)
    receiver = Receiver(manifest, {name: torch.zeros_like(t) for name, t in wanted.items()})
    for epoch, dies in (("first", True), ("second", False)):
        with member("send", THERE, MIB, epoch, 2) as process:
            assert process.stdout is not None
            link = join_group(
                "nccl",
                epoch=epoch,
                rank=1,
                world_size=2,
                rendezvous=process.stdout.readline().strip(),
                timeout=TIMEOUT,
                device=HERE,
            )
            try:
                if dies:
                    process.send_signal(blow)
                    hit_at = time.monotonic()
                    with pytest.raises(TransportError) as caught:
                        receiver.receive(link, first_bucket=0, bucket_timeout=1)
                    assert caught.value.peer == "rank 0"
                    assert time.monotonic() - hit_at < TIMEOUT / 2
                else:
                    receiver.receive(link, first_bucket=0, bucket_timeout=TIMEOUT)
            finally:
                link.close()
    assert receiver.complete


def test_an_abort_from_another_thread_ends_both_ends() -> None:
    with group("epoch") as (link, process), ThreadPoolExecutor(1) as pool:

        def abort(sent: int) -> None:
            if sent == 10 << 20:
                pool.submit(link.abort).result()

        with pytest.raises(TransportError, match="aborted"):
            send(link, progress=abort)
        assert process.wait(TIMEOUT) != 0
    transfer("next")


def test_what_an_aborted_link_refuses_is_not_kept() -> None:
    with group("epoch") as (link, _):
        link.abort()
        with pytest.raises(TransportError, match="aborted"):
            send(link)
        assert link.close()


def test_two_members_on_one_gpu_are_refused() -> None:
    with pytest.raises(TransportError, match="on the GPU of another"), group("epoch", "cuda:0", {}):
        pass


def test_a_member_that_never_joins_is_named_in_bounded_time() -> None:
    rendezvous = open_rendezvous("nccl", epoch="epoch", world_size=2, device=HERE)
    start = time.monotonic()
    with pytest.raises(TransportTimeout, match="rank 1 did not join"):
        rendezvous.form_group(0.3)
    rendezvous.close()
    assert time.monotonic() - start < TIMEOUT / 2


def test_the_streams_and_their_memory_are_used_again() -> None:
    transfer("first")
    torch.cuda.synchronize(HERE)
    before = torch.cuda.memory_reserved(HERE)
    for epoch in ("second", "third"):
        transfer(epoch)
    assert torch.cuda.memory_reserved(HERE) == before

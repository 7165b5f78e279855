"""A server's end of a chain in a process of its own, which a test may kill or stop."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rollwire_transport import (
    Receiver,
    TensorSpec,
    TransportError,
    TransportTimeout,
    open_link,
    plan,
)

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# Forks of a process that has imported torch start at once.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["rollwire_transport"])


@dataclass(frozen=True)
class Order:
    """A chain to join, for an update of one tensor."""

    epoch: str
    rank: int
    world_size: int
    first_bucket: int  # 0 begins a new update
    size: int
    bucket_bytes: int
    timeout: float


@dataclass
class Answer:
    """What came of it."""

    error: str = ""
    peer: int | None = None
    late: bool = False
    forwarded_bytes: int = 0
    next_bucket: int = 0
    digest: int = 0
    total: int = 0
    threads: int = 0
    let_go: bool = True  # of all memory
    files: int = 0


def start() -> tuple[multiprocessing.process.BaseProcess, Connection]:
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=serve, args=(theirs,))
    process.start()
    theirs.close()
    return process, ours


def serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    receiver: Receiver | None = None
    while True:
        order: Order = pipe.recv()
        if order.first_bucket == 0 or receiver is None:
            target = torch.zeros(order.size, dtype=torch.uint8)
            manifest = plan(
                [TensorSpec("w", "uint8", (order.size,))], bucket_bytes=order.bucket_bytes
            )
            receiver = Receiver(manifest, {"w": target})
        answer = obey(order, receiver, pipe)
        if receiver.complete:
            answer.digest = receiver.digest
            answer.total = int(target.sum(dtype=torch.int64))
        pipe.send(answer)


def obey(order: Order, receiver: Receiver, pipe: Connection) -> Answer:
    """Joins and receives; the link stays open until the test has told all to close it."""
    answer = Answer()
    link = open_link("ucx", epoch=order.epoch, rank=order.rank, world_size=order.world_size)
    pipe.send(link.answer)
    try:
        try:
            link.connect(20, pipe.recv())
            pipe.send("connected")
            receiver.receive(link, first_bucket=order.first_bucket, bucket_timeout=order.timeout)
            pipe.send("received")
            pipe.recv()
        finally:
            answer.let_go = link.close()
            answer.forwarded_bytes = link.forwarded_bytes
    except TransportError as error:
        answer.error, answer.peer = str(error), error.peer
        answer.late = isinstance(error, TransportTimeout)
    answer.next_bucket = receiver.next_bucket
    answer.threads = threading.active_count()
    answer.files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    return answer

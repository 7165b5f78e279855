"""Groups within one process, over gloo or another backend."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from rollwire_transport import (
    Link,
    Receiver,
    Sender,
    describe_all,
    open_link,
    plan,
)

from support.tensors import random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TIMEOUT = 60.0  # seconds that nothing should take, on a machine that is busy with other things


@contextlib.contextmanager
def group(epoch: str = "epoch", receivers: int = 1, backend: str = "gloo") -> Iterator[list[Link]]:
    """The links of all ranks of a group, in this process."""
    links = [
        open_link(backend, epoch=epoch, rank=rank, world_size=receivers + 1)
        for rank in range(receivers + 1)
    ]
    try:
        connect(links)
        yield links
    finally:
        for link in links:
            link.close()


def connect(links: list[Link], timeout: float = TIMEOUT) -> None:
    trainer, *servers = links
    offers = trainer.offers({rank: link.answer for rank, link in enumerate(servers, start=1)})
    with ThreadPoolExecutor(len(links)) as pool:
        connecting = [pool.submit(trainer.connect, timeout)]
        connecting += [pool.submit(s.connect, timeout, offers[r]) for r, s in enumerate(servers, 1)]
        for future in connecting:
            future.result()


@contextlib.contextmanager
def in_thread(action: Callable[[], object]) -> Iterator[Future[object]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(action)


WEIGHTS = {"w": random_tensor(torch.uint8, (1 << 20,), 1)}
MANIFEST = plan(describe_all(WEIGHTS), bucket_bytes=1 << 15)


def receiver() -> Receiver:
    return Receiver(MANIFEST, {"w": torch.zeros_like(WEIGHTS["w"])})


def transfer(link: Link, server: Link) -> None:
    sender, target = Sender(MANIFEST), receiver()
    with in_thread(
        lambda: target.receive(server, first_bucket=0, bucket_timeout=TIMEOUT)
    ) as receiving:
        sender.send(link, WEIGHTS.items, bucket_timeout=TIMEOUT)
    receiving.result()
    assert target.digest == sender.digest

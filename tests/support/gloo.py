"""Groups within one process, over gloo or another backend."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from rollwire_transport import (
    Link,
    Receiver,
    Rendezvous,
    Sender,
    describe_all,
    join_group,
    open_rendezvous,
    plan,
)

from support.tensors import random_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TIMEOUT = 60.0  # seconds that nothing should take, on a machine that is busy with other things


@contextlib.contextmanager
def group(epoch: str = "epoch", receivers: int = 1, backend: str = "gloo") -> Iterator[list[Link]]:
    """The links of all ranks of a group, in this process."""
    rendezvous = open_rendezvous(backend, epoch=epoch, world_size=receivers + 1)
    links: list[Link] = []
    try:
        with ThreadPoolExecutor(receivers) as pool:
            joining = [
                pool.submit(join_at, rendezvous, epoch, rank, receivers + 1, backend=backend)
                for rank in range(1, receivers + 1)
            ]
            links.append(rendezvous.form_group(TIMEOUT))
            links += [future.result() for future in joining]
        yield links
    finally:
        for link in links:
            link.close()
        rendezvous.close()


def join_at(
    rendezvous: Rendezvous,
    epoch: str,
    rank: int,
    world_size: int,
    timeout: float = TIMEOUT,
    backend: str = "gloo",
) -> Link:
    return join_group(
        backend,
        epoch=epoch,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous.address,
        timeout=timeout,
    )


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
    with in_thread(lambda: target.receive(server, first_bucket=0, bucket_timeout=TIMEOUT)):
        sender.send(link, WEIGHTS.items, bucket_timeout=TIMEOUT)
    assert target.digest == sender.digest

"""Groups over gloo: forming, and what arrives."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from rollwire_transport import (
    Link,
    Receiver,
    Sender,
    TransportError,
    TransportTimeout,
    available_backends,
    describe_all,
    open_link,
    plan,
)
from support.examples import examples
from support.gloo import (
    MANIFEST,
    TIMEOUT,
    WEIGHTS,
    connect,
    group,
    in_thread,
    receiver,
    transfer,
)
from support.tensors import content, room_for, weights

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@settings(max_examples=examples(10))
@given(weights())
def test_everything_arrives_bit_for_bit(tensors: dict[str, Tensor]) -> None:
    manifest = plan(describe_all(tensors), bucket_bytes=256)
    sender = Sender(manifest)
    destinations = [room_for(manifest) for _ in range(2)]
    receivers = [Receiver(manifest, destination) for destination in destinations]
    with group(receivers=2) as (trainer, *servers), ThreadPoolExecutor(2) as pool:
        receiving = [
            pool.submit(r.receive, link, first_bucket=0, bucket_timeout=TIMEOUT)
            for r, link in zip(receivers, servers, strict=True)
        ]
        sender.send(trainer, tensors.items, bucket_timeout=TIMEOUT)
        for future in receiving:
            future.result()
    assert [r.digest for r in receivers] == [sender.digest] * 2
    for destination in destinations:
        assert all(content(tensor) == content(tensors[n]) for n, tensor in destination.items())


def test_two_groups_at_once_beside_the_trainers_own(trainers_own_group: None) -> None:
    with group("one") as one, group("two") as two, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(transfer, *one), pool.submit(transfer, *two)]:
            future.result()
    assert dist.get_world_size() == 1


def test_no_default_group_is_made() -> None:
    with group() as links:
        transfer(*links)
        assert not dist.is_initialized()


def opened(rank: int, epoch: str = "epoch") -> Link:
    return open_link("gloo", epoch=epoch, rank=rank, world_size=2)


def test_a_member_that_never_connects_is_named_in_bounded_time() -> None:
    trainer, server = opened(0), opened(1)
    trainer.offers({1: server.answer})
    start = time.monotonic()
    with pytest.raises(TransportTimeout, match="rank 1 cannot be reached") as caught:
        trainer.connect(0.5)
    assert caught.value.peer == 1
    assert time.monotonic() - start < TIMEOUT / 2
    trainer.close()
    server.close()


@pytest.mark.parametrize("how", ["deadline", "abort", "close"])
def test_a_trainer_that_freezes_before_it_connects_is_given_up(how: str) -> None:
    trainer, server = opened(0), opened(1)
    offer = trainer._addresses()[1]  # and it does not take the answer
    start = time.monotonic()
    timeout = 0.5 if how == "deadline" else TIMEOUT
    with in_thread(lambda: server.connect(timeout, offer)) as connecting:
        if how != "deadline":
            threading.Timer(0.1, getattr(server, how)).start()
        with pytest.raises(TransportError) as caught:
            connecting.result()
    assert isinstance(caught.value, TransportTimeout) == (how == "deadline")
    assert time.monotonic() - start < TIMEOUT / 2
    trainer.close()
    server.close()


def test_strangers_who_connect_hurt_nobody() -> None:
    before = listening()
    trainer, server = opened(0), opened(1)
    strangers = []
    for port in listening() - before:
        for said in (b"", b"GET / HTTP/1.1\r\n" * 10):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(said)
            strangers.append(stranger)
    assert strangers
    connect([trainer, server])
    transfer(trainer, server)
    for end in (trainer, server, *strangers):
        end.close()


def listening() -> set[int]:
    """Ports of 127.0.0.1 on which somebody listens."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    ends = (line.split()[1].split(":") for line in lines if line.split()[3] == "0A")
    return {int(port, 16) for host, port in ends if host == "0100007F"}


def test_a_group_is_used_again_and_takes_nothing_of_a_former_update() -> None:
    with group(receivers=2) as (trainer, *servers):
        for number in range(3):
            assert [link.transfers for link in (trainer, *servers)] == [number] * 3
            targets = [receiver(), receiver()]
            with ThreadPoolExecutor(2) as pool:
                receiving = [
                    pool.submit(r.receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
                    for r, s in zip(targets, servers, strict=True)
                ]
                Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
                for future in receiving:
                    future.result()
        trainer.transfers += 1  # as a bucket of another update would be
        with in_thread(
            lambda: receiver().receive(servers[0], first_bucket=0, bucket_timeout=TIMEOUT)
        ) as refused:
            with contextlib.suppress(TransportError):
                Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=1)
            with pytest.raises(TransportError, match="no header of this format and transfer"):
                refused.result()


def test_bad_arguments_are_refused() -> None:
    for rank in (-1, 2):
        with pytest.raises(TransportError, match=f"there is no rank {rank} "):
            opened(rank)
    with pytest.raises(TransportError, match="no rank 0 with a peer in a group of 1"):
        open_link("gloo", epoch="e", rank=0, world_size=1)
    with pytest.raises(ValueError, match="not an address at which"):
        open_link("gloo", epoch="e", rank=0, world_size=2, host="0.0.0.0")  # noqa: S104 - is refused
    with pytest.raises(OSError, match="assign requested address"):
        open_link("gloo", epoch="e", rank=0, world_size=2, host="192.0.2.7")
    for name, backend in available_backends().items():
        if not backend.ok:
            with pytest.raises(TransportError, match=f"backend {name} cannot be used"):
                open_link(name, epoch="e", rank=0, world_size=2)
    with pytest.raises(TransportError, match="there is no backend 'pigeon'"):
        open_link("pigeon", epoch="e", rank=0, world_size=2)


def test_it_works_over_ipv6() -> None:
    try:
        links = [
            open_link("gloo", epoch="epoch", rank=rank, world_size=2, host="::1") for rank in (0, 1)
        ]
    except OSError:
        pytest.skip("this machine has no IPv6")
    connect(links)
    transfer(*links)
    for link in links:
        link.close()

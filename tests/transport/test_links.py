"""What every backend does that this machine can use for tensors on a CPU. A new one is tried as it
is; what it does when processes die or freeze needs tests of its own, as gloo's and UCX's have.
"""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_transport import (
    Sender,
    TransportError,
    TransportTimeout,
    available_backends,
    open_link,
)
from support.gloo import MANIFEST, TIMEOUT, WEIGHTS, connect, group, in_thread, receiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollwire_transport import Link

BACKENDS = available_backends()
usable = pytest.mark.parametrize(
    "backend", [name for name, backend in BACKENDS.items() if backend.ok and name != "nccl"]
)


@pytest.fixture(autouse=True, scope="module")
def over_tcp() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")  # whatever this machine has
        yield


def test_the_preferred_backend_comes_first() -> None:
    assert list(BACKENDS) == ["gloo", "ucx", "nccl", "cuda_ipc"]
    on_gpu = available_backends(device=torch.device("cuda"))
    assert list(on_gpu) == ["cuda_ipc", "ucx", "nccl", "gloo"]


def test_backends_say_why_they_cannot_be_used() -> None:
    assert all(backend.ok or backend.reason for backend in BACKENDS.values())
    assert BACKENDS["gloo"].ok


def test_operators_read_where_each_listens() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text()
    for name in BACKENDS:
        assert re.search(rf"^ *\| {name} +\|", page, re.MULTILINE), name


@usable
def test_a_silent_sender_is_named(backend: str) -> None:
    with group(backend=backend) as (_, server):
        began = time.monotonic()
        with pytest.raises(TransportError) as caught:
            receiver().receive(server, first_bucket=0, bucket_timeout=0.5)
        assert 0.5 <= time.monotonic() - began < TIMEOUT / 2
        assert caught.value.peer == 0


def opened(backend: str, rank: int, epoch: str = "epoch") -> Link:
    return open_link(backend, epoch=epoch, rank=rank, world_size=2)


@usable
@pytest.mark.parametrize("change", ["empty", "nonsense", "long", "a byte", "of another group"])
def test_an_address_that_is_none_is_refused(backend: str, change: str) -> None:
    """Gloo and UCX would end the process that reads it."""
    trainer, server = opened(backend, 0), opened(backend, 1)
    other = opened(backend, 1, "another")
    wrong = {
        "empty": b"",
        "nonsense": b"\xff" * 200,
        "long": bytes(4 << 20),
        "a byte": server.answer[:-9] + bytes([server.answer[-9] ^ 1]) + server.answer[-8:],
        "of another group": other.answer,
    }[change]
    with pytest.raises(TransportError, match="rank 1 sent no address") as caught:
        trainer.offers({1: wrong})
    assert caught.value.peer == 1
    with pytest.raises(TransportError, match="rank 0 sent no address"):
        server.connect(TIMEOUT, wrong)
    for link in (trainer, server, other):
        link.close()


@usable
def test_only_members_who_know_the_epoch_get_in(backend: str) -> None:
    links = [opened(backend, 0, "secret"), opened(backend, 1, "guess")]
    with pytest.raises(TransportError, match="no address of a member of this group"):
        connect(links)
    for link in links:
        link.close()


@usable
def test_every_receiver_gets_everything_update_after_update(backend: str) -> None:
    with group(receivers=2, backend=backend) as (trainer, *servers):
        for number in range(3):
            assert [link.transfers for link in (trainer, *servers)] == [number] * 3
            sender, targets = Sender(MANIFEST), [receiver(), receiver()]
            with ThreadPoolExecutor(2) as pool:
                receiving = [
                    pool.submit(target.receive, server, first_bucket=0, bucket_timeout=TIMEOUT)
                    for target, server in zip(targets, servers, strict=True)
                ]
                sender.send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
                for future in receiving:
                    future.result()
            assert [target.digest for target in targets] == [sender.digest] * 2


@usable
@pytest.mark.parametrize("who", ["trainer", "server"])
def test_an_abort_ends_waits_at_both_ends(backend: str, who: str) -> None:
    with group(backend=backend) as (trainer, server):
        began = time.monotonic()
        aborted: Link = trainer if who == "trainer" else server
        threading.Timer(0.1, aborted.abort).start()
        with pytest.raises(TransportError) as caught:
            receiver().receive(server, first_bucket=0, bucket_timeout=TIMEOUT)
        assert not isinstance(caught.value, TransportTimeout)
        if who == "trainer":
            assert caught.value.peer == 0
        # As whoever drives a group does: gloo may not notice a connection that breaks as it sends.
        other_end = threading.Timer(TIMEOUT / 20, trainer.abort)
        other_end.start()
        with pytest.raises(TransportError) as caught:
            Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
        other_end.cancel()
        if who == "server":
            assert caught.value.peer == 1 or backend == "gloo"
        assert time.monotonic() - began < TIMEOUT / 2
        aborted.abort()  # any number of times
        assert aborted.close()
        assert aborted.close()
        with pytest.raises(TransportError):
            aborted.send(torch.zeros(4, dtype=torch.int64), WEIGHTS["w"])


@usable
def test_who_is_waited_for_is_known(backend: str) -> None:
    with group(receivers=2, backend=backend) as (trainer, *servers):
        assert [link.waits_for for link in (trainer, *servers)] == [None] * 3
        with in_thread(
            lambda: receiver().receive(servers[0], first_bucket=0, bucket_timeout=TIMEOUT)
        ) as receiving:
            began = time.monotonic()
            while servers[0].waits_for != 0:
                assert time.monotonic() - began < TIMEOUT / 2
                time.sleep(0.001)
            servers[0].abort()
            with pytest.raises(TransportError):
                receiving.result()


@usable
def test_what_was_opened_is_closed_without_having_connected(backend: str) -> None:
    for rank in (0, 1):
        link = opened(backend, rank)
        assert link.close()
        with pytest.raises(TransportError):
            link.connect(TIMEOUT, bytes(100))
        assert link.close()

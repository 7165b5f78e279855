"""Chains over UCX: every receiver a process of its own, some of them killed or stopped."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rollwire_transport import (
    Link,
    ListenOptions,
    Sender,
    TransportError,
    TransportTimeout,
    available_backends,
    describe_all,
    open_link,
    plan,
)
from rollwire_transport._links import ucx
from support import chain_member
from support.chain_member import Answer, Order
from support.gloo import connect, in_thread
from support.tensors import random_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

UCX = available_backends()["ucx"]
pytestmark = pytest.mark.skipif(not UCX.ok, reason=UCX.reason)

TIMEOUT = 60.0  # seconds that nothing should take, on a machine that is busy with other things
START = 2 * TIMEOUT  # for a process to import torch there, or to give up a bucket
SIZE, BUCKET = (20 << 20) + 12345, 5 << 20  # buckets of two chunks; the last is an odd one


@pytest.fixture(autouse=True, scope="module")
def over_tcp() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        yield


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return {"w": random_tensor(torch.uint8, (SIZE,), 1)}


class Member:
    """A receiver in a process of its own."""

    def __init__(self) -> None:
        self.process, self.pipe = chain_member.start()

    def read(self) -> Any:
        assert self.pipe.poll(START), "no answer"
        return self.pipe.recv()

    def answer(self) -> Answer:
        """What came of its order, once its link is closed."""
        told = self.read()
        if told == "received":
            self.pipe.send("close")
            told = self.read()
        return told

    def hit(self, blow: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, blow)

    def end(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT)
        self.pipe.close()


@contextlib.contextmanager
def members(count: int) -> Iterator[list[Member]]:
    started = [Member() for _ in range(count)]
    try:
        yield started
    finally:
        for member in started:
            member.end()


@contextlib.contextmanager
def chain(
    receivers: list[Member],
    first_bucket: int = 0,
    size: int = SIZE,
    bucket_bytes: int = BUCKET,
    timeout: float = TIMEOUT,
) -> Iterator[Link]:
    """Rank 0's end of a chain of these."""
    epoch, world_size = secrets.token_hex(), len(receivers) + 1
    link = open_link("ucx", epoch=epoch, rank=0, world_size=world_size)
    answers = {}
    for rank, member in enumerate(receivers, start=1):
        order = Order(epoch, rank, world_size, first_bucket, size, bucket_bytes, timeout)
        member.pipe.send(order)
        answers[rank] = member.read()
    offers = link.offers(answers)
    for rank, member in enumerate(receivers, start=1):
        member.pipe.send(offers[rank])
    link.connect(START)
    assert [member.read() for member in receivers] == ["connected"] * len(receivers)
    try:
        yield link
    finally:
        link.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_everything_arrives_bit_for_bit(count: int, weights: dict[str, torch.Tensor]) -> None:
    sender = Sender(plan(describe_all(weights), bucket_bytes=BUCKET))
    with members(count) as receivers:
        for _ in range(2):  # once more over another chain of the same processes
            with chain(receivers) as link:
                sender.send(link, weights.items, bucket_timeout=TIMEOUT)
                answers = [member.answer() for member in receivers]
            assert [a.digest for a in answers] == [sender.digest] * count
            total = int(weights["w"].sum(dtype=torch.int64))
            assert [a.total for a in answers] == [total] * count
            forwarded = [SIZE] * (count - 1) + [0]
            assert [a.forwarded_bytes for a in answers] == forwarded
            assert all(a.threads == 1 for a in answers)


BLOWS = {"killed": (signal.SIGKILL, TIMEOUT), "stopped": (signal.SIGSTOP, 3.0)}


@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("how", list(BLOWS))
def test_when_a_member_dies_the_others_go_on_without_it(victim: int, how: str) -> None:
    blow, timeout = BLOWS[how]
    weights = {"w": random_tensor(torch.uint8, (32 << 20,), 2)}
    manifest = plan(describe_all(weights), bucket_bytes=1 << 20)
    sender = Sender(manifest)
    size, bucket_bytes = 32 << 20, 1 << 20
    with members(3) as receivers:
        dead = receivers[victim - 1]
        survivors = [member for member in receivers if member is not dead]
        hit_at = 0.0

        def hit(sent: int) -> None:
            nonlocal hit_at
            if sent == 10 << 20:
                dead.hit(blow)
                hit_at = time.monotonic()

        with chain(receivers, 0, size, bucket_bytes, timeout) as link:
            with pytest.raises(TransportError) as caught:
                sender.send(link, weights.items, bucket_timeout=timeout, progress=hit)
            # It sees its neighbour only; whoever drives the chain hears of all.
            assert caught.value.peer == 1, caught.value
            if victim == 1:  # else the relay before it may give up first
                assert isinstance(caught.value, TransportTimeout) == (how == "stopped")
            answers = [member.answer() for member in survivors]
            assert time.monotonic() - hit_at < timeout + TIMEOUT / 2
        if how == "killed":
            ranks = [rank for rank in (1, 2, 3) if rank != victim]
            named = {rank: a.peer for rank, a in zip(ranks, answers, strict=True) if a.error}
            assert all(named[r] == victim for r in (victim - 1, victim + 1) if r in named), named
        assert all(a.let_go for a in answers)  # who go on with the same memory
        missing = min(a.next_bucket for a in answers)
        assert 0 < missing < len(manifest.buckets)

        with chain(survivors, missing, size, bucket_bytes) as link:
            sender.send(link, weights.items, first_bucket=missing, bucket_timeout=TIMEOUT)
            assert [m.answer().digest for m in survivors] == [sender.digest] * 2


def test_the_trainers_death_reaches_all() -> None:
    with members(2) as receivers, chain(receivers) as link:
        start = time.monotonic()
        link.abort()
        answers = [member.answer() for member in receivers]
        assert time.monotonic() - start < TIMEOUT / 2
    assert [a.peer for a in answers] == [0, 1]  # each by its neighbour's end


def test_an_abort_ends_what_waits_here(weights: dict[str, torch.Tensor]) -> None:
    sender = Sender(plan(describe_all(weights), bucket_bytes=BUCKET))
    with members(2) as receivers, chain(receivers) as link:
        receivers[1].hit(signal.SIGSTOP)  # the relay waits for it, and rank 0 for the relay
        start = time.monotonic()
        with in_thread(lambda: sender.send(link, weights.items, bucket_timeout=TIMEOUT)) as sending:
            while link.waits_for != 1:
                assert time.monotonic() - start < TIMEOUT / 2
                time.sleep(0.001)
            link.abort()
            with pytest.raises(TransportError, match="aborted"):
                sending.result()
        assert time.monotonic() - start < TIMEOUT / 2
        with pytest.raises(TransportError, match="aborted"):
            link.send(torch.zeros(4, dtype=torch.int64), weights["w"])
        link.abort()


def test_a_silent_sender_is_a_timeout_of_one_bucket() -> None:
    with members(2) as receivers, chain(receivers, timeout=0.5):
        answers = [member.answer() for member in receivers]
        assert all(a.error for a in answers)
        assert answers[0].peer == 0


def test_messages_of_another_epoch_or_update_are_not_taken() -> None:
    links = [open_link("ucx", epoch="epoch", rank=rank, world_size=2) for rank in range(2)]
    connect(links)
    header, payload = torch.ones(4, dtype=torch.int64), torch.ones(64, dtype=torch.uint8)
    links[0].transfers = 1
    for epoch, transfers in (("guess", 1), ("epoch", 0)):
        links[1]._epoch, links[1].transfers = epoch, transfers
        here = torch.zeros_like(payload)
        links[0].send(header, payload)
        with pytest.raises(TransportTimeout):
            links[1].receive(header.clone(), here).wait(0.3)
        assert not here.any()
    for link in links:
        link.close()


def test_what_is_prepared_leaves_no_thread_or_file() -> None:
    ucx.BACKEND.warm_up(torch.device("cpu"), ListenOptions())  # what is made once and kept
    files, threads = open_files(), threading.active_count()
    ucx.BACKEND.warm_up(torch.device("cpu"), ListenOptions())
    assert (open_files(), threading.active_count()) == (files, threads)


def test_no_thread_or_file_is_left(weights: dict[str, torch.Tensor]) -> None:
    sender = Sender(plan(describe_all(weights), bucket_bytes=BUCKET))

    def succeed(receivers: list[Member]) -> list[Answer]:
        with chain(receivers) as link:
            sender.send(link, weights.items, bucket_timeout=TIMEOUT)
            return [member.answer() for member in receivers]

    def fail(receivers: list[Member]) -> list[Answer]:
        with chain(receivers) as link:

            def abort(sent: int) -> None:
                if sent >= BUCKET:
                    link.abort()

            with pytest.raises(TransportError, match="aborted"):
                sender.send(link, weights.items, bucket_timeout=TIMEOUT, progress=abort)
        return [member.answer() for member in receivers]

    with members(2) as receivers:
        for act in (succeed, fail):
            act(receivers)  # what is made once and kept
            files, threads = open_files(), threading.active_count()
            theirs = [a.files for a in act(receivers)]
            for _ in range(3):
                answers = act(receivers)
            assert all(a.files <= few + 2 for a, few in zip(answers, theirs, strict=True))
            assert all(a.threads == 1 for a in answers)
            assert threading.active_count() == threads
            assert open_files() <= files + 2  # UCX closes connections a little later


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

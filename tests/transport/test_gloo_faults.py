"""Groups over gloo that fail: in bounded time, by name, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_transport import (
    Link,
    Receiver,
    Sender,
    TransportError,
    TransportTimeout,
    describe_all,
    open_link,
    plan,
)
from rollwire_transport._links import gloo
from support.footprint import Footprint
from support.gloo import (
    MANIFEST,
    TIMEOUT,
    WEIGHTS,
    group,
    in_thread,
    receiver,
    transfer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_silent_sender_is_a_timeout_of_one_bucket() -> None:
    with group() as (_, server):
        start = time.monotonic()
        with pytest.raises(TransportTimeout) as caught:
            receiver().receive(server, first_bucket=0, bucket_timeout=0.3)
        assert caught.value.peer == 0
        assert 0.3 <= time.monotonic() - start < TIMEOUT / 2


def test_a_sender_that_falls_silent_half_way_is_a_timeout_too() -> None:
    with group() as (trainer, server):
        target, given_up = receiver(), threading.Event()

        def fall_silent(sent: int) -> None:
            if sent >= 10 << 15:
                given_up.wait(TIMEOUT)

        with in_thread(
            lambda: Sender(MANIFEST).send(
                trainer, WEIGHTS.items, bucket_timeout=TIMEOUT, progress=fall_silent
            )
        ) as sending:
            with pytest.raises(TransportTimeout):
                target.receive(server, first_bucket=0, bucket_timeout=2)
            trainer.abort()  # as who drives the group does: gloo may be in the middle of a message
            given_up.set()
            with pytest.raises(TransportError):
                sending.result()
        assert 10 <= target.next_bucket < len(MANIFEST.buckets)


@pytest.mark.parametrize("who", ["trainer", "server"])
def test_an_abort_ends_both_ends_at_once(who: str) -> None:
    with group() as (trainer, server):
        target = receiver()
        with in_thread(
            lambda: target.receive(server, first_bucket=0, bucket_timeout=TIMEOUT)
        ) as receiving:
            start = time.monotonic()
            aborted, error = (trainer, "rank 0") if who == "trainer" else (server, "aborted")
            threading.Timer(0.1, aborted.abort).start()
            with pytest.raises(TransportError, match=error) as caught:
                receiving.result()
        assert not isinstance(caught.value, TransportTimeout)
        assert time.monotonic() - start < TIMEOUT / 2
        with pytest.raises(TransportError):
            Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
        aborted.abort()


@pytest.mark.parametrize("who", ["trainer", "server"])
def test_an_abort_in_the_middle_of_a_message_ends_it_at_once(who: str) -> None:
    """Gloo does not end the other end's wait then: who drives the group aborts that too."""
    header = torch.ones(4, dtype=torch.int64)
    there = torch.ones(1 << 28, dtype=torch.uint8)
    for _ in range(10):  # who looks a moment late misses the middle
        here = torch.zeros_like(there)
        with group() as (trainer, server), ThreadPoolExecutor(2) as pool:
            ends = [server.receive(header.clone(), here), trainer.send(header, there)]
            waiting = [pool.submit(end.wait, TIMEOUT) for end in ends]
            while not here[0]:
                time.sleep(0.001)
            if here[-1]:
                continue
            start = time.monotonic()
            ends_in_order = [(server, waiting[0]), (trainer, waiting[1])]
            if who == "trainer":
                ends_in_order.reverse()
            errors = []
            for end, future in ends_in_order:
                end.abort()
                errors.append(future.exception(TIMEOUT / 2))
            assert all(isinstance(error, TransportError) for error in errors)
            assert not any(isinstance(error, TransportTimeout) for error in errors)
        assert time.monotonic() - start < TIMEOUT / 2
        return
    pytest.fail("this machine is too fast for so few bytes")


@pytest.mark.slow
def test_a_program_that_ends_with_a_message_under_way_ends_as_it_would() -> None:
    """A thread that comes back from gloo during the interpreter's end would abort the process."""
    done = subprocess.run(
        [sys.executable, "-m", "support.stuck_exit"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_receiver_that_cannot_listen_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("too many open files")

    monkeypatch.setattr(gloo, "_connect", fail)
    before = set(threading.enumerate())
    with pytest.raises(TransportError, match="gloo cannot listen: too many open files"):
        open_link("gloo", epoch="epoch", rank=1, world_size=2)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_at_the_moment_when_an_address_comes_is_one(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    ends = [open_link("gloo", epoch="epoch", rank=r, world_size=2) for r in range(2)]
    unsealed = gloo.unsealed

    def unsealed_late(epoch: str, sealed: bytes, peer: int) -> bytes:
        if peer != rank:
            ends[rank].abort()
        return unsealed(epoch, sealed, peer)

    monkeypatch.setattr(gloo, "unsealed", unsealed_late)
    try:
        offers = ends[0].offers({1: ends[1].answer})
        with pytest.raises(TransportError, match="aborted or closed at this end"):
            ends[rank].connect(TIMEOUT, offers[1] if rank else b"")
    finally:
        for end in ends:
            end.close()


def test_an_abort_reaches_members_that_the_failed_one_did_not_talk_to() -> None:
    with group(receivers=3) as (trainer, *servers), ThreadPoolExecutor(2) as pool:
        receiving = [
            pool.submit(receiver().receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
            for s in servers[:2]
        ]
        start = time.monotonic()
        servers[2].abort()
        with pytest.raises(TransportError) as caught:
            Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
        assert caught.value.peer == 3
        for future in receiving:
            with pytest.raises(TransportError) as caught:
                future.result()
            assert caught.value.peer == 0
        assert time.monotonic() - start < TIMEOUT / 2


def test_ends_that_disagree_on_the_first_bucket_fail_with_the_reason() -> None:
    with group() as (trainer, server):
        last = len(MANIFEST.buckets) - 1
        short = plan(describe_all({"w": WEIGHTS["w"][:-100]}), bucket_bytes=1 << 15)
        target = Receiver(short, {"w": torch.zeros_like(WEIGHTS["w"][:-100])})
        target._next_bucket = last
        with in_thread(
            lambda: target.receive(server, first_bucket=last, bucket_timeout=2)
        ) as receiving:
            with pytest.raises(TransportError):
                Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
            with pytest.raises(TransportError, match="the header is of bucket 0 with 32768"):
                receiving.result()


def test_aborts_at_any_moment_end_in_errors_or_success() -> None:
    """Who drives the group tells the others a moment later, as gloo may not."""

    def abort_all(links: list[Link]) -> None:
        for link in links:
            link.abort()

    dice = random.Random(1)
    for _ in range(15):
        with group(receivers=2) as links, ThreadPoolExecutor(3) as pool:
            trainer, *servers = links
            running = [
                pool.submit(receiver().receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
                for s in servers
            ]
            victim, moment = dice.choice(links), dice.randrange(len(MANIFEST.buckets)) << 15

            def abort(
                sent: int,
                victim: Link = victim,
                moment: int = moment,
                all_ends: list[Link] = links,
            ) -> None:
                if sent >= moment:
                    victim.abort()
                    threading.Timer(0.2, abort_all, [all_ends]).start()

            with pytest.raises(TransportError):
                Sender(MANIFEST).send(
                    trainer, WEIGHTS.items, bucket_timeout=TIMEOUT, progress=abort
                )
            for future in running:
                with contextlib.suppress(TransportError):
                    future.result(TIMEOUT)


class Member:
    """A process of ``support/transport_member.py``."""

    def __init__(self, *arguments: str) -> None:
        script = Path(__file__).parent.parent / "support" / "transport_member.py"
        command = [sys.executable, str(script), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def answer(self) -> bytes:
        assert self.process.stdout is not None
        return bytes.fromhex(self.process.stdout.readline())

    def connect(self, offer: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(offer.hex() + "\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def member(*arguments: str) -> Iterator[Member]:
    one = Member(*arguments)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate(timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("blow", "timeout"),
    [(signal.SIGKILL, TIMEOUT), (signal.SIGSTOP, 3.0)],
    ids=["killed", "stopped"],
)
def test_when_a_member_dies_the_others_go_on_without_it(
    blow: signal.Signals, timeout: float
) -> None:
    sender, survivors = Sender(MANIFEST), [receiver(), receiver()]
    links = [open_link("gloo", epoch="first", rank=rank, world_size=4) for rank in (0, 1, 3)]
    trainer, *servers = links
    size, bucket = str(WEIGHTS["w"].numel()), str(1 << 15)
    with member("first", "2", "4", size, bucket) as victim:
        answers = {rank: link.answer for rank, link in zip((1, 3), servers, strict=True)}
        offers = trainer.offers({**answers, 2: victim.answer()})
        with ThreadPoolExecutor(3) as pool:
            connecting = [
                pool.submit(link.connect, TIMEOUT, offers[rank])
                for rank, link in zip((1, 3), servers, strict=True)
            ]
            victim.connect(offers[2])
            trainer.connect(TIMEOUT)
            for future in connecting:
                future.result()
            receiving = [
                pool.submit(r.receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
                for r, s in zip(survivors, servers, strict=True)
            ]
            hit_at = 0.0

            def hit(sent: int) -> None:
                nonlocal hit_at
                if sent == 10 << 15:
                    victim.process.send_signal(blow)
                    hit_at = time.monotonic()

            with pytest.raises(TransportError) as caught:
                sender.send(trainer, WEIGHTS.items, bucket_timeout=timeout, progress=hit)
            assert caught.value.peer == 2
            for future in receiving:
                with pytest.raises(TransportError):
                    future.result(TIMEOUT)
            assert time.monotonic() - hit_at < TIMEOUT / 2
    trainer.close()
    assert all(server.close() for server in servers)  # who go on with the same memory

    missing = min(r.next_bucket for r in survivors)
    assert 0 < missing < len(MANIFEST.buckets)
    with group("second", receivers=2) as (trainer, *servers), ThreadPoolExecutor(2) as pool:
        receiving = [
            pool.submit(r.receive, s, first_bucket=missing, bucket_timeout=TIMEOUT)
            for r, s in zip(survivors, servers, strict=True)
        ]
        sender.send(trainer, WEIGHTS.items, first_bucket=missing, bucket_timeout=TIMEOUT)
        for future in receiving:
            future.result()
    assert [r.digest for r in survivors] == [sender.digest] * 2


def await_worker_threads() -> None:
    """Returns once gloo has let go of all messages."""
    until = time.monotonic() + 2 * TIMEOUT
    while any(thread.name == "rollwire-gloo" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts what /proc lists")
def test_nothing_is_left_behind() -> None:
    def succeed() -> None:
        with group() as links:
            transfer(*links)

    def fail() -> None:
        with (
            group(receivers=2) as (trainer, server, _),
            in_thread(
                lambda: receiver().receive(server, first_bucket=0, bucket_timeout=TIMEOUT)
            ) as receiving,
        ):
            with pytest.raises(TransportError):
                Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=0.1)
            with pytest.raises(TransportError):
                receiving.result()

    def never_connect() -> None:
        link = open_link("gloo", epoch="epoch", rank=0, world_size=2)
        with pytest.raises(TransportTimeout):
            link.connect(0.05)
        link.close()

    def left() -> Footprint:
        await_worker_threads()
        gc.collect()
        return Footprint.of(os.getpid())

    for action in (succeed, fail, never_connect):
        action()  # what is made once and kept
        before = left()
        for _ in range(3):
            action()
        # One of each time would be three. What other tests left may go meanwhile.
        assert all(now < was + 3 for now, was in zip(left(), before, strict=True)), action

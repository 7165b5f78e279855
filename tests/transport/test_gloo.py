"""Groups over gloo: forming, failing, going on, and leaving nothing behind."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from rollwire_transport import (
    Link,
    Meeting,
    Receiver,
    Sender,
    TransportError,
    TransportTimeout,
    available_backends,
    describe_all,
    join,
    open_meeting,
    plan,
)
from rollwire_transport.links.control import TICKET_BYTES, Gathering, call, card_of_rank
from support.tensors import content, random_tensor, room_for, weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

TIMEOUT = 20.0  # seconds that nothing should take, on a machine that is busy with other things


@contextlib.contextmanager
def group(epoch: str = "epoch", receivers: int = 1) -> Iterator[list[Link]]:
    """The links of all ranks of a group, in this process."""
    meeting = open_meeting("gloo", epoch=epoch, world_size=receivers + 1)
    links: list[Link] = []
    try:
        with ThreadPoolExecutor(receivers) as pool:
            joining = [
                pool.submit(join_meeting, meeting, epoch, rank, receivers + 1)
                for rank in range(1, receivers + 1)
            ]
            links.append(meeting.form(TIMEOUT))
            links += [future.result() for future in joining]
        yield links
    finally:
        for link in links:
            link.close()
        meeting.close()


def join_meeting(
    meeting: Meeting, epoch: str, rank: int, world_size: int, timeout: float = TIMEOUT
) -> Link:
    return join(
        "gloo",
        epoch=epoch,
        rank=rank,
        world_size=world_size,
        rendezvous=meeting.rendezvous,
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


@settings(max_examples=10, deadline=None)
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
        assert all(r.complete for r in receivers)  # sent means that all have it
        for future in receiving:
            future.result()
    assert [r.digest for r in receivers] == [sender.digest] * 2
    for destination in destinations:
        assert all(content(tensor) == content(tensors[n]) for n, tensor in destination.items())


def transfer(link: Link, server: Link) -> None:
    sender, target = Sender(MANIFEST), receiver()
    with in_thread(lambda: target.receive(server, first_bucket=0, bucket_timeout=TIMEOUT)):
        sender.send(link, WEIGHTS.items, bucket_timeout=TIMEOUT)
    assert target.digest == sender.digest


def test_two_groups_at_once_beside_the_trainers_own(trainers_own_group: None) -> None:
    with group("one") as one, group("two") as two, ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(transfer, *one), pool.submit(transfer, *two)]:
            future.result()
    assert dist.get_world_size() == 1


def test_no_default_group_is_made() -> None:
    with group() as links:
        transfer(*links)
        assert not dist.is_initialized()


def test_a_member_that_never_joins_is_named_in_bounded_time() -> None:
    meeting = open_meeting("gloo", epoch="epoch", world_size=3)
    start = time.monotonic()
    with in_thread(lambda: join_meeting(meeting, "epoch", 1, 3)) as joining:
        with pytest.raises(TransportTimeout, match="rank 2 did not join") as caught:
            meeting.form(0.5)
        with pytest.raises(TransportError, match="closed before all had joined"):
            joining.result()
    meeting.close()
    assert caught.value.peer == "rank 2"
    assert time.monotonic() - start < 5


def test_a_meeting_can_be_closed_while_it_waits() -> None:
    meeting = open_meeting("gloo", epoch="epoch", world_size=3)
    with (
        in_thread(lambda: meeting.form(TIMEOUT)) as forming,
        in_thread(lambda: join_meeting(meeting, "epoch", 1, 3)) as joining,
    ):
        threading.Timer(0.1, meeting.close).start()
        for waiting in (forming, joining):
            with pytest.raises(TransportError, match="closed") as caught:
                waiting.result()
            assert not isinstance(caught.value, TransportTimeout)


def test_only_members_who_know_the_epoch_get_in() -> None:
    meeting = open_meeting("gloo", epoch="secret", world_size=2)
    with in_thread(lambda: meeting.form(TIMEOUT)) as forming:
        with pytest.raises(TransportError, match="no group of this epoch") as caught:
            join_meeting(meeting, "guess", 1, 2)
        assert caught.value.peer == "rank 0"
        server = join_meeting(meeting, "secret", 1, 2)
    for end in (forming.result(), server, meeting):
        end.close()


def test_a_rank_that_is_taken_and_another_size_are_refused() -> None:
    meeting = open_meeting("gloo", epoch="epoch", world_size=3)
    with in_thread(lambda: meeting.form(TIMEOUT)) as forming, ThreadPoolExecutor(2) as pool:
        with pytest.raises(TransportError, match="3 members, this one was told of 2"):
            join_meeting(meeting, "epoch", 1, 2)
        twice = [pool.submit(join_meeting, meeting, "epoch", 1, 3) for _ in range(2)]
        (refused,), (joining,) = wait(twice, TIMEOUT, FIRST_COMPLETED)
        with pytest.raises(TransportError, match="rank 1 has joined this group already"):
            refused.result()
        other = join_meeting(meeting, "epoch", 2, 3)
    for end in (forming.result(), joining.result(), other, meeting):
        end.close()


def test_a_member_that_freezes_once_all_have_come_is_named_in_bounded_time() -> None:
    meeting = open_meeting("gloo", epoch="epoch", world_size=2)
    start = time.monotonic()
    with in_thread(lambda: meeting.form(0.5)) as forming:
        lines, _ = call(
            "epoch", 1, 2, meeting.rendezvous, card_of_rank(1), TIMEOUT, threading.Event()
        )
        with pytest.raises(TransportTimeout, match="rank 1 joined but cannot be reached") as caught:
            forming.result()
    assert caught.value.peer == "rank 1"
    assert time.monotonic() - start < 5
    lines.close()
    meeting.close()


@pytest.mark.parametrize("how", ["deadline", "closed"])
def test_a_trainer_that_freezes_once_all_have_come_is_given_up(how: str) -> None:
    gathering, closed = Gathering("epoch", 2, "127.0.0.1", 0), threading.Event()
    start = time.monotonic()
    with in_thread(
        lambda: join(
            "gloo",
            epoch="epoch",
            rank=1,
            world_size=2,
            rendezvous=gathering.rendezvous,
            timeout=0.5 if how == "deadline" else TIMEOUT,
            closed=closed,
        )
    ) as joining:
        lines = gathering.gather(card_of_rank(0), TIMEOUT)
        lines.start(bytes(TICKET_BYTES))
        if how == "closed":
            closed.set()
        with pytest.raises(TransportError) as caught:
            joining.result()
    assert isinstance(caught.value, TransportTimeout) == (how == "deadline")
    assert time.monotonic() - start < 5
    lines.close()
    gathering.close()


def test_a_rendezvous_where_nobody_is_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"nobody meets at 127.0.0.1:{port}"):
        join("gloo", epoch="e", rank=1, world_size=2, rendezvous=f"127.0.0.1:{port}", timeout=5)
    assert time.monotonic() - start < 3


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TransportError, match="host:port"):
        join("gloo", epoch="e", rank=1, world_size=2, rendezvous="nowhere", timeout=1)
    with pytest.raises(TransportError, match="rank 2 is no receiver's"):
        join("gloo", epoch="e", rank=2, world_size=2, rendezvous="127.0.0.1:1", timeout=1)
    with pytest.raises(ValueError, match="nobody to send to"):
        open_meeting("gloo", epoch="e", world_size=1)
    with pytest.raises(ValueError, match="no address by which"):
        open_meeting("gloo", epoch="e", world_size=2, host="0.0.0.0")  # noqa: S104 - is refused
    for name, backend in available_backends().items():
        if not backend.ok:
            with pytest.raises(TransportError, match=f"backend {name} cannot be used"):
                open_meeting(name, epoch="e", world_size=2)
    with pytest.raises(TransportError, match="there is no backend 'pigeon'"):
        open_meeting("pigeon", epoch="e", world_size=2)


def test_a_port_in_use_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        open_meeting("gloo", epoch="e", world_size=2, port=server.getsockname()[1])


def test_backends_say_why_they_cannot_be_used() -> None:
    backends = available_backends()
    assert set(backends) == {"gloo", "nccl", "ucx"}
    assert all(backend.ok or backend.reason for backend in backends.values())
    assert backends["gloo"].ok


def test_it_works_over_ipv6() -> None:
    try:
        meeting = open_meeting("gloo", epoch="epoch", world_size=2, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert meeting.rendezvous.startswith("[::1]:")
    with in_thread(lambda: join_meeting(meeting, "epoch", 1, 2)) as joining:
        link = meeting.form(TIMEOUT)
        server = joining.result()
    assert isinstance(server, Link)
    transfer(link, server)
    for end in (link, server, meeting):
        end.close()


def test_a_silent_sender_is_a_timeout_of_one_bucket() -> None:
    with group() as (_, server):
        start = time.monotonic()
        with pytest.raises(TransportTimeout) as caught:
            receiver().receive(server, first_bucket=0, bucket_timeout=0.3)
        assert caught.value.peer == "rank 0"
        assert 0.3 <= time.monotonic() - start < 3


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
                target.receive(server, first_bucket=0, bucket_timeout=0.3)
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
        assert time.monotonic() - start < 5
        with pytest.raises(TransportError):
            Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
        aborted.abort()


@pytest.mark.parametrize("who", ["trainer", "server"])
def test_an_abort_in_the_middle_of_a_message_ends_both_ends_at_once(who: str) -> None:
    header = torch.ones(4, dtype=torch.int64)
    there = torch.ones(1 << 28, dtype=torch.uint8)
    here = torch.zeros_like(there)
    with group() as (trainer, server), ThreadPoolExecutor(2) as pool:
        ends = [server.receive(header.clone(), here), trainer.send(header, there)]
        waiting = [pool.submit(end.wait, TIMEOUT) for end in ends]
        while not here[0]:
            time.sleep(0.001)
        assert not here[-1], "this machine is too fast for so few bytes"
        start = time.monotonic()
        (trainer if who == "trainer" else server).abort()
        errors = [future.exception() for future in waiting]
        assert all(isinstance(error, TransportError) for error in errors)
        assert not any(isinstance(error, TransportTimeout) for error in errors)
    assert time.monotonic() - start < 5


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
        assert caught.value.peer == "rank 3"
        for future in receiving:
            with pytest.raises(TransportError) as caught:
                future.result()
            assert caught.value.peer == "rank 0"
        assert time.monotonic() - start < 5


def test_ends_that_disagree_on_the_first_bucket_fail_with_the_reason() -> None:
    with group() as (trainer, server):
        last = len(MANIFEST.buckets) - 1
        short = plan(describe_all({"w": WEIGHTS["w"][:-100]}), bucket_bytes=1 << 15)
        target = Receiver(short, {"w": torch.zeros_like(WEIGHTS["w"][:-100])})
        target._next_bucket = last
        with in_thread(
            lambda: target.receive(server, first_bucket=last, bucket_timeout=0.3)
        ) as receiving:
            with pytest.raises(TransportError):
                Sender(MANIFEST).send(trainer, WEIGHTS.items, bucket_timeout=TIMEOUT)
            with pytest.raises(TransportError, match="the header tells of bucket 0 with 32768"):
                receiving.result()


def test_aborts_at_any_moment_end_in_errors_or_success() -> None:
    dice = random.Random(1)
    for _ in range(15):
        with group(receivers=2) as links, ThreadPoolExecutor(3) as pool:
            trainer, *servers = links
            running = [
                pool.submit(receiver().receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
                for s in servers
            ]
            victim, moment = dice.choice(links), dice.randrange(len(MANIFEST.buckets)) << 15

            def abort(sent: int, victim: Link = victim, moment: int = moment) -> None:
                if sent >= moment:
                    victim.abort()

            with pytest.raises(TransportError):
                Sender(MANIFEST).send(
                    trainer, WEIGHTS.items, bucket_timeout=TIMEOUT, progress=abort
                )
            for future in running:
                with contextlib.suppress(TransportError):
                    future.result(TIMEOUT)


@pytest.mark.parametrize(
    ("blow", "timeout"),
    [(signal.SIGKILL, TIMEOUT), (signal.SIGSTOP, 1.0)],
    ids=["killed", "stopped"],
)
def test_when_a_member_dies_the_others_go_on_without_it(
    blow: signal.Signals, timeout: float
) -> None:
    meeting = open_meeting("gloo", epoch="first", world_size=4)
    script = Path(__file__).parent.parent / "support" / "transport_member.py"
    size, bucket = str(WEIGHTS["w"].numel()), str(1 << 15)
    victim = subprocess.Popen(
        [sys.executable, script, meeting.rendezvous, "first", "2", "4", size, bucket]
    )
    sender, survivors = Sender(MANIFEST), [receiver(), receiver()]
    try:
        with ThreadPoolExecutor(2) as pool:
            joining = [pool.submit(join_meeting, meeting, "first", rank, 4) for rank in (1, 3)]
            trainer = meeting.form(TIMEOUT)
            servers = [future.result() for future in joining]
            receiving = [
                pool.submit(r.receive, s, first_bucket=0, bucket_timeout=TIMEOUT)
                for r, s in zip(survivors, servers, strict=True)
            ]
            hit_at = 0.0

            def hit(sent: int) -> None:
                nonlocal hit_at
                if sent == 10 << 15:
                    victim.send_signal(blow)
                    hit_at = time.monotonic()

            with pytest.raises(TransportError) as caught:
                sender.send(trainer, WEIGHTS.items, bucket_timeout=timeout, progress=hit)
            assert caught.value.peer == "rank 2"
            for future in receiving:
                with pytest.raises(TransportError):
                    future.result(TIMEOUT)
            assert time.monotonic() - hit_at < 5
        for end in (trainer, *servers, meeting):
            end.close()
    finally:
        victim.kill()
        victim.wait(TIMEOUT)

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


def threads_and_descriptors() -> tuple[int, int]:
    threads, descriptors = Path("/proc/self/task"), Path("/proc/self/fd")
    return sum(1 for _ in threads.iterdir()), sum(1 for _ in descriptors.iterdir())


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

    def never_form() -> None:
        meeting = open_meeting("gloo", epoch="epoch", world_size=2)
        with pytest.raises(TransportTimeout):
            meeting.form(0.05)
        meeting.close()

    for action in (succeed, fail, never_form):
        action()  # what is made once and kept
        gc.collect()
        before = threads_and_descriptors()
        for _ in range(3):
            action()
        gc.collect()
        assert threads_and_descriptors() == before, action

"""Groups over gloo: forming, and what arrives."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from rollwire_transport import (
    Link,
    ListenOptions,
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
from rollwire_transport._links.base import Backend, GroupMember
from rollwire_transport._links.rendezvous import Rendezvous, join
from support.examples import examples
from support.gloo import TIMEOUT, group, in_thread, join_at, transfer
from support.tensors import content, room_for, weights

if TYPE_CHECKING:
    from rollwire_transport._links.control_channel import ControlChannel
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
        assert all(r.complete for r in receivers)  # sent means that all have it
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


def test_a_member_that_never_joins_is_named_in_bounded_time() -> None:
    rendezvous = open_rendezvous("gloo", epoch="epoch", world_size=3)
    start = time.monotonic()
    with in_thread(lambda: join_at(rendezvous, "epoch", 1, 3)) as joining:
        with pytest.raises(TransportTimeout, match="rank 2 did not join") as caught:
            rendezvous.form_group(1.5)
        with pytest.raises(TransportError, match="rank 0 hung up before the group was formed"):
            joining.result()
    rendezvous.close()
    assert caught.value.peer == "rank 2"
    assert time.monotonic() - start < TIMEOUT / 2


def test_a_meeting_can_be_closed_while_it_waits() -> None:
    rendezvous = open_rendezvous("gloo", epoch="epoch", world_size=3)
    with (
        in_thread(lambda: rendezvous.form_group(TIMEOUT)) as forming,
        in_thread(lambda: join_at(rendezvous, "epoch", 1, 3)) as joining,
    ):
        threading.Timer(0.1, rendezvous.close).start()
        for waiting in (forming, joining):
            with pytest.raises(TransportError, match=r"closed|rank 0 hung up") as caught:
                waiting.result()
            assert not isinstance(caught.value, TransportTimeout)


def test_only_members_who_know_the_epoch_get_in() -> None:
    rendezvous = open_rendezvous("gloo", epoch="secret", world_size=2)
    with in_thread(lambda: rendezvous.form_group(TIMEOUT)) as forming:
        with pytest.raises(TransportError, match="no group of this epoch") as caught:
            join_at(rendezvous, "guess", 1, 2)
        assert caught.value.peer == "rank 0"
        server = join_at(rendezvous, "secret", 1, 2)
    for end in (forming.result(), server, rendezvous):
        end.close()


def test_a_rank_that_is_taken_and_another_size_are_refused() -> None:
    rendezvous = open_rendezvous("gloo", epoch="epoch", world_size=3)
    with (
        in_thread(lambda: rendezvous.form_group(TIMEOUT)) as forming,
        ThreadPoolExecutor(2) as pool,
    ):
        with pytest.raises(TransportError, match="3 members, but this member expects 2"):
            join_at(rendezvous, "epoch", 1, 2)
        twice = [pool.submit(join_at, rendezvous, "epoch", 1, 3) for _ in range(2)]
        (refused,), (joining,) = wait(twice, TIMEOUT, FIRST_COMPLETED)
        with pytest.raises(TransportError, match="rank 1 has joined this group already"):
            refused.result()
        other = join_at(rendezvous, "epoch", 2, 3)
    for end in (forming.result(), joining.result(), other, rendezvous):
        end.close()


class Frozen(Backend):
    """A member that has joined and does nothing from then on."""

    name = "frozen"
    cpu_preference = gpu_preference = 9

    def unavailable_reason(self, listen: ListenOptions) -> str:
        return ""

    def connect(self, member, channel, token, deadline, cancelled) -> ControlChannel:
        return channel


def member(rank: int) -> GroupMember:
    return GroupMember("epoch", rank, 2, torch.device("cpu"))


def test_a_member_that_freezes_once_all_have_come_is_named_in_bounded_time() -> None:
    rendezvous = open_rendezvous("gloo", epoch="epoch", world_size=2)
    start = time.monotonic()
    with in_thread(lambda: rendezvous.form_group(1.5)) as forming:
        frozen = join(Frozen(), member(1), rendezvous.address, TIMEOUT, threading.Event())
        with pytest.raises(TransportTimeout, match="rank 1 joined but cannot be reached") as caught:
            forming.result()
    assert caught.value.peer == "rank 1"
    assert time.monotonic() - start < TIMEOUT / 2
    frozen.close()
    rendezvous.close()


@pytest.mark.parametrize("how", ["deadline", "cancelled"])
def test_a_trainer_that_freezes_once_all_have_come_is_given_up(how: str) -> None:
    rendezvous, cancelled = Rendezvous(Frozen(), member(0), "127.0.0.1", 0), threading.Event()
    start = time.monotonic()
    with in_thread(
        lambda: join_group(
            "gloo",
            epoch="epoch",
            rank=1,
            world_size=2,
            rendezvous=rendezvous.address,
            timeout=1.5 if how == "deadline" else TIMEOUT,
            cancelled=cancelled,
        )
    ) as joining:
        frozen = rendezvous.form_group(TIMEOUT)
        if how == "cancelled":
            cancelled.set()
        with pytest.raises(TransportError) as caught:
            joining.result()
    assert isinstance(caught.value, TransportTimeout) == (how == "deadline")
    assert time.monotonic() - start < TIMEOUT / 2
    frozen.close()
    rendezvous.close()


def test_a_rendezvous_where_nobody_is_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(TransportError, match=f"nobody meets at 127.0.0.1:{port}"):
        join_group(
            "gloo", epoch="e", rank=1, world_size=2, rendezvous=f"127.0.0.1:{port}", timeout=TIMEOUT
        )
    assert time.monotonic() - start < TIMEOUT / 2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TransportError, match="host:port"):
        join_group("gloo", epoch="e", rank=1, world_size=2, rendezvous="nowhere", timeout=1)
    with pytest.raises(TransportError, match="rank 2 is not a receiver"):
        join_group("gloo", epoch="e", rank=2, world_size=2, rendezvous="127.0.0.1:1", timeout=1)
    with pytest.raises(ValueError, match="has no receiver"):
        open_rendezvous("gloo", epoch="e", world_size=1)
    with pytest.raises(ValueError, match="not an address at which"):
        open_rendezvous("gloo", epoch="e", world_size=2, host="0.0.0.0")  # noqa: S104 - is refused
    for name, backend in available_backends().items():
        if not backend.ok:
            with pytest.raises(TransportError, match=f"backend {name} cannot be used"):
                open_rendezvous(name, epoch="e", world_size=2)
    with pytest.raises(TransportError, match="there is no backend 'pigeon'"):
        open_rendezvous("pigeon", epoch="e", world_size=2)


def test_a_port_in_use_is_an_os_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="in use"):
        open_rendezvous("gloo", epoch="e", world_size=2, port=server.getsockname()[1])


def test_it_works_over_ipv6() -> None:
    try:
        rendezvous = open_rendezvous("gloo", epoch="epoch", world_size=2, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert rendezvous.address.startswith("[::1]:")
    with in_thread(lambda: join_at(rendezvous, "epoch", 1, 2)) as joining:
        link = rendezvous.form_group(TIMEOUT)
        server = joining.result()
    assert isinstance(server, Link)
    transfer(link, server)
    for end in (link, server, rendezvous):
        end.close()

"""Rendezvous, control channel and failure detection: who gets in, and who is to blame."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_transport import ListenOptions, TransportError, TransportTimeout
from rollwire_transport._links import failure_detector, rendezvous
from rollwire_transport._links.base import Backend, GroupMember
from rollwire_transport._links.failure_detector import StarFailureDetector
from rollwire_transport._links.framing import FramedSocket, MessageType
from rollwire_transport._links.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollwire_transport._links.control_channel import ControlChannel

TIMEOUT = 60.0  # seconds that nothing should take, on a machine that is busy with other things

TOKEN = bytes(range(128))
CPU = torch.device("cpu")


class End(StarFailureDetector):
    """One end of a group: what a link has of it."""

    def __init__(self, channel: ControlChannel, token: bytes) -> None:
        super().__init__(channel)
        self.channel = channel
        self.token = token

    def send(self, type_: MessageType) -> None:
        self.channel.send(type_)

    def close(self) -> None:
        self.channel.close()


class Stub(Backend):
    """A backend that moves nothing.

    Args:
        device_ids: By the rank.
    """

    name = "stub"
    cpu_preference = gpu_preference = 9

    def __init__(self, device_ids: dict[int, int] | None = None) -> None:
        self._device_ids = device_ids or {}

    def unavailable_reason(self, listen: ListenOptions) -> str:
        return ""

    def device_id(self, member: GroupMember) -> bytes:
        return bytes([self._device_ids.get(member.rank, member.rank)] * 16)

    def bootstrap_token(self, member: GroupMember) -> bytes:
        return TOKEN

    def connect(self, member, channel, token, deadline, cancelled) -> End:
        return End(channel, token)


def join(
    address: str,
    rank: int,
    world_size: int = 3,
    epoch: str = "epoch",
    timeout: float = TIMEOUT,
    cancelled: threading.Event | None = None,
    backend: Backend | None = None,
) -> End:
    member = GroupMember(epoch, rank, world_size, CPU)
    return rendezvous.join(
        backend or Stub(), member, address, timeout, cancelled or threading.Event()
    )


class Opened:
    """A rendezvous at which rank 0 waits, and those who join."""

    def __init__(self, world_size: int, timeout: float, backend: Backend) -> None:
        self._pool = ThreadPoolExecutor()
        self._backend = backend
        member = GroupMember("epoch", 0, world_size, CPU)
        self._rendezvous = Rendezvous(backend, member, "127.0.0.1", 0)
        self.address = self._rendezvous.address
        self.cancelled = threading.Event()
        self.forming: Future[End] = self._pool.submit(self._rendezvous.form_group, timeout)

    def join(self, rank: int, world_size: int = 3, epoch: str = "epoch") -> Future[End]:
        return self._pool.submit(
            join,
            self.address,
            rank,
            world_size,
            epoch,
            cancelled=self.cancelled,
            backend=self._backend,
        )

    def close(self) -> None:
        self._rendezvous.close()
        self._pool.shutdown()


@contextlib.contextmanager
def opened(
    world_size: int = 3, timeout: float = TIMEOUT, device_ids: dict[int, int] | None = None
) -> Iterator[Opened]:
    it = Opened(world_size, timeout, Stub(device_ids))
    try:
        yield it
    finally:
        it.close()


@contextlib.contextmanager
def group(receivers: int = 2) -> Iterator[list[End]]:
    """The ends of all ranks."""
    with opened(receivers + 1) as it:
        joining = [it.join(rank, receivers + 1) for rank in range(1, receivers + 1)]
        ends = [it.forming.result(), *(future.result() for future in joining)]
    assert all(end.token == TOKEN for end in ends)
    try:
        yield ends
    finally:
        for end in ends:
            end.close()


def until(end: End, error: type[TransportError]) -> TransportError:
    """What ``check`` raises, once what was sent has come."""

    def check() -> None:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            end.check()

    with pytest.raises(error) as caught:
        check()
    return caught.value


def read_until(end: End, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        end.channel.read()


def test_strangers_are_sent_away_and_hurt_nobody() -> None:
    with opened() as it:
        one = it.join(1)
        host, port = it.address.split(":")
        silent = socket.create_connection((host, int(port)))
        noisy = socket.create_connection((host, int(port)))
        noisy.sendall(b"GET / HTTP/1.1\r\n" * 100)
        with pytest.raises(TransportError, match="no group of this epoch"):
            it.join(2, epoch="other").result()
        with pytest.raises(TransportError, match="has 3 members, but this member expects 2"):
            it.join(2, world_size=2).result()
        pair = {one, it.join(1)}
        refused = wait(pair, TIMEOUT, FIRST_COMPLETED).done.pop()
        with pytest.raises(TransportError, match="rank 1 has joined") as caught:
            refused.result()
        assert caught.value.peer == "rank 1"
        one = (pair - {refused}).pop()
        with pytest.raises(TransportError, match="rank 7 has joined"):
            it.join(7).result()
        two = it.join(2)
        for end in (it.forming.result(), one.result(), two.result(), silent, noisy):
            end.close()


def test_who_never_comes_is_named_in_bounded_time() -> None:
    with opened(timeout=1.5) as it:
        start = time.monotonic()
        joining = it.join(1)
        with pytest.raises(TransportTimeout, match="rank 2 did not join within") as caught:
            it.forming.result()
        assert caught.value.peer == "rank 2"
        with pytest.raises(TransportError, match="rank 0 hung up before the group was formed"):
            joining.result()
        assert time.monotonic() - start < TIMEOUT / 2


def test_who_leaves_before_the_start_may_come_again() -> None:
    with opened() as it:
        with pytest.raises(TransportTimeout, match="not all members"):
            join(it.address, 1, timeout=1.0)
        for future in (it.join(2), it.join(1), it.forming):
            future.result().close()


def test_a_closed_rendezvous_ends_all_waits() -> None:
    with opened() as it:
        joining = it.join(1)
        threading.Timer(0.1, it.close).start()
        with pytest.raises(TransportError, match="the rendezvous was closed"):
            it.forming.result()
        with pytest.raises(TransportError, match="rank 0 hung up before the group was formed"):
            joining.result()


def test_who_gives_up_waits_no_longer() -> None:
    with opened() as it:
        joining = it.join(1)
        threading.Timer(0.1, it.cancelled.set).start()
        with pytest.raises(TransportError, match="joining was cancelled"):
            joining.result(TIMEOUT / 2)


@pytest.mark.parametrize(("devices", "named"), [((1, 1), 2), ((0, 2), 1)])
def test_two_members_on_one_device_are_refused(devices: tuple[int, int], named: int) -> None:
    with opened(device_ids=dict(enumerate(devices, start=1))) as it:
        joining = [it.join(rank) for rank in (1, 2)]
        for future in (it.forming, *joining):
            with pytest.raises(TransportError, match=f"rank {named} is on the GPU of another"):
                future.result()


def test_what_is_no_rendezvous_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joining = pool.submit(join, address, 1, 2)
        connection, _ = server.accept()
        connection.sendall(b"220 mail.example.org")
        with pytest.raises(TransportError, match="does not speak rollwire's protocol"):
            joining.result()
        connection.close()


def test_a_rendezvous_that_never_starts_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportTimeout, match="not all members"):
            join(address, 1, 2, timeout=1.0)


def test_a_death_is_seen_by_rank_0_and_its_own_by_all() -> None:
    with group() as (trainer, one, two):
        two.close()
        error = until(trainer, TransportError)
        assert error.peer == "rank 2"
        trainer.channel.hang_up()
        error = until(one, TransportError)
        assert error.peer == "rank 0"


def test_a_death_that_is_told_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with group() as (trainer, _, two):
        trainer.await_blame(lambda: False)  # nobody is to blame
        monkeypatch.setattr(failure_detector, "_BLAME_SECONDS", TIMEOUT)
        looks = 0

        def dies_meanwhile() -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                two.close()
            return False

        with pytest.raises(TransportError, match="rank 2 left the group") as caught:
            trainer.await_blame(dies_meanwhile)
        assert caught.value.peer == "rank 2"
        trainer.await_blame(lambda: True)


def test_who_has_finished_may_leave() -> None:
    with group() as (trainer, one, two):
        for end in (one, two):
            end.send(MessageType.FINISHED)
            end.close()
        read_until(trainer, lambda: trainer.channel.all_left)
        assert trainer.channel.all_finished
        trainer.check()


def test_the_one_behind_all_others_is_known() -> None:
    with group(3) as (trainer, one, two, three):
        assert trainer.laggard is None
        for end in (one, two, three):
            end.send(MessageType.STEP)
        read_until(trainer, lambda: trainer.fewest_steps == 1)
        assert trainer.laggard is None
        one.send(MessageType.STEP)
        three.send(MessageType.STEP)
        read_until(trainer, lambda: trainer.laggard == "rank 2")
        three.send(MessageType.TIMED_OUT)
        error = until(trainer, TransportTimeout)
        assert (str(error), error.peer) == ("rank 3 gave up waiting for rank 2", "rank 2")


def test_who_speaks_another_language_counts_as_having_left() -> None:
    with group() as (trainer, _, two):
        two.channel.peers[0].connection._connection.sendall(b"GET / HTTP/1.1\r\n")
        assert until(trainer, TransportError).peer == "rank 2"


def framed_pair() -> tuple[FramedSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return FramedSocket(ours, "rank 0"), theirs


def test_a_size_that_is_announced_is_not_believed() -> None:
    """Who answers at an address cannot have the other end read gigabytes."""
    ours, stranger = framed_pair()
    with contextlib.closing(ours), stranger:
        stranger.sendall(struct.pack("<BI", MessageType.VALUE, (1 << 32) - 1) + b"k")
        with pytest.raises(TransportError, match="announces 4294967295 bytes"):
            ours.receive(time.monotonic() + TIMEOUT, threading.Event())


def test_messages_arrive_whole_in_whatever_pieces_they_come() -> None:
    ours, theirs = framed_pair()
    message = struct.pack("<BI", MessageType.VALUE, 300) + bytes(300)
    with contextlib.closing(ours), theirs:
        for piece in (message[:3], message[3:200], message[200:] + message):
            assert ours.receive_available() == []
            theirs.sendall(piece)
        assert ours.receive_available() == [(MessageType.VALUE, bytes(300))] * 2
        theirs.close()
        assert ours.receive_available() == []
        assert ours.closed_by_peer


def test_a_frozen_peer_blocks_nobody() -> None:
    ours, theirs = framed_pair()
    with contextlib.closing(ours), theirs:
        start = time.monotonic()
        sent = 0
        while ours.send(MessageType.STEP, bytes(1 << 10)):
            sent += 1
        assert sent > 10
        assert not ours.send(MessageType.STEP)
        assert time.monotonic() - start < TIMEOUT / 2

"""The control connections of a group: who gets in, and who is to blame."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import pytest
from rollwire_transport import TransportError, TransportTimeout
from rollwire_transport._links import control_channel
from rollwire_transport._links.control_channel import TICKET_BYTES, Gathering, Lines, Signal, call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TIMEOUT = 60.0  # seconds that nothing should take, on a machine that is busy with other things

TICKET = bytes(range(TICKET_BYTES))


def card(rank: int) -> bytes:
    return bytes([rank] * 16)


class Gathered:
    """A gathering under way, and those who call it."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self._pool = ThreadPoolExecutor()
        self._gathering = Gathering("epoch", world_size, "127.0.0.1", 0)
        self.rendezvous = self._gathering.address
        self.given_up = threading.Event()
        self.gathered = self._pool.submit(self._gathering.gather, card(0), timeout)

    def join(
        self, rank: int, world_size: int = 3, epoch: str = "epoch", its_card: bytes | None = None
    ) -> Future[tuple[Lines, bytes]]:
        return self._pool.submit(
            call,
            epoch,
            rank,
            world_size,
            self.rendezvous,
            its_card or card(rank),
            TIMEOUT,
            self.given_up,
        )

    def close(self) -> None:
        self._gathering.close()
        self._pool.shutdown()


@contextlib.contextmanager
def meeting(world_size: int = 3, timeout: float = TIMEOUT) -> Iterator[Gathered]:
    opened = Gathered(world_size, timeout)
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def group(receivers: int = 2) -> Iterator[list[Lines]]:
    """The lines of all ranks."""
    with meeting(receivers + 1) as opened:
        joining = [opened.join(rank, receivers + 1) for rank in range(1, receivers + 1)]
        lines = [opened.gathered.result()]
        lines[0].start(TICKET)
        for future in joining:
            its_lines, ticket = future.result()
            assert ticket == TICKET
            lines.append(its_lines)
    try:
        yield lines
    finally:
        for its_lines in lines:
            its_lines.close()


def until(lines: Lines, error: type[TransportError]) -> TransportError:
    """What ``check`` raises, once what was told has come."""

    def check() -> None:
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            lines.check()

    with pytest.raises(error) as caught:
        check()
    return caught.value


def read_until(lines: Lines, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        lines.read()


def test_strangers_are_sent_away_and_hurt_nobody() -> None:
    with meeting() as opened:
        one = opened.join(1)
        host, port = opened.rendezvous.split(":")
        silent = socket.create_connection((host, int(port)))
        noisy = socket.create_connection((host, int(port)))
        noisy.sendall(b"GET / HTTP/1.1\r\n" * 100)
        with pytest.raises(TransportError, match="no group of this epoch"):
            opened.join(2, epoch="other").result()
        with pytest.raises(TransportError, match="has 3 members, this one was told of 2"):
            opened.join(2, world_size=2).result()
        pair = {one, opened.join(1)}
        refused = wait(pair, TIMEOUT, FIRST_COMPLETED).done.pop()
        with pytest.raises(TransportError, match="rank 1 has joined") as caught:
            refused.result()
        assert caught.value.peer == "rank 1"
        one = (pair - {refused}).pop()
        with pytest.raises(TransportError, match="rank 7 has joined"):
            opened.join(7).result()
        two = opened.join(2)
        lines = opened.gathered.result()
        lines.start(TICKET)
        for future in (one, two):
            future.result()[0].close()
        for end in (lines, silent, noisy):
            end.close()


def test_who_never_comes_is_named_in_bounded_time() -> None:
    with meeting(timeout=1.5) as opened:
        start = time.monotonic()
        joining = opened.join(1)
        with pytest.raises(TransportTimeout, match="rank 2 did not join within") as caught:
            opened.gathered.result()
        assert caught.value.peer == "rank 2"
        with pytest.raises(TransportError, match="closed before all had joined"):
            joining.result()
        assert time.monotonic() - start < TIMEOUT / 2


def test_who_leaves_before_the_start_may_come_again() -> None:
    with meeting() as opened:
        with pytest.raises(TransportTimeout, match="not all members"):
            call("epoch", 1, 3, opened.rendezvous, card(1), 1.0, threading.Event())
        joining = [opened.join(2), opened.join(1)]
        lines = opened.gathered.result()
        lines.start(TICKET)
        for end in (lines, *(future.result()[0] for future in joining)):
            end.close()


def test_a_closed_meeting_ends_all_waits() -> None:
    with meeting() as opened:
        joining = opened.join(1)
        threading.Timer(0.1, opened.close).start()
        with pytest.raises(TransportError, match="meeting was closed"):
            opened.gathered.result()
        with pytest.raises(TransportError, match="closed before all had joined"):
            joining.result()


def test_who_gives_up_waits_no_longer() -> None:
    with meeting() as opened:
        joining = opened.join(1)
        threading.Timer(0.1, opened.given_up.set).start()
        with pytest.raises(TransportError, match="given up"):
            joining.result(TIMEOUT / 2)


@pytest.mark.parametrize(("cards", "named"), [((1, 1), 2), ((0, 2), 1)])
def test_two_members_on_one_card_are_refused(cards: tuple[int, int], named: int) -> None:
    with meeting() as opened:
        joining = [opened.join(r, its_card=card(c)) for r, c in enumerate(cards, start=1)]
        for future in (opened.gathered, *joining):
            with pytest.raises(TransportError, match=f"rank {named} is on the GPU of another"):
                future.result()


def test_what_is_no_meeting_is_told_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
        joining = pool.submit(call, "epoch", 1, 2, rendezvous, card(1), TIMEOUT, threading.Event())
        connection, _ = server.accept()
        connection.sendall(b"220 mail.example.org")
        with pytest.raises(TransportError, match="what answers there is no meeting"):
            joining.result()
        connection.close()


def test_a_meeting_that_never_starts_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        rendezvous = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(TransportTimeout, match="not all members"):
            call("epoch", 1, 2, rendezvous, card(1), 1.0, threading.Event())


def test_a_death_is_seen_by_rank_0_and_its_own_by_all() -> None:
    with group() as (trainer, one, two):
        two.close()
        error = until(trainer, TransportError)
        assert error.peer == "rank 2"
        trainer.hang_up()
        error = until(one, TransportError)
        assert error.peer == "rank 0"


def test_a_death_that_is_told_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with group() as (trainer, _, two):
        trainer.blame(lambda: False)  # nobody is to blame
        monkeypatch.setattr(control_channel, "_BLAME_SECONDS", TIMEOUT)
        looks = 0

        def dies_meanwhile() -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                two.close()
            return False

        with pytest.raises(TransportError, match="rank 2 left the group") as caught:
            trainer.blame(dies_meanwhile)
        assert caught.value.peer == "rank 2"
        trainer.blame(lambda: True)


def test_who_has_finished_may_leave() -> None:
    with group() as (trainer, one, two):
        for lines in (one, two):
            lines.signal(Signal.FINISHED)
            lines.close()
        read_until(trainer, lambda: trainer.over)
        assert trainer.finished
        trainer.check()


def test_the_one_behind_all_others_is_known() -> None:
    with group(3) as (trainer, one, two, three):
        assert trainer.laggard is None
        for lines in (one, two, three):
            lines.signal(Signal.STEP)
        read_until(trainer, lambda: trainer.fewest_steps == 1)
        assert trainer.laggard is None
        one.signal(Signal.STEP)
        three.signal(Signal.STEP)
        read_until(trainer, lambda: trainer.laggard == "rank 2")
        three.signal(Signal.LATE)
        error = until(trainer, TransportTimeout)
        assert (str(error), error.peer) == ("rank 3 gave up waiting for rank 2", "rank 2")

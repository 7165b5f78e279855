"""How the ranks of a sharded trainer meet; here each of them is a thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from rollwire_client import PublishError
from rollwire_client._publishing.sharded import rendezvous
from rollwire_client._publishing.sharded.connection import Message
from rollwire_client._publishing.sharded.coordination import Participant

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollwire_client._publishing.sharded.connection import Connection

HELLO_BYTES = 40


class Trainer:
    """``size`` ranks that have a process group in common, for rank 0's invitation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self._invitations: queue.SimpleQueue[str] = queue.SimpleQueue()
        monkeypatch.setattr(dist, "get_rank", lambda rank: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda _: size)
        monkeypatch.setattr(rendezvous, "_broadcast", self._broadcast)

    def _broadcast(self, rank: int, text: str) -> str:
        if rank == 0:
            self._invitations.put(text)
            return text
        text = self._invitations.get(timeout=20)
        self._invitations.put(text)
        return text

    def come(self, rank: int, timeout: float = 20) -> asyncio.Future[dict[int, Connection]]:
        return asyncio.ensure_future(
            asyncio.to_thread(rendezvous.connect_ranks, rank, "127.0.0.1", timeout)  # type: ignore[arg-type]
        )

    def stranger(self) -> socket.socket:
        """A connection of somebody who found the address."""
        _, port, host = self._broadcast(-1, "").split(" ")
        return socket.create_connection((host, int(port)), timeout=20)


async def test_all_ranks_meet_whoever_else_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(monkeypatch, 3)
    leading = trainer.come(0)
    with await asyncio.to_thread(trainer.stranger) as stranger:
        stranger.sendall(b"0" * HELLO_BYTES)
        others = [trainer.come(rank) for rank in (2, 1)]
        connections = await leading
        assert stranger.recv(1) == b""
    with contextlib.ExitStack() as stack:
        for connection in connections.values():
            stack.enter_context(contextlib.closing(connection))
        for rank, other in zip((2, 1), others, strict=True):
            connection = stack.enter_context(contextlib.closing((await other)[0]))
            connections[rank].send(Message.NEXT, str(rank))
            assert await connection.receive() == (Message.NEXT, str(rank))


async def test_those_that_came_learn_at_once_that_another_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(monkeypatch, 3)
    leading, coming = trainer.come(0, timeout=1), trainer.come(1)
    with contextlib.closing((await coming)[0]) as connection:
        with pytest.raises(PublishError, match=r"rank 2 did not connect to .* within 1 s"):
            await leading
        with pytest.raises(PublishError, match="rank 0 did not publish: rank 2 did not connect"):
            await Participant(connection, {}, 600).run("publishes")


async def test_a_stranger_who_trickles_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(monkeypatch, 2)
    leading = trainer.come(0, timeout=0.3)
    sent = await asyncio.to_thread(_trickle, trainer, leading.done)
    assert sent < HELLO_BYTES
    with pytest.raises(PublishError, match="rank 1 did not connect"):
        await leading


def _trickle(trainer: Trainer, over: Callable[[], bool]) -> int:
    """Says a byte every tenth of a second until nobody listens, and how many it were."""
    sent = 0
    with trainer.stranger() as stranger, contextlib.suppress(OSError):
        while sent < HELLO_BYTES and not over():
            stranger.sendall(b"0")
            sent += 1
            time.sleep(0.1)
    return sent

"""The connection between two ranks of a sharded trainer."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from client.ranks.support import tcp_pair
from rollwire_client._publishing.sharded.connection import Connection, Message


async def test_a_cancelled_receive_loses_no_message() -> None:
    here, there = (Connection(end) for end in tcp_pair())
    with contextlib.closing(here), contextlib.closing(there):
        for number in range(200):
            listening = asyncio.create_task(there.receive())
            await asyncio.sleep(0)
            here.send(Message.NEXT, str(number))
            if number % 2:
                await asyncio.sleep(0)
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                assert await listening == (Message.NEXT, str(number))
                continue
            async with asyncio.timeout(60):
                assert await there.receive() == (Message.NEXT, str(number))


@pytest.mark.parametrize("said", [b"what?\n", b'["next"]\n', b"7\n", b'["no word", ""]\n'])
async def test_an_invalid_message_is_refused(said: bytes) -> None:
    raw, end = tcp_pair()
    with raw, contextlib.closing(Connection(end)) as connection:
        raw.sendall(said)
        with pytest.raises(ConnectionError, match="invalid message"):
            await connection.receive()

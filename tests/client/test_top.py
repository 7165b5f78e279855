"""What ``rollwire top`` makes of the servers' answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rollwire_client import CommittedUpdate
from rollwire_client._cli.app import run
from rollwire_client.testing import FakeServer

if TYPE_CHECKING:
    import pytest


async def shown(capsys: pytest.CaptureFixture[str], *addresses: str) -> list[list[str]]:
    arguments = ["top", *addresses, "--interval", "0.1"]
    assert await asyncio.to_thread(run, arguments) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


async def test_after_a_rollback_the_newest_is_what_was_committed_last(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with FakeServer(version=57) as back, FakeServer(version=57) as missed:
        back.commit(50)
        one, other, total = await shown(capsys, back.address, missed.address)
        assert one[2:4] == ["50", "0"]
        assert other[2:5] == ["57", "missed", "rollback"]
        assert total[:2] == ["2", "servers"]


async def test_a_server_with_two_addresses_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer(version=1) as server:
        other_name = server.address.replace("127.0.0.1", "localhost")
        *rows, total = await shown(capsys, server.address, other_name)
    assert [row[0] for row in rows] == [server.address, other_name]
    assert total[:2] == ["1", "server"]


def test_the_last_update_is_told_in_a_few_words() -> None:
    assert str(CommittedUpdate("delta", 2_520_000, 0.0123)) == "delta, 2.5 MB, 1.23% changed"
    assert str(CommittedUpdate("full", 15_200_000_000, None)) == "full, 15200.0 MB"

"""How often a client wants to hear of a sequence, and what it has of one that it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import pytest
from client.scripted import Sequence, expected_token, scripted, until
from rollwire_client import (
    Batcher,
    Fleet,
    InvalidRequestError,
    Prompt,
    RolloutClient,
    Sampling,
    Timeouts,
)

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [1, 2, 3]
SHORT = Sampling(max_new_tokens=4)
WHOLE_SECONDS = 0.25


def tokens(count: int) -> tuple[int, ...]:
    return tuple(expected_token(PROMPT, i) for i in range(count))


async def hold_back(sequence: Sequence) -> None:
    """Sends three tokens, and has sampled five more when it is aborted."""
    await sequence.send(3)
    sequence.unsent = 5
    await asyncio.Event().wait()


async def test_who_wants_sequences_whole_hears_seldom_and_who_streams_each_step() -> None:
    async with scripted() as (server,), Fleet([server.address]) as fleet:
        async with RolloutClient(server.address) as client:
            await client.generate(PROMPT, SHORT)
            await anext(client.stream(PROMPT, SHORT))
        await fleet.generate(PROMPT, SHORT)
        await fleet.session(PROMPT).generate(SHORT)
        async with Batcher(fleet, seed=1, group_size=1, sampling=SHORT) as batcher:
            await batcher.collect([Prompt("1", PROMPT)], 1)
            await batcher.evaluate([Prompt("1", PROMPT)])
        async with contextlib.aclosing(fleet.stream(PROMPT, SHORT)) as chunks:
            await anext(chunks)
        intervals = [
            request.delivery_interval.ToTimedelta().total_seconds() for request in server.requests
        ]
    assert intervals == [WHOLE_SECONDS, 0, *[WHOLE_SECONDS] * 4, 0]


async def test_the_interval_is_the_callers_to_choose() -> None:
    async with scripted() as (server,), Fleet([server.address]) as fleet:
        await fleet.generate(PROMPT, SHORT, delivery_interval=0)
        await anext(fleet.stream(PROMPT, SHORT, delivery_interval=0.125))
        options = {"delivery_interval": 1.5}
        async with Batcher(fleet, seed=1, group_size=1, sampling=SHORT, options=options) as batcher:
            await batcher.collect([Prompt("1", PROMPT)], 1)
        with pytest.raises(InvalidRequestError, match="delivery_interval"):
            await fleet.generate(PROMPT, SHORT, delivery_interval=-1)
        intervals = [
            request.delivery_interval.ToTimedelta().total_seconds() for request in server.requests
        ]
    assert intervals == [0, 0.125, 1.5]


async def test_a_turn_that_is_cancelled_has_what_the_server_had_not_sent_yet() -> None:
    async with scripted() as (server,), Fleet([server.address]) as fleet:
        server.scripts.append(hold_back)
        session = fleet.session(PROMPT)
        turn = asyncio.create_task(session.generate(Sampling(max_new_tokens=20)))
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 17)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert session.token_ids == (*PROMPT, *tokens(8))
        assert session.conversation().turns[0].finish is None


async def test_a_batcher_that_is_closed_saves_what_servers_had_not_sent_yet(
    tmp_path: Path,
) -> None:
    sampling = Sampling(max_new_tokens=20)
    async with scripted() as (server,), Fleet([server.address]) as fleet:
        server.scripts += [hold_back, hold_back]
        async with Batcher(fleet, seed=1, group_size=2, sampling=sampling) as batcher:
            collecting = asyncio.create_task(batcher.collect([Prompt("1", PROMPT)], 1))
            await until(lambda: fleet._pool.servers[0].outstanding_tokens == 2 * 17)
            collecting.cancel()
            await asyncio.wait([collecting])
        batcher.save(tmp_path / "buffer")
        async with Batcher(fleet, seed=1, group_size=2, sampling=sampling) as batcher:
            batcher.load(tmp_path / "buffer")
            await batcher.collect([], 1)
        assert [len(request.output_token_ids) for request in server.requests] == [0, 0, 8, 8]


async def test_a_server_that_does_not_answer_an_abort_is_waited_for_no_longer_than_it_may() -> None:
    timeouts = Timeouts(close=0.1)
    async with scripted() as (server,), Fleet([server.address], timeouts=timeouts) as fleet:
        server.scripts.append(hold_back)
        rollout = asyncio.create_task(fleet.generate(PROMPT, Sampling(max_new_tokens=20)))
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 17)
        server.mute = True
        began = time.monotonic()
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
        assert time.monotonic() - began >= 0.1

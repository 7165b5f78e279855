"""Conversations, against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
import torch
from client.scripted import ScriptedServer, Sequence, expected_token, scripted, until
from rollwire_client import (
    Conversation,
    Fleet,
    InvalidRequestError,
    PrefixMismatchError,
    Sampling,
    Timeouts,
    WeightTag,
)
from rollwire_client._trajectory import TrajectoryBuilder

PROMPT = (1, 2, 3)
TOOL = (70, 71)
TURN = Sampling(max_new_tokens=5)


def said(history: tuple[int, ...], count: int = 5) -> tuple[int, ...]:
    return tuple(expected_token(list(history), i) for i in range(count))


def fleet_of(*servers: ScriptedServer) -> Fleet:
    return Fleet([server.address for server in servers], timeouts=Timeouts(close=0.2))


async def test_each_turn_goes_on_from_all_tokens_before(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.weights.version = 4
    async with fleet_of(*pair) as fleet:
        session = fleet.session(PROMPT)
        first = await session.generate(TURN)
        session.append(torch.tensor(TOOL))
        for server in pair:
            server.weights.version = 5
        second = await session.generate(TURN, request_id="second")
        session.append([9])
    one = said(PROMPT)
    history = PROMPT + one + TOOL
    two = said(history)
    assert (first.token_ids, second.token_ids) == (one, two)
    requests = [request for server in pair for request in server.requests]
    assert [tuple(r.prompt_token_ids) for r in requests] == [PROMPT, history]
    assert {r.session_id for r in requests} == {session.id}
    assert not requests[0].HasField("min_weight_version")
    assert requests[1].min_weight_version == 4  # what the turn before was sampled under
    assert requests[1].request_id == second.request_id == "second"

    conversation = session.conversation()
    assert conversation.token_ids == session.token_ids == (*history, *two, 9)
    assert conversation.turns == (first, second)
    given, mask = (False,), (True,)
    assert conversation.mask == given * 3 + mask * 5 + given * 2 + mask * 5 + given
    assert conversation.versions == (None,) * 3 + (4,) * 5 + (None,) * 2 + (5,) * 5 + (None,)
    assert [lp for lp, m in zip(conversation.logprobs, conversation.mask, strict=True) if m] == [
        *first.logprobs,
        *second.logprobs,
    ]
    tensors = conversation.to_tensors()
    assert tensors.token_ids.tolist() == list(conversation.token_ids)
    assert tensors.mask.tolist() == list(conversation.mask)
    assert tensors.versions.tolist() == [-1] * 3 + [4] * 5 + [-1] * 2 + [5] * 5 + [-1]
    assert tensors.logprobs[~tensors.mask].abs().sum() == 0


def test_a_conversation_says_how_old_the_keys_were_that_each_token_read() -> None:
    turns = []
    for oldest in (3, 1):
        turn = TrajectoryBuilder([7])
        turn.begin_run(WeightTag(3, 3, "a", 5), oldest, "x")
        turn.token_ids += [5, 5]
        turn.logprobs += [-1.0, -1.0]
        turns.append(turn.trajectory())
    mask = (False, True, True, False, True, True, False)
    conversation = Conversation("id", (7,) * 7, (-1.0,) * 7, (3,) * 7, mask, tuple(turns))
    assert conversation.to_tensors().kv_lags.tolist() == [0, 0, 0, 0, 2, 2, 0]


async def test_a_conversation_keeps_its_server(pair: list[ScriptedServer]) -> None:
    async with fleet_of(*pair) as fleet:
        sessions = [fleet.session([n + 1]) for n in range(6)]
        for _ in range(3):
            await asyncio.gather(*(session.generate(TURN) for session in sessions))
    for session in sessions:
        assert len({turn.servers for turn in session.conversation().turns}) == 1


async def hang(sequence: Sequence) -> None:
    await sequence.send(2)
    await asyncio.Event().wait()


async def test_a_turn_that_is_left_stays_in_the_conversation(server: ScriptedServer) -> None:
    server.scripts = [hang]
    async with fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        async with contextlib.aclosing(session.stream(TURN)) as chunks:
            async for chunk in chunks:
                assert chunk.token_ids == said(PROMPT, 2)
                break
        await server.aborted.get()
        assert session.token_ids == PROMPT + said(PROMPT, 2)
        session.append(TOOL)
        chunks = [chunk.token_ids async for chunk in session.stream(TURN)]
    history = PROMPT + said(PROMPT, 2) + TOOL
    assert sum(chunks, ()) == said(history)
    assert session.token_ids == history + said(history)
    assert [turn.finish is None for turn in session.conversation().turns] == [True, False]


async def test_a_turn_that_is_left_has_no_more_than_was_read(server: ScriptedServer) -> None:
    async def publish(sequence: Sequence) -> None:
        await sequence.send(2)
        server.weights.version += 1
        await sequence.send(1)
        await asyncio.Event().wait()

    server.scripts = [publish]
    async with fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        async with contextlib.aclosing(session.stream(TURN)) as chunks:
            assert (await anext(chunks)).token_ids == said(PROMPT, 2)
            await until(lambda: fleet._pool.servers[0].outstanding_tokens == 2)  # three came
        (turn,) = session.conversation().turns
    assert session.token_ids == PROMPT + said(PROMPT, 2)
    assert [(segment.start, segment.end) for segment in turn.segments] == [(0, 2)]


async def test_a_turn_that_fails_stays_in_the_conversation(server: ScriptedServer) -> None:
    async def refuse(sequence: Sequence) -> None:
        await sequence.send(2)
        await sequence.fail(grpc.StatusCode.FAILED_PRECONDITION, "PREFIX_MISMATCH")

    server.scripts = [refuse]
    async with fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        with pytest.raises(PrefixMismatchError) as caught:
            await session.generate(TURN)
        assert session.token_ids == PROMPT + caught.value.trajectory.token_ids
        await session.generate(TURN)
    assert len(session.token_ids) == len(PROMPT) + 2 + 5


async def test_one_turn_at_a_time(server: ScriptedServer) -> None:
    server.scripts = [hang]
    async with fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        turn = asyncio.create_task(session.generate(TURN))
        await until(lambda: server.requests != [])
        with pytest.raises(RuntimeError, match="a turn of this session is under way"):
            await session.generate(TURN)
        with pytest.raises(RuntimeError, match="a turn of this session is under way"):
            session.append(TOOL)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await session.generate(TURN)
    assert len(server.requests) == 2


async def test_what_cannot_be_said(server: ScriptedServer) -> None:
    async with fleet_of(server) as fleet:
        with pytest.raises(InvalidRequestError):
            fleet.session("text")
        session = fleet.session()
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            session.append([1, -1])
        with pytest.raises(TypeError, match="the session's own"):
            await session.generate(TURN, session_id="mine")
    assert session.token_ids == ()
    assert server.requests == []


def test_a_stream_that_nobody_closes_ends_with_the_event_loop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = []

    async def run() -> None:
        async with scripted() as (server,), fleet_of(server) as fleet:
            server.default = hang
            kept.append(fleet.stream(PROMPT, TURN))
            kept.append(fleet.session(PROMPT).stream(TURN))
            for stream in kept:
                await anext(stream)

    asyncio.run(run())
    assert caplog.text == ""

"""Conversations that are forked and rewound, against fake servers."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from client.scripted import until
from hypothesis import given, settings
from hypothesis import strategies as st
from rollwire_client import Fleet, RoutingReplay, Sampling, Timeouts
from rollwire_client.testing import FakeServer
from support.examples import examples

if TYPE_CHECKING:
    from rollwire_client import Conversation, Session

CLOSE = Timeouts(close=0.2)
PROMPT = (1, 2, 3)


def fleet_of(*servers: FakeServer) -> Fleet:
    return Fleet([server.address for server in servers], timeouts=CLOSE)


def assert_consistent(conversation: Conversation) -> None:
    tokens, mask = conversation.token_ids, list(conversation.mask)
    assert len(tokens) == len(mask) == len(conversation.logprobs) == len(conversation.versions)
    sampled = [False] * len(tokens)
    for turn in conversation.turns:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        assert tokens[:end] == turn.prompt_ids + turn.token_ids
        assert conversation.logprobs[start:end] == turn.logprobs
        assert conversation.versions[start:end] == turn.versions
        assert [s.end for s in turn.segments][-1:] == [end - start][: len(turn.segments)]
        sampled[start:end] = [True] * (end - start)
    assert mask == sampled


STEPS = st.one_of(
    st.tuples(st.just("append"), st.lists(st.integers(0, 99), max_size=4)),
    st.tuples(st.just("turn"), st.integers(1, 4)),
    st.tuples(st.just("rewind"), st.floats(0, 1)),
    st.tuples(st.just("fork"), st.none()),
    st.tuples(st.just("commit"), st.none()),
)


@settings(max_examples=examples(40))
@given(steps=st.lists(st.tuples(st.integers(0, 9), STEPS), max_size=12))
def test_each_fork_has_what_it_began_with_and_what_was_added(steps: list) -> None:
    async def run() -> None:
        async with FakeServer(version=1) as server, fleet_of(server) as fleet:
            sessions = [fleet.session(PROMPT)]
            models = [list(PROMPT)]
            version = 1
            for which, (what, value) in steps:
                session, model = sessions[which % len(sessions)], models[which % len(sessions)]
                if what == "append":
                    session.append(value)
                    model += value
                elif what == "turn" and model:
                    turn = await session.generate(Sampling(max_new_tokens=value))
                    assert turn.prompt_ids == tuple(model)
                    model += turn.token_ids
                elif what == "rewind":
                    position = round(value * len(model))
                    session.rewind(position)
                    del model[position:]
                elif what == "fork":
                    sessions.append(session.fork())
                    models.append(list(model))
                elif what == "commit":
                    version += 1
                    server.commit(version)
            for session, model in zip(sessions, models, strict=True):
                assert session.token_ids == tuple(model)
                assert session.conversation().session_id == session.id
                assert_consistent(session.conversation())
            assert len({session.id for session in sessions}) == len(sessions)

    asyncio.run(run())


async def test_forks_stay_where_their_prefix_is() -> None:
    async with FakeServer() as one, FakeServer() as two, fleet_of(one, two) as fleet:
        for begun in (False, True):
            session = fleet.session([9])
            if begun:
                await session.generate(Sampling(max_new_tokens=2))
            forks = [session.fork() for _ in range(3)]
            turns = await asyncio.gather(
                *(fork.generate(Sampling(max_new_tokens=3)) for fork in [*forks, session])
            )
            assert len({turn.servers for turn in turns}) == 1
        requests = [*one.requests, *two.requests]
        assert len({request.session_id for request in requests}) == 8


async def test_a_turn_that_is_cut_has_no_end_and_no_routing_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with FakeServer(version=1, routing=(2, 2)) as server, fleet_of(server) as fleet:
        session: Session = fleet.session(PROMPT)
        turn = await session.generate(
            Sampling(max_new_tokens=6), routed_experts=RoutingReplay.AS_SAMPLED
        )
        session.append([7, 8])
        session.rewind(len(PROMPT) + 6)
        assert session.conversation().turns == (turn,)  # whole
        session.rewind(len(PROMPT) + 4)
        (cut,) = session.conversation().turns
        assert (cut.finish, cut.complete) == (None, False)
        assert cut.token_ids == turn.token_ids[:4]
        assert cut.segments == (replace(turn.segments[0], end=4),)
        assert cut.routing is not None
        assert cut.routing.num_rows == len(PROMPT) + 4 - 1
        assert_consistent(session.conversation())
        server.commit(2)
        await session.generate(Sampling(max_new_tokens=1))
        assert server.requests[-1].min_weight_version == 1
        session.rewind(1)
        assert (session.token_ids, session.conversation().turns) == ((1,), ())
        await session.generate(Sampling(max_new_tokens=1))
        assert not server.requests[-1].HasField("min_weight_version")


async def test_positions_that_there_are_not_and_turns_under_way() -> None:
    async with FakeServer(tokens_per_second=100) as server, fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        for wrong in (-1, 4, 1.5, "end"):
            with pytest.raises((TypeError, ValueError), match="position is"):
                session.rewind(wrong)
        turn = asyncio.create_task(session.generate(Sampling(max_new_tokens=1000)))
        await until(lambda: server.running == 1)
        for call in (session.fork, lambda: session.rewind(0)):
            with pytest.raises(RuntimeError, match="a turn of this session is under way"):
                call()
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        session.fork().rewind(0)
        assert session.token_ids[:3] == PROMPT

"""Routing replay through the library, against scripted servers."""

from __future__ import annotations

import asyncio

import pytest
from client.scripted import ScriptedServer, Sequence
from rollwire_client import (
    Fleet,
    ProtocolError,
    Retries,
    RolloutClient,
    RoutingReplay,
    Sampling,
    Timeouts,
)
from rollwire_client._trajectory import TrajectoryBuilder

PROMPT = [1, 2, 3]
AS_SAMPLED, LAST_PASS = RoutingReplay.AS_SAMPLED, RoutingReplay.LAST_PASS


def fleet_of(*servers: ScriptedServer) -> Fleet:
    return Fleet(
        [server.address for server in servers],
        retries=Retries(first_delay=0.001),
        timeouts=Timeouts(close=0.2),
    )


def experts(*rows: int) -> bytes:
    return bytes(row for row in rows for _ in range(4))


async def whole(sequence: Sequence, expert: int = 0) -> None:
    """Tokens to the end, with the routing of each."""
    at, length = 0, len(sequence.request.prompt_token_ids)
    while sequence.offset < sequence.budget:
        await sequence.route(at, length + sequence.offset, expert)
        at = length + sequence.offset
        await sequence.send()
    await sequence.finish()


async def test_rows_come_with_the_tokens_and_once(server: ScriptedServer) -> None:
    server.default = whole
    async with RolloutClient(server.address) as client, fleet_of(server) as fleet:
        for where in (client, fleet):
            stream = where.stream(PROMPT, Sampling(max_new_tokens=6), routed_experts=AS_SAMPLED)
            chunks = [chunk async for chunk in stream]
            routings = [chunk.routing for chunk in chunks if chunk.routing is not None]
            ends = [0, *(routing.end for routing in routings)]
            assert [routing.start for routing in routings] == ends[:-1]
            assert b"".join(routing.experts for routing in routings) == experts(*range(8))

            whole_one = await where.generate(
                PROMPT, Sampling(max_new_tokens=6), routed_experts=AS_SAMPLED
            )
            routing = whole_one.routing
            assert routing.experts == experts(*range(8))
            assert (routing.start, routing.num_rows) == (0, 8)
            assert (routing.num_layers, routing.top_k, routing.bytes_per_expert) == (2, 2, 1)
            (segment,) = routing.segments
            assert segment.weights == whole_one.segments[0].weights
            assert whole_one.to_tensors().routing.shape == (9, 2, 2)
    assert all(request.routed_experts for request in server.requests)


@pytest.mark.parametrize("replay", RoutingReplay)
async def test_a_chunk_has_no_rows_of_tokens_that_its_reader_has_not_got_yet(
    server: ScriptedServer, replay: RoutingReplay
) -> None:
    async def three_policies(sequence: Sequence) -> None:
        at = 0
        for end in (2, 5, 6):
            await sequence.route(at, 3 + end - 1)
            await sequence.send(end - sequence.offset)
            server.weights.revision += 1
            at = 3 + end - 1
        await sequence.finish()

    server.default = three_policies
    async with RolloutClient(server.address) as client, fleet_of(server) as fleet:
        for where in (client, fleet):
            stream = where.stream(PROMPT, Sampling(max_new_tokens=6), routed_experts=replay)
            chunks = [await anext(stream)]
            await asyncio.sleep(0.2)  # all the others come meanwhile
            chunks += [chunk async for chunk in stream]
            rows = [(c.routing.start, c.routing.end) for c in chunks if c.routing is not None]
            assert rows == [(0, 4), (4, 7), (7, 8)]


async def test_what_was_not_asked_for_does_not_come(server: ScriptedServer) -> None:
    server.default = whole
    async with fleet_of(server) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=3))
        chunks = [c async for c in fleet.stream(PROMPT, Sampling(max_new_tokens=3))]
    assert trajectory.routing is None
    assert {chunk.routing for chunk in chunks} == {None}
    assert not any(request.routed_experts for request in server.requests)


@pytest.mark.parametrize(
    ("replay", "want", "recomputed"),
    [
        (AS_SAMPLED, [100, 101, 102, *range(203, 210)], ((3, 6),)),
        (LAST_PASS, [*range(200, 210)], ((0, 6),)),
    ],
)
async def test_rows_that_a_server_took_with_it_come_from_the_next(
    pair: list[ScriptedServer], replay: RoutingReplay, want: list[int], recomputed
) -> None:
    async def die(sequence: Sequence) -> None:
        await sequence.send(4)
        await sequence.route(0, 3, 100)
        await sequence.cut()

    scripts = [die, lambda sequence: whole(sequence, 200)]
    for server in pair:
        server.scripts = scripts  # one list: whichever server is next
    async with fleet_of(*pair) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=8), routed_experts=replay)
    routing = trajectory.routing
    assert len(set(trajectory.servers)) == 2
    assert routing.experts == experts(*want)
    assert routing.recomputed == recomputed
    ids = [s.weights.server_id for s in trajectory.segments]
    first = 0 if replay is LAST_PASS else 3
    assert [(s.end, s.weights.server_id) for s in routing.segments if s.end > 3] == [(10, ids[1])]
    assert [(s.end, s.weights.server_id) for s in routing.segments if s.end <= 3] == [
        (first, ids[0])
    ] * (first > 0)


async def test_rows_that_no_server_sent_are_missing(server: ScriptedServer) -> None:
    async def die(sequence: Sequence) -> None:
        await sequence.route(0, 5)
        await sequence.send(sequence.budget)
        await sequence.cut()

    server.scripts = [die, Sequence.finish]  # the sequence was complete: nothing is computed
    async with fleet_of(server) as fleet:
        trajectory = await fleet.generate(
            PROMPT, Sampling(max_new_tokens=8), routed_experts=AS_SAMPLED
        )
    assert trajectory.complete
    assert trajectory.routing.num_rows == 5
    assert (trajectory.to_tensors().routing[:, 0, 0] == -1).tolist() == [False] * 5 + [True] * 6


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((0, 3, 0, {"experts": b"short"}), "routing of 3 tokens, .* came in 5 bytes"),
        ((0, 3, 0, {"bytes_per_expert": 4, "experts": bytes(48)}), "4 bytes an expert"),
        ((0, 0, 0, {}), "routing of 0 tokens"),
        ((0, 3, 0, {"top_k": 0, "experts": b""}), "top 0"),
        ((1, 3, 0, {}), "tokens 0 to 0 never came"),
        ((0, 12, 0, {}), "token 11 came, but the prompt has 3 tokens and the output at most 8"),
        ((0, 1, 0, {"num_tokens": 2**31, "num_layers": 2**31}), "came in 4 bytes"),
    ],
)
async def test_rows_that_do_not_fit_are_an_error(
    server: ScriptedServer, rows: tuple, said: str
) -> None:
    async def script(sequence: Sequence) -> None:
        start, end, expert, other = rows
        await sequence.send(2)
        await sequence.route(start, end, expert, **other)
        await asyncio.Event().wait()

    server.scripts = [script]
    async with fleet_of(server) as fleet:
        with pytest.raises(ProtocolError, match=said) as caught:
            await fleet.generate(
                PROMPT, Sampling(max_new_tokens=8), routed_experts=AS_SAMPLED, request_id="bad"
            )
        assert len(caught.value.trajectory.token_ids) == 2
        assert server.address in str(caught.value)
        assert await server.aborted.get() == "bad"
        # The link and other sequences on it go on.
        assert (await fleet.generate(PROMPT, Sampling(max_new_tokens=2))).complete
    assert server.streams == 1


@pytest.mark.parametrize("replay", RoutingReplay)
async def test_a_conversation_has_the_routing_of_its_turns(
    server: ScriptedServer, replay: RoutingReplay
) -> None:
    server.scripts = [whole, lambda sequence: whole(sequence, 100)]
    async with fleet_of(server) as fleet:
        session = fleet.session(PROMPT)
        assert session.conversation().routing is None
        await session.generate(Sampling(max_new_tokens=2), routed_experts=replay)
        session.append([9, 9])
        stream = session.stream(Sampling(max_new_tokens=3), routed_experts=replay)
        rows = b"".join([c.routing.experts async for c in stream if c.routing is not None])
    conversation = session.conversation()
    later = range(104, 109) if replay is AS_SAMPLED else range(100, 109)
    assert conversation.routing.experts == experts(*range(9 - len(later)), *later)
    assert rows == conversation.turns[1].routing.experts == experts(*range(100, 109))
    tensor = conversation.to_tensors().routing
    assert tensor.shape == (10, 2, 2)
    assert tensor[-1].tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize("replay", RoutingReplay)
async def test_a_rollout_goes_on_from_the_routing_of_its_prefix(
    server: ScriptedServer, replay: RoutingReplay
) -> None:
    async def part(sequence: Sequence) -> None:
        await sequence.route(0, 5)
        await sequence.send(3)
        await sequence.finish("ABORTED")

    server.scripts = [part, lambda sequence: whole(sequence, 100)]
    async with fleet_of(server) as fleet:
        sampling = Sampling(max_new_tokens=6)
        before = await fleet.generate(PROMPT, sampling, routed_experts=replay)
        output = TrajectoryBuilder.of(before)
        assert output.trajectory() == before
        rollout = fleet._pool.rollout(output, sampling, {"routed_experts": replay})
        assert output.trajectory().routing == before.routing
        await rollout.run()
    first = 5 if replay is AS_SAMPLED else 0
    want = experts(*range(first), *range(100 + first, 108))
    assert output.trajectory().routing.experts == want

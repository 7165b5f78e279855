"""Which server gets a sequence: sessions and version bounds."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

import grpc
import pytest
from client.scripted import (
    ScriptedServer,
    Sequence,
    expected_token,
    scripted,
    until,
    was_published,
)
from rollwire.v1 import common_pb2
from rollwire_client import (
    Fleet,
    Retries,
    Sampling,
    Timeouts,
    WeightTag,
    WeightVersionError,
)
from rollwire_client._fleet.router import STICK_TOKENS

PROMPT = [1, 2, 3]
SHORT = Sampling(max_new_tokens=4)


def fleet_of(servers: list[ScriptedServer]) -> Fleet:
    return Fleet([s.address for s in servers], probe_interval=0.02, timeouts=Timeouts(close=0.2))


async def hang(sequence: Sequence) -> None:
    await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def busy(fleet: Fleet, servers: list[ScriptedServer], tokens: int, session: str):
    """A sequence of the session, which brings its server so many outstanding tokens."""
    for server in servers:
        server.default = hang
    begun = sum(len(s.requests) for s in servers)
    task = asyncio.create_task(
        fleet.generate(PROMPT, Sampling(max_new_tokens=tokens), session_id=session)
    )
    await until(lambda: sum(len(s.requests) for s in servers) > begun)
    for server in servers:
        server.default = Sequence.rest
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_session_stays_where_its_prefix_is(pair: list[ScriptedServer]) -> None:
    async with fleet_of(pair) as fleet:
        (home,) = (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers
        async with busy(fleet, pair, STICK_TOKENS // 2, "mine"):
            for _ in range(3):
                assert (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers == (home,)
            (other,) = (await fleet.generate(PROMPT, SHORT, session_id="yours")).servers
            assert other != home
            assert (await fleet.generate(PROMPT, SHORT)).servers == (other,)
    assert {r.session_id for s in pair for r in s.requests} == {"mine", "yours", ""}


async def test_a_session_leaves_a_server_that_is_clearly_busier(
    pair: list[ScriptedServer],
) -> None:
    async with fleet_of(pair) as fleet:
        (home,) = (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers
        big = STICK_TOKENS // 2 + 1
        async with busy(fleet, pair, big, "mine"):
            (other,) = (await fleet.generate(PROMPT, SHORT, session_id="yours")).servers
            async with busy(fleet, pair, big, "mine"):
                for _ in range(3):  # and stays with the next
                    got = await fleet.generate(PROMPT, SHORT, session_id="mine")
                    assert got.servers == (other,) != (home,)


async def test_a_session_does_not_wait_for_a_server_that_is_not_ready(
    pair: list[ScriptedServer],
) -> None:
    async with fleet_of(pair) as fleet:
        (home,) = (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers
        (gone,) = (s for s in pair if s.address == home)
        await gone.stop()
        await until(lambda: any(m.problem is not None for m in fleet._pool.servers))
        assert (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers != (home,)


async def test_a_session_owes_nothing_to_a_new_process(pair: list[ScriptedServer]) -> None:
    async with fleet_of(pair) as fleet:
        (home,) = (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers
        async with busy(fleet, pair, 100, "mine"):
            for server in pair:
                server.weights.server_id = uuid.uuid4().hex
            ids = {server.weights.server_id for server in pair}
            await until(lambda: {member.server_id for member in fleet._pool.servers} == ids)
            assert (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers != (home,)


async def test_bounds_choose_the_server_whose_version_fits() -> None:
    async with scripted(3) as servers:
        for version, server in enumerate(servers, start=4):
            server.weights.version = version
        async with fleet_of(servers) as fleet:
            await until(lambda: all(m.problem is None for m in fleet._pool.servers))

            async def ran(least: int | None, most: int | None) -> list[int]:
                """Versions of the servers that four sequences ran on."""
                for server in servers:
                    server.requests.clear()
                await asyncio.gather(
                    *(
                        fleet.generate(
                            PROMPT, SHORT, min_weight_version=least, max_weight_version=most
                        )
                        for _ in range(4)
                    )
                )
                return [server.weights.version for server in servers for _ in server.requests]

            assert await ran(5, 5) == [5] * 4
            assert await ran(None, 5) == [4, 4, 5, 5]
            assert await ran(6, None) == [6] * 4
            assert set(await ran(7, None)) == {4, 5, 6}  # they wait for it there
            with pytest.raises(WeightVersionError, match=r"serves version 4; .* version 6"):
                await ran(None, 3)
            servers[1].weights.version = 4
            await until(lambda: fleet._pool.servers[1].version == 4)
            assert set(await ran(5, 5)) == {4}  # may come to it; the one beyond it cannot


async def refuse(sequence: Sequence) -> None:
    await sequence.fail(grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_TOO_NEW")


async def commit_newer(sequence: Sequence) -> None:
    """The server commits what the sequence must not be sampled under, after three tokens."""
    await sequence.send(3)
    sequence.server.weights.version = 7
    sequence.server.default = refuse
    await sequence.finish("INTERRUPTED")


def asked_once(servers: list[ScriptedServer]) -> Fleet:
    """What it knows of versions is of the time when it was opened; it never gives up by itself."""
    return Fleet(
        [s.address for s in servers],
        probe_interval=1000,
        retries=Retries(seconds=1000),
        timeouts=Timeouts(close=0.2),
    )


def tokens(count: int) -> tuple[int, ...]:
    return tuple(expected_token(PROMPT, i) for i in range(count))


async def test_a_sequence_that_is_too_old_for_some_servers_goes_to_another() -> None:
    async with scripted(12) as servers:  # of which more refuse it than attempts may fail
        for server in servers:
            server.weights.version, server.default = 5, refuse
        fits = servers[7]
        fits.default = Sequence.rest
        async with asked_once(servers) as fleet:
            await until(lambda: all(m.problem is None for m in fleet._pool.servers))
            for _ in range(2):
                trajectory = await fleet.generate(PROMPT, SHORT, max_weight_version=5)
                assert trajectory.servers == (fits.address,)
            # The others are no worse for it, and are not asked again.
            assert [len(s.requests) for s in servers if s is not fits] == [1] * 7 + [0] * 4
            assert all(m.problem is None for m in fleet._pool.servers)


async def test_a_sequence_that_a_commit_ends_goes_on_under_older_weights(
    pair: list[ScriptedServer],
) -> None:
    for server in pair:
        server.weights.version = 5
    scripts = [commit_newer]
    for server in pair:
        server.scripts = scripts  # one list: whichever server is first
    async with asked_once(pair) as fleet:
        trajectory = await fleet.generate(PROMPT, Sampling(max_new_tokens=9), max_weight_version=5)
    assert trajectory.token_ids == tokens(9)
    assert trajectory.versions == (5,) * 9
    assert len(trajectory.servers) == 2


@pytest.mark.parametrize("sent", [0, 3])
async def test_a_bound_that_no_server_can_meet_any_more_ends_the_sequence_at_once(
    pair: list[ScriptedServer], sent: int
) -> None:
    for server in pair:
        server.weights.version = 5
        server.default = commit_newer if sent else refuse
    async with asked_once(pair) as fleet:
        with pytest.raises(WeightVersionError, match="unless the policy is rolled back") as caught:
            await fleet.generate(PROMPT, Sampling(max_new_tokens=9), max_weight_version=5)
    assert caught.value.trajectory.token_ids == tokens(2 * sent)
    assert all(server.address in str(caught.value) for server in pair)
    assert caught.value.reason == "WEIGHTS_TOO_NEW"


async def test_a_server_that_fits_and_is_not_ready_is_waited_for(
    pair: list[ScriptedServer],
) -> None:
    newer, older = pair
    newer.weights.version, older.weights.version = 7, 5
    older.state = common_pb2.SERVER_STATE_SLEEPING
    async with fleet_of(pair) as fleet:
        waiting = asyncio.create_task(fleet.generate(PROMPT, SHORT, max_weight_version=5))
        await fleet.generate(PROMPT, SHORT)
        assert not waiting.done()
        older.state = common_pb2.SERVER_STATE_SERVING
        assert (await waiting).servers == (older.address,)
        older.state = common_pb2.SERVER_STATE_SLEEPING
        await until(lambda: fleet._pool.servers[1].problem is not None)
        waiting = asyncio.create_task(fleet.generate(PROMPT, SHORT, max_weight_version=5))
        await asyncio.sleep(0)
        older.weights.version = 8
        with pytest.raises(WeightVersionError):
            await waiting
    assert len(newer.requests) == 1


async def test_who_waits_learns_of_what_was_published(pair: list[ScriptedServer]) -> None:
    for server in pair:
        server.weights.version = 5
        server.state = common_pb2.SERVER_STATE_SLEEPING
    async with asked_once(pair) as fleet:
        waiting = asyncio.create_task(fleet.generate(PROMPT, SHORT, max_weight_version=5))
        await until(lambda: all("sleeping" in str(m.problem) for m in fleet._pool.servers))
        assert not waiting.done()
        was_published(fleet, WeightTag(7, 1, "any", 77))
        with pytest.raises(WeightVersionError, match="is sleeping"):
            await waiting


@pytest.mark.parametrize(
    ("state", "published"),
    [
        (common_pb2.SERVER_STATE_AWAITING_WEIGHTS, False),
        (common_pb2.SERVER_STATE_QUARANTINED, False),
        (common_pb2.SERVER_STATE_SERVING, True),
    ],
)
async def test_a_server_that_will_come_back_with_newer_weights_is_not(
    pair: list[ScriptedServer], state: int, published: bool
) -> None:
    newer, older = pair
    newer.weights.version, newer.weights.digest = 7, 77
    older.state = state
    async with fleet_of(pair) as fleet:
        if published:
            was_published(fleet, WeightTag(7, 1, "any", 77))
        await until(lambda: fleet._pool.servers[1].info is not None)
        with pytest.raises(WeightVersionError):
            await fleet.generate(PROMPT, SHORT, max_weight_version=5)
    assert newer.requests == older.requests == []


async def test_a_server_that_was_never_there_is_not_waited_for(server: ScriptedServer) -> None:
    server.weights.version = 7
    async with Fleet([server.address, "127.0.0.1:9"], probe_interval=0.02) as fleet:
        with pytest.raises(WeightVersionError, match=r"127\.0\.0\.1:9"):
            await fleet.generate(PROMPT, SHORT, max_weight_version=5)


async def test_a_process_that_refused_says_nothing_of_the_next(server: ScriptedServer) -> None:
    server.weights.version = 5
    server.scripts = [refuse]
    async with fleet_of([server]) as fleet:
        with pytest.raises(WeightVersionError, match="serves a newer one"):
            await fleet.generate(PROMPT, SHORT, max_weight_version=5)
        server.weights.server_id = uuid.uuid4().hex
        await until(lambda: fleet._pool.servers[0].server_id == server.weights.server_id)
        assert (await fleet.generate(PROMPT, SHORT, max_weight_version=5)).complete

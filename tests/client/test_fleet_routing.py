"""Which server gets a sequence: sessions and version bounds."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from client.scripted import ScriptedServer, Sequence, scripted, until
from rollwire_client import Fleet, Sampling, Timeouts
from rollwire_client.routing import STICK_TOKENS

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
        await until(lambda: any(m.problem is not None for m in fleet.members))
        assert (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers != (home,)


async def test_a_session_owes_nothing_to_a_new_process(pair: list[ScriptedServer]) -> None:
    async with fleet_of(pair) as fleet:
        (home,) = (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers
        async with busy(fleet, pair, 100, "mine"):
            for server in pair:
                server.weights.server_id = uuid.uuid4().hex
            ids = {server.weights.server_id for server in pair}
            await until(lambda: {member.server_id for member in fleet.members} == ids)
            assert (await fleet.generate(PROMPT, SHORT, session_id="mine")).servers != (home,)


async def test_bounds_choose_the_server_whose_version_fits() -> None:
    async with scripted(3) as servers:
        for version, server in enumerate(servers, start=4):
            server.weights.version = version
        async with fleet_of(servers) as fleet:
            await until(lambda: all(m.problem is None for m in fleet.members))

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
            assert set(await ran(None, 3)) == {4, 5, 6}  # whichever it is refuses it
            servers[1].weights.version = 4
            await until(lambda: fleet.members[1].version == 4)
            assert set(await ran(5, 5)) == {4}  # may come to it; the one beyond it cannot

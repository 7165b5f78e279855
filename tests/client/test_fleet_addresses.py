"""A fleet whose servers come and go, against scripted servers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import uuid

import pytest
from client.publishing import holds, publish
from client.scripted import ScriptedServer, Sequence, expected_token, scripted, until
from client.scripted_weights import BUCKET_BYTES, PublishableServer, policy
from rollwire_client import (
    Fleet,
    Publisher,
    Retries,
    Sampling,
    ServerUnreachableError,
    Timeouts,
    UnavailableError,
)
from rollwire_client._fleet.server_handle import ServerStatus
from rollwire_client._fleet.server_pool import AddressSource

PROMPT = [1, 2, 3]
TOKENS = tuple(expected_token(PROMPT, i) for i in range(8))
SAMPLING = Sampling(max_new_tokens=8)


@contextlib.asynccontextmanager
async def following(listed: list[ScriptedServer], **options):
    """A fleet of the servers that are in the list, whenever it looks."""
    options.setdefault("timeouts", Timeouts(call=5, close=0.2))
    async with Fleet(
        lambda: [server.address for server in listed],
        probe_interval=0.02,
        resolve_interval=0.01,
        retries=Retries(attempts=3, seconds=20, first_delay=0.001),
        **options,
    ) as fleet:
        yield fleet


def gate(then: asyncio.Event):
    async def script(sequence: Sequence) -> None:
        await sequence.send(3)
        await then.wait()
        await sequence.rest()

    return script


async def ready(fleet: Fleet, *servers: ScriptedServer) -> None:
    """Returns once these, and no others, are members that take sequences."""
    want = [server.address for server in servers]
    await until(
        lambda: [m.address for m in fleet._pool.servers if m.status is ServerStatus.READY] == want
    )


async def test_a_new_server_is_used(pair: list[ScriptedServer]) -> None:
    listed = pair[:1]
    async with following(listed) as fleet:
        await fleet.generate(PROMPT, SAMPLING)
        listed.append(pair[1])
        await ready(fleet, *pair)
        for server in pair:
            server.default = gate(asyncio.Event())
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(4)]
            await until(lambda: [len(s.requests) for s in pair] == [3, 2])
            for task in running:
                task.cancel()


async def test_one_that_left_keeps_its_sequences_and_gets_no_more(
    pair: list[ScriptedServer],
) -> None:
    listed, go = list(pair), asyncio.Event()
    pair[0].default = pair[1].default = gate(go)
    async with following(listed) as fleet:
        running = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(2)]
        await until(lambda: [m.outstanding_tokens for m in fleet._pool.servers] == [5, 5])
        left = fleet._pool.servers[0]
        del listed[0]
        await ready(fleet, pair[1])
        assert left.status is ServerStatus.LEAVING
        assert left.client.channel is not None
        running += [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(3)]
        await until(lambda: [len(s.requests) for s in pair] == [1, 4])
        go.set()
        trajectories = await asyncio.gather(*running)
        assert [t.token_ids for t in trajectories] == [TOKENS] * 5
        assert [len(t.servers) for t in trajectories] == [1] * 5
        await until(lambda: left.status is ServerStatus.GONE)
        with pytest.raises(Exception, match="is not open"):
            _ = left.client.channel


async def test_a_sequence_whose_leaving_server_dies_goes_on_elsewhere(
    pair: list[ScriptedServer],
) -> None:
    listed = list(pair)
    pair[0].default = gate(asyncio.Event())
    async with following(listed) as fleet:
        running = asyncio.create_task(fleet.generate(PROMPT, SAMPLING))
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 5)
        left = fleet._pool.servers[0]
        del listed[0]
        await ready(fleet, pair[1])
        await pair[0].stop()
        assert (await running).token_ids == TOKENS
        await until(lambda: left.status is ServerStatus.GONE)


async def test_one_that_comes_back_while_it_leaves_stays(pair: list[ScriptedServer]) -> None:
    listed, go = list(pair), asyncio.Event()
    pair[0].default = gate(go)
    async with following(listed) as fleet:
        running = asyncio.create_task(fleet.generate(PROMPT, SAMPLING))
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 5)
        member = fleet._pool.servers[0]
        listed.pop(0)
        await ready(fleet, pair[1])
        listed.insert(0, pair[0])
        await ready(fleet, *pair)
        assert fleet._pool.servers[0] is member
        go.set()
        assert (await running).token_ids == TOKENS


async def test_one_that_comes_back_later_begins_again(pair: list[ScriptedServer]) -> None:
    listed = list(pair)
    async with following(listed) as fleet:
        first = fleet._pool.servers[0]
        listed.pop(0)
        await until(lambda: first.status is ServerStatus.GONE)
        listed.insert(0, pair[0])
        await ready(fleet, *pair)
        assert fleet._pool.servers[0] is not first
        assert (await fleet.generate(PROMPT, SAMPLING)).servers == (pair[0].address,)


async def test_another_process_at_the_same_address_is_another_peer(
    pair: list[ScriptedServer],
) -> None:
    silent = Timeouts(call=5, silence=0.1, probe=5, close=0.2)
    pair[0].default = gate(asyncio.Event())
    async with following(pair, timeouts=silent) as fleet:
        running = asyncio.create_task(fleet.generate(PROMPT, SAMPLING))
        await until(lambda: fleet._pool.servers[0].outstanding_tokens == 5)
        # The old stream hangs; whoever answers at the address now never heard of it.
        pair[0].default = Sequence.rest
        pair[0].weights.server_id = uuid.uuid4().hex
        assert (await running).token_ids == TOKENS
        await until(lambda: fleet._pool.servers[0].server_id == pair[0].weights.server_id)


@pytest.mark.parametrize("trouble", ["nothing", "an error", "no address"])
async def test_a_list_that_cannot_be_had_changes_nothing(
    pair: list[ScriptedServer], trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"nothing": [], "no address": ["here"]}
    asked = 0

    async def addresses() -> list[str]:
        nonlocal asked
        asked += 1
        if asked == 1:
            return [server.address for server in pair]
        return told[trouble]  # there is no "an error": a KeyError

    async with Fleet(addresses, resolve_interval=0.01) as fleet:
        await until(lambda: asked > 4)
        assert [m.address for m in fleet._pool.servers] == [server.address for server in pair]
        assert (await fleet.generate(PROMPT, SAMPLING)).token_ids == TOKENS
    assert caplog.text.count("the fleet keeps its 2 servers") == 1


async def test_a_fleet_that_starts_without_servers_waits_for_them(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    listed: list[ScriptedServer] = []
    fleet = Fleet(lambda: [server.address for server in listed])
    opening = asyncio.create_task(fleet.__aenter__())
    await until(lambda: "there are no servers" in caplog.text)
    listed.append(server)
    await opening
    assert (await fleet.generate(PROMPT, SAMPLING)).token_ids == TOKENS
    await fleet.close()
    with pytest.raises(UnavailableError, match="there are no servers"):
        async with Fleet(list, timeouts=Timeouts(start=0)):
            pass


async def test_a_function_that_blocks_or_hangs_disturbs_nobody(server: ScriptedServer) -> None:
    hang, hanging = threading.Event(), threading.Event()

    def addresses() -> list[str]:
        if threading.current_thread() is threading.main_thread():
            raise RuntimeError("called where it blocks the event loop")
        if called:
            hanging.set()
            hang.wait(30)
        called.append(1)
        return [server.address]

    called: list[int] = []
    try:
        async with Fleet(addresses, resolve_interval=0.01) as fleet:
            await until(hanging.is_set)
            assert (await fleet.generate(PROMPT, SAMPLING)).token_ids == TOKENS
    finally:
        hang.set()


async def test_a_name_is_resolved_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, found, failed = socket.getaddrinfo, ["127.0.0.2", "127.0.0.1"], []

    def resolve(name: str, port: int, *more: object, **named: object):
        if name != "rollouts.example":
            return real(name, port, *more, **named)
        if not found:
            failed.append(name)
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    async with scripted() as (server,):
        port = server.address.rpartition(":")[2]
        async with Fleet(f"dns:///rollouts.example:{port}", resolve_interval=0.01) as fleet:
            assert [m.address for m in fleet._pool.servers] == [
                f"127.0.0.1:{port}",
                f"127.0.0.2:{port}",
            ]
            del found[0]
            await until(lambda: [m.address for m in fleet._pool.servers] == [f"127.0.0.1:{port}"])
            found.clear()
            await until(lambda: len(failed) > 2)
            assert (await fleet.generate(PROMPT, SAMPLING)).token_ids == TOKENS


async def test_what_a_name_resolves_to(monkeypatch: pytest.MonkeyPatch) -> None:
    source = AddressSource("dns:///localhost:5")
    assert set(await source.resolve(10)) <= {"127.0.0.1:5", "[::1]:5"}
    assert source.server_name == "localhost"
    with pytest.raises(LookupError, match=r"dns:///nowhere\.invalid:5: "):
        await AddressSource("dns:///nowhere.invalid:5").resolve(20)


@pytest.mark.parametrize("address", ["[fe80::1%br-lan]:5", "[::1]:5", "name.svc:5"])
async def test_what_is_an_address_is_taken_as_it_is_and_at_once(address: str) -> None:
    assert await AddressSource([address]).resolve(0) == (address,)


@pytest.mark.parametrize("wrong", ["dns:///name", "dns:///:5", "dns://name:5/", "name:5"])
def test_what_is_no_address_is_refused_at_once(wrong: str) -> None:
    with pytest.raises((TypeError, ValueError)):
        Fleet(wrong)


async def test_publishes_reach_the_servers_of_the_moment() -> None:
    servers = [await PublishableServer().start() for _ in range(3)]
    listed = servers[:2]
    try:
        async with following(listed) as fleet:
            publisher = Publisher(fleet, term=7, bucket_bytes=BUCKET_BYTES)
            await publish(publisher)
            listed[:] = servers[1:]
            await until(
                lambda: (
                    [m.status for m in fleet._pool.servers]
                    == [ServerStatus.READY, ServerStatus.BEHIND]
                )
            )
            report = await publisher.catch_up(policy())
            assert [told.address for told in report.servers] == [servers[2].address]
            report = await publish(publisher, 2, seed=2)
            assert {told.address for told in report.servers} == {s.address for s in listed}
            assert [holds(s, 2) for s in servers] == [False, True, True]
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


async def test_a_server_that_leaves_during_a_publish_still_commits_it() -> None:
    servers = [await PublishableServer().start() for _ in range(2)]
    listed = list(servers)
    try:
        async with following(listed) as fleet:
            publisher = Publisher(fleet, term=7, bucket_bytes=BUCKET_BYTES)
            go, want = threading.Event(), policy()

            def tensors():
                go.wait(30)
                return ((spec.name, want[spec.name]) for spec in schema if not spec.alias_of)

            schema = await publisher.schema()
            handle = await publisher.publish(1, tensors)
            left = fleet._pool.servers[0]
            del listed[0]
            await until(lambda: left.status is ServerStatus.LEAVING)
            go.set()
            assert (await handle.committed).failed == ()
            assert [holds(s) for s in servers] == [True, True]
            await until(lambda: left.status is ServerStatus.GONE)
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def other_name(server: ScriptedServer) -> str:
    """Another address of the same server."""
    return server.address.replace("127.0.0.1", "localhost")


async def test_two_addresses_of_one_server_are_one_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = [await PublishableServer().start() for _ in range(2)]
    one, two = servers
    addresses = [one.address, other_name(one), two.address]
    try:
        async with Fleet(addresses, probe_interval=0.02, timeouts=Timeouts(close=0.2)) as fleet:
            assert [member.address for member in fleet._pool.servers] == [one.address, two.address]
            assert (await fleet.info()).keys() == set(addresses)
            report = await publish(Publisher(fleet, bucket_bytes=BUCKET_BYTES))
            assert [(s.address, s.error) for s in report.servers] == [
                (one.address, None),
                (two.address, None),
            ]
            assert [server.announced for server in servers] == [1, 1]
            one.default = two.default = gate(go := asyncio.Event())
            rollouts = [asyncio.create_task(fleet.generate(PROMPT, SAMPLING)) for _ in range(8)]
            await until(lambda: len(one.requests + two.requests) == 8)
            assert [len(server.requests) for server in servers] == [4, 4]  # not twice the share
            go.set()
            await asyncio.gather(*rollouts)
            two.weights.digest += 1
            assert len((await Publisher(fleet).catch_up(policy())).servers) == 1
    finally:
        await asyncio.gather(*(server.stop() for server in servers))
    assert caplog.text.count("are addresses of one server") == 1
    assert f"{one.address} and {other_name(one)} are addresses" in caplog.text


async def test_another_address_of_a_server_that_comes_later_changes_nothing() -> None:
    server = await PublishableServer().start()
    addresses = [server.address]
    try:
        async with Fleet(
            lambda: addresses, probe_interval=0.02, resolve_interval=0.01,
            timeouts=Timeouts(close=0.2),
        ) as fleet:  # fmt: skip
            publisher = Publisher(fleet, bucket_bytes=BUCKET_BYTES)
            addresses.append(other_name(server))
            await until(lambda: len(fleet._pool.listed) == 2)
            report = await publish(publisher)  # perhaps before it has said who it is
            assert [s.address for s in report.servers] == [server.address]
            assert report.failed == ()
            # Without the first address it is reached under the second.
            await until(lambda: fleet._pool.listed[1].info is not None)
            addresses.pop(0)
            await until(lambda: [m.address for m in fleet._pool.servers] == [other_name(server)])
            assert (await fleet.generate(PROMPT, SAMPLING)).token_ids == TOKENS
            assert (await publish(publisher, 2)).failed == ()
    finally:
        await server.stop()


async def test_a_server_is_reached_under_the_address_that_answers(server: ScriptedServer) -> None:
    """One of the ways to it is cut."""
    async with Fleet(
        [server.address, other_name(server)], probe_interval=0.02, timeouts=Timeouts(close=0.2)
    ) as fleet:
        first, second = fleet._pool.listed
        assert fleet._pool.servers == (first,)

        async def cut(**_: object) -> None:
            raise ServerUnreachableError("cut", server=first.address)

        first.client.info = cut
        await until(lambda: fleet._pool.servers == (second,))
        assert (await fleet.generate(PROMPT, SAMPLING)).servers == (second.address,)
        del first.client.info
        await until(lambda: fleet._pool.servers == (first,))

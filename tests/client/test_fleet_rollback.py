"""A trainer goes back to an earlier version: newer is what was committed later."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest
from client.publishing import holds, publish, publishing
from client.scripted import ScriptedServer, Sequence, expected_token, until, was_published
from client.scripted_weights import BUCKET_BYTES, PublishableServer, policy
from rollwire_client import (
    Fleet,
    Publisher,
    PublishFailedError,
    Retries,
    Sampling,
    Timeouts,
    WeightTag,
    WeightVersionError,
)

PROMPT = [1, 2, 3]
TURN = Sampling(max_new_tokens=6)


def fleet_of(*servers: ScriptedServer, seconds: float = 60) -> Fleet:
    return Fleet(
        [server.address for server in servers],
        probe_interval=0.02,
        retries=Retries(seconds=seconds, first_delay=0.001),
        timeouts=Timeouts(close=0.2),
    )


def serve(server: ScriptedServer, version: int | None, digest: int) -> None:
    """It has committed this."""
    server.weights.ClearField("version")
    if version is not None:
        server.weights.version = version
        server.highest_version = max(version, server.highest_version or 0)
    server.weights.digest = digest
    server.weights.revision += 1


async def refuse_older(sequence: Sequence) -> None:
    """As a server: a sequence waits for weights that it has not."""
    request, weights = sequence.request, sequence.server.weights
    if request.HasField("min_weight_version"):
        assert weights.HasField("version")
        if weights.version < request.min_weight_version:
            await asyncio.Event().wait()
    await sequence.rest()


async def give_up_after_two(sequence: Sequence) -> None:
    await sequence.send(2)
    await sequence.finish("INTERRUPTED")


async def roll_back(publisher: Publisher, version: int, seed: int) -> None:
    handle = await publisher.publish(version, policy(seed), allow_version_rollback=True)
    await handle.committed


@contextlib.asynccontextmanager
async def missed_by_the_second():
    """The first of two servers was rolled back from 57 to 50, the second still serves 57."""
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher, 57, seed=57)
        servers[1].refuse_update = ("STAGING_FAILED", {})
        await roll_back(publisher, 50, 50)
        servers[1].refuse_update = None
        yield servers, fleet, publisher


async def test_who_missed_a_rollback_gets_no_rollouts() -> None:
    async with missed_by_the_second() as (servers, fleet, _):
        await until(lambda: fleet._pool.servers[1].problem is not None)
        trajectories = await asyncio.gather(*(fleet.generate(PROMPT, TURN) for _ in range(4)))
        assert {version for t in trajectories for version in t.versions} == {50}
        assert servers[1].requests == []
        assert "serves version 57, not version 50" in str(fleet._pool.servers[1].problem)


def allowed(server: PublishableServer) -> bool:
    """Whether the update that was announced last may lower the version."""
    assert server.update is not None
    return server.update.request.allow_version_rollback


async def test_who_missed_a_rollback_is_caught_up() -> None:
    async with missed_by_the_second() as (servers, fleet, publisher):
        report = await publisher.catch_up(policy(50))
        assert [told.address for told in report.servers] == [servers[1].address]
        assert allowed(servers[1])
        assert holds(servers[1], 50)
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))
        await publish(publisher, 51, seed=51)
        assert [allowed(server) for server in servers] == [False, False]


@pytest.mark.parametrize("version", [51, 57, None])
async def test_who_missed_a_rollback_takes_the_next_publish(version: int | None) -> None:
    async with missed_by_the_second() as (servers, fleet, publisher):
        report = await publish(publisher, version, seed=51)
        assert report.failed == ()
        assert [allowed(server) for server in servers] == [False, True]
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))


async def test_a_higher_version_of_somebody_else_is_not_lowered_unasked() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher, 5)
        serve(servers[1], 900, 9)
        await until(lambda: "a publish above version 900" in str(fleet._pool.servers[1].problem))
        await publish(publisher, 6)
        assert not allowed(servers[1])  # so that the server refuses it


async def test_a_trainer_that_starts_after_a_rollback_catches_up_who_missed_it() -> None:
    async with missed_by_the_second() as (servers, _, _):
        later = fleet_of(*servers)
        async with later as fleet:
            publisher = Publisher(fleet, term=8, bucket_bytes=BUCKET_BYTES)
            servers[1].refuse_update = ("VERSION_NOT_NEWER", {})  # 51 is below 57
            await publish(publisher, 51, seed=51)
            assert not allowed(servers[1])
            servers[1].refuse_update = None
            await until(
                lambda: "catch_up() or a publish above" in str(fleet._pool.servers[1].problem)
            )
            report = await publisher.catch_up(policy(51))
            assert [told.error for told in report.servers] == [None]
            assert allowed(servers[1])
            assert holds(servers[1], 51)
            await until(lambda: all(member.problem is None for member in fleet._pool.servers))


async def test_a_partial_update_passes_over_who_missed_a_publish() -> None:
    """It would mix tensors of two policies there, and might pass for what was published last."""
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher, 1)
        servers[0].refuse_update = ("STAGING_FAILED", {})
        await publish(publisher, 2, seed=2)
        servers[0].refuse_update = None
        announced = servers[0].announced
        part = {"layer.bias": policy(3)["layer.bias"]}
        report = await (await publisher.publish(3, part, partial=True)).committed
        assert [server.address for server in report.failed] == [servers[0].address]
        assert "a partial update would mix two policies" in str(report.failed[0].error)
        assert servers[0].announced == announced
        assert [member.problem is None for member in fleet._pool.servers] == [False, True]
        await publish(publisher, 4, seed=4)
        await until(lambda: all(member.problem is None for member in fleet._pool.servers))


async def test_a_commit_whose_answers_are_lost_is_the_policy_once_a_server_shows_it() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher, 5, seed=5)
        for server in servers:
            server.lose_commit_answers = 1
            server.mute_once_committed = True  # so that it is not asked again
        handle = await publisher.publish(6, policy(6))
        with pytest.raises(PublishFailedError, match="may or may not have done it"):
            await handle.committed
        for server in servers:
            server.mute = server.mute_once_committed = False
        assert await fleet._pool.outdated_servers() == []
        assert fleet.policy is not None
        assert fleet.policy.version == 6
        assert await fleet._pool.outdated_servers() == []
        assert all(member.problem is None for member in fleet._pool.servers)


async def test_while_servers_commit_those_that_have_not_yet_get_rollouts(
    pair: list[ScriptedServer],
) -> None:
    async with fleet_of(*pair) as fleet:
        for server in pair:
            serve(server, 1, 11)
        was_published(fleet, WeightTag(1, 1, "any", 11))
        await until(lambda: all(m.version == 1 and not m.problem for m in fleet._pool.servers))
        with fleet._pool.policy.committing(2, 22, rollback=False):
            fleet._pool.committed("127.0.0.1:1", WeightTag(2, 2, "any", 22))
            assert all(member.problem is None for member in fleet._pool.servers)
        assert all(member.problem is not None for member in fleet._pool.servers)


@pytest.mark.parametrize("publishes", [True, False], ids=["the policy tells", "the server tells"])
async def test_a_sequence_goes_on_under_what_was_rolled_back_to(
    publishes: bool, pair: list[ScriptedServer]
) -> None:
    for server in pair:
        serve(server, 10, 100)
        server.default = refuse_older

    async def back(sequence: Sequence) -> None:
        await sequence.send(2)
        for server in pair:
            serve(server, 5, 50)
        if publishes:
            was_published(fleet, WeightTag(5, 2, "any", 50), rollback=True)
        await sequence.finish("INTERRUPTED")

    pair[0].scripts = pair[1].scripts = [back]
    async with fleet_of(*pair) as fleet:
        if publishes:
            was_published(fleet, WeightTag(10, 1, "any", 100))
        trajectory = await fleet.generate(PROMPT, TURN)
    assert trajectory.versions == (10,) * 2 + (5,) * 4


async def test_a_sequence_that_waits_when_the_policy_is_rolled_back_waits_no_more(
    server: ScriptedServer,
) -> None:
    """It has tokens of version 10, which came to no other server before the trainer went back."""
    serve(server, 10, 100)
    server.scripts = [give_up_after_two]
    tokens = [expected_token(PROMPT, position) for position in range(6)]
    async with fleet_of(server) as fleet:
        was_published(fleet, WeightTag(10, 1, "any", 100))
        waits = asyncio.Event()

        async def restart(sequence: Sequence) -> None:
            serve(server, 9, 90)  # it was a moment before the commit
            server.highest_version = None
            waits.set()
            sequence.unsent = 3  # comes once the sequence has gone on without it
            await refuse_older(sequence)

        server.scripts.append(restart)
        server.default = refuse_older

        async def versions() -> list[int | None]:
            chunks = [chunk async for chunk in fleet.stream(PROMPT, TURN)]
            assert [token for chunk in chunks for token in chunk.token_ids] == tokens
            return [chunk.weights.version for chunk in chunks for _ in chunk.token_ids]

        task = asyncio.create_task(versions())
        await waits.wait()
        assert server.requests[1].min_weight_version == 10
        serve(server, 5, 50)
        was_published(fleet, WeightTag(5, 1, "any", 50), rollback=True)
        assert await task == [10] * 2 + [5] * 4


async def test_tokens_that_nobody_has_read_when_a_sequence_goes_on_elsewhere_come_again(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come while the reader looks whether the weights that it waits for still will."""
    monkeypatch.setattr("rollwire_client._rpc.rollout_stream._WAKE_INTERVAL", 1e9)
    serve(server, 10, 100)
    server.scripts = [give_up_after_two]
    async with fleet_of(server) as fleet:
        was_published(fleet, WeightTag(10, 1, "any", 100))

        async def go_back(sequence: Sequence) -> None:
            await sequence.send(2)
            serve(server, 5, 50)
            was_published(fleet, WeightTag(5, 1, "any", 50), rollback=True)
            await asyncio.Event().wait()

        server.scripts.append(go_back)
        server.default = refuse_older
        chunks = [chunk async for chunk in fleet.stream(PROMPT, TURN)]
    assert [token for chunk in chunks for token in chunk.token_ids] == [
        expected_token(PROMPT, position) for position in range(6)
    ]
    assert [chunk.offset for chunk in chunks] == [0, 2]
    assert [len(request.output_token_ids) for request in server.requests] == [0, 2, 2]


async def test_a_bound_of_the_caller_stays_in_a_rollback(pair: list[ScriptedServer]) -> None:
    for server in pair:
        serve(server, 5, 50)
    async with fleet_of(*pair) as fleet:
        was_published(fleet, WeightTag(5, 1, "any", 50), rollback=True)
        await fleet.generate(PROMPT, TURN, min_weight_version=4)
    (request,) = pair[0].requests + pair[1].requests
    assert request.min_weight_version == 4


async def test_the_newest_weights_of_a_prefix_are_those_of_its_last_token(
    server: ScriptedServer,
) -> None:
    """An untagged update came after version 10."""
    serve(server, 10, 100)

    async def untagged(sequence: Sequence) -> None:
        await sequence.send(2)
        serve(server, None, 7)
        await sequence.send(2)
        await sequence.finish("INTERRUPTED")

    server.scripts = [untagged]
    async with fleet_of(server) as fleet:
        trajectory = await fleet.generate(PROMPT, TURN)
    assert not server.requests[1].HasField("min_weight_version")
    assert trajectory.versions == (10,) * 2 + (None,) * 4


async def test_a_conversation_goes_on_after_a_rollback(server: ScriptedServer) -> None:
    serve(server, 10, 100)
    server.default = refuse_older
    async with fleet_of(server) as fleet:
        was_published(fleet, WeightTag(10, 1, "any", 100))
        session = fleet.session(PROMPT)
        await session.generate(TURN)
        serve(server, 5, 50)
        was_published(fleet, WeightTag(5, 2, "any", 50), rollback=True)
        session.append([4])
        assert (await session.generate(TURN)).versions == (5,) * 6


async def test_a_server_that_was_too_new_takes_sequences_after_a_rollback(
    server: ScriptedServer,
) -> None:
    """It refuses the sequence before it is known to serve something newer."""
    serve(server, 5, 50)

    async def too_new(sequence: Sequence) -> None:
        serve(server, 10, 100)
        await sequence.fail(grpc.StatusCode.FAILED_PRECONDITION, "WEIGHTS_TOO_NEW")

    server.scripts = [too_new]
    async with fleet_of(server) as fleet:
        with pytest.raises(WeightVersionError, match="none will unless the policy is rolled back"):
            await fleet.generate(PROMPT, TURN, max_weight_version=7)
        await until(lambda: fleet._pool.servers[0].version == 10)
        serve(server, 5, 50)
        await until(lambda: fleet._pool.servers[0].version == 5)
        assert (await fleet.generate(PROMPT, TURN, max_weight_version=7)).complete


async def test_weights_without_a_version_are_told_as_such() -> None:
    async with publishing(2) as (servers, fleet, publisher):
        await publish(publisher, 5)
        serve(servers[1], None, 9)
        told = "serves weights without a version, not version 5, which was published last"
        await until(lambda: told in str(fleet._pool.servers[1].problem))
        for server in servers:
            server.refuse_update = ("STAGING_FAILED", {})
        with pytest.raises(
            PublishFailedError, match="an update without a version was not published"
        ) as caught:
            await publish(publisher, None, seed=2)
        assert "serves version 5" in str(caught.value)
        assert "serves weights without a version" in str(caught.value)
        assert "None" not in str(caught.value)

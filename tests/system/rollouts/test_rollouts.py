"""The trainer's library against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING

import pytest
import torch
from rollwire_client import (
    FinishReason,
    Fleet,
    InvalidRequestError,
    KvPolicy,
    Publisher,
    PublishTimeouts,
    RolloutClient,
    Sampling,
    ServerInfo,
    ServerState,
    ServerUnreachableError,
    StalePublisherError,
    Timeouts,
    Trajectory,
)
from support.synthetic import each_sampled, sampled, until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from rollwire_client import Chunk
    from support.servers import ServerProcess, StartServer

PROMPT = [3, 1, 4, 1, 5]
QUICK = Timeouts(call=5, silence=2, probe=2, close=2)
LONG = 600
ENDLESS = 4000  # tokens: ten seconds where nothing else runs


def sampling(seed: int, tokens: int = LONG) -> Sampling:
    return Sampling(max_new_tokens=tokens, seed=seed, ignore_eos=True)


def addresses(servers: list[ServerProcess]) -> list[str]:
    return [server.address for server in servers]


async def policy(publisher: Publisher, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randn(spec.shape, generator=generator).mul_(0.1)
        for spec in await publisher.schema()
        if spec.alias_of is None
    }


async def published(publisher: Publisher, seed: int) -> None:
    """All servers of the fleet serve the same weights, whatever was there before."""
    handle = await publisher.publish(
        None, await policy(publisher, seed), kv_policy=KvPolicy.RECOMPUTE
    )
    assert (await handle.committed).failed == ()


async def idle(client: RolloutClient) -> None:
    """Returns once the server has nothing under way and nothing in its cache."""
    async with asyncio.timeout(60):
        while True:
            info = await client.info()
            if not (info.running_sequences or info.waiting_sequences or info.kv_tokens_used):
                return
            await asyncio.sleep(0.01)


async def uninterrupted(server: ServerProcess, seeds: range) -> list[Trajectory]:
    async with RolloutClient(server.address) as client:
        return await asyncio.gather(*(client.generate(PROMPT, sampling(seed)) for seed in seeds))


def assert_equal(one: Trajectory, other: Trajectory) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_streams_and_whole_sequences_are_equal(both: list[ServerProcess]) -> None:
    async with RolloutClient(both[0].address) as client:
        whole = await client.generate(PROMPT, sampling(1, 40))
        chunks = [chunk async for chunk in client.stream(PROMPT, sampling(1, 40))]
        await idle(client)
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert len(whole.token_ids) == 40
    assert {type(lp) for lp in whole.logprobs} == {float}
    assert chunks[-1].finish == whole.finish
    assert whole.finish.reason is FinishReason.LENGTH
    assert {s.weights.server_id for s in whole.segments} == {both[0].server_id}


async def test_what_is_left_is_aborted_on_the_server(both: list[ServerProcess]) -> None:
    async with Fleet(addresses(both)) as fleet:
        stream = fleet.stream(PROMPT, sampling(1, 3000))
        async with contextlib.aclosing(stream):
            async for _ in stream:
                break
        task = asyncio.create_task(fleet.generate(PROMPT, sampling(2, 3000)))
        await sampled(fleet, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for member in fleet._pool.servers:
            await idle(member.client)


async def test_a_closed_fleet_leaves_nothing_behind(both: list[ServerProcess]) -> None:
    async with Fleet(addresses(both)) as fleet:
        tasks = [asyncio.create_task(fleet.generate(PROMPT, sampling(s, 3000))) for s in range(6)]
        await sampled(fleet, 20)
    for task in tasks:
        trajectory = await task
        assert trajectory.finish.reason is FinishReason.ABORTED
        assert trajectory.finish.output_tokens == len(trajectory.token_ids)
    for server in both:
        async with RolloutClient(server.address) as client:
            await idle(client)


async def test_pause_holds_and_resume_goes_on(both: list[ServerProcess]) -> None:
    timeouts = Timeouts(silence=0.4)
    async with RolloutClient(both[0].address, timeouts=timeouts) as client:
        before = (await client.info()).sampled_tokens
        stream = client.stream(PROMPT, sampling(5, ENDLESS))
        async with contextlib.aclosing(stream):
            chunks = [await anext(stream)]
            pause = await client.pause("mine")
            assert (pause.pause_id, pause.held_sequences) == ("mine", 1)
            info = await client.info()
            assert info.state is ServerState.PAUSED
            sampled_before = info.sampled_tokens - before
            await until(lambda: client.outstanding_tokens == ENDLESS - sampled_before)
            await asyncio.sleep(2.5 * timeouts.silence)  # no silence: the server answers
            assert client.outstanding_tokens == ENDLESS - sampled_before
            assert (await client.info()).sampled_tokens == info.sampled_tokens
            resumed = await client.resume("mine")
            assert (resumed.sequences, resumed.remaining_pauses) == (1, 0)
            tokens = chunks[0].token_ids
            while len(tokens) < sampled_before + 20:
                chunks.append(await anext(stream))
                tokens += chunks[-1].token_ids
        whole = await client.generate(PROMPT, sampling(5, len(tokens)))
    assert tokens == whole.token_ids
    logprobs = sum((chunk.logprobs for chunk in chunks), ())
    assert logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_abort_by_id(both: list[ServerProcess]) -> None:
    async with RolloutClient(both[0].address) as client:
        stream = client.stream(PROMPT, sampling(1, 3000), request_id="mine")
        await anext(stream)
        done = await client.abort(["mine", "nobody's"])
        assert (done.sequences, done.not_found) == (1, ("nobody's",))
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish.reason is FinishReason.ABORTED


async def test_refusals_name_what_is_wrong(both: list[ServerProcess]) -> None:
    async with Fleet(addresses(both)) as fleet:
        with pytest.raises(InvalidRequestError, match="99999"):
            await fleet.generate([1, 99999])
        with pytest.raises(InvalidRequestError) as caught:
            await fleet.generate([])
        assert caught.value.reason == "EMPTY_PROMPT"
        assert list(caught.value.violations) == ["prompt_token_ids"]
        with pytest.raises(InvalidRequestError, match="top_p") as caught:
            await fleet.generate(PROMPT, Sampling(top_p=7))
        assert list(caught.value.violations) == ["sampling.top_p"]


async def chunks_into(version: int, stream: AsyncGenerator[Chunk, None]) -> list[Chunk]:
    """Those up to the first that a version sampled."""
    chunks = []
    async with contextlib.aclosing(stream):
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.weights.version == version:
                return chunks
    raise AssertionError(f"it ended before version {version} came")


async def test_sequences_cross_a_publish(both: list[ServerProcess]) -> None:
    async with Fleet(addresses(both)) as fleet:
        publisher = Publisher(fleet)
        streams = [fleet.stream(PROMPT, sampling(seed, ENDLESS)) for seed in range(8)]
        tasks = [asyncio.create_task(chunks_into(11, stream)) for stream in streams]
        await each_sampled(fleet, 20)
        handle = await publisher.publish(11, await policy(publisher, 1), kv_policy=KvPolicy.KEEP)
        report = await handle.committed
        assert report.failed == ()
        assert {s.weights.digest for s in report.servers} == {report.digest}
        assert all(s.held_sequences == 4 for s in report.servers)
        for chunks in await asyncio.gather(*tasks):
            old, new = dict.fromkeys(chunk.weights for chunk in chunks)
            assert new.version == 11
            assert new in {s.weights for s in report.servers}
            assert chunks[-1].oldest_kv_revision == old.revision < new.revision
        # The same content again changes nothing.
        again = await (await publisher.publish(11, await policy(publisher, 1))).committed
        assert all(s.already_current for s in again.servers)


async def test_a_newer_trainer_takes_over(both: list[ServerProcess]) -> None:
    async with Fleet(addresses(both)) as fleet:
        old = Publisher(fleet)
        new = Publisher(fleet, id="the next trainer", term=old.term + 1)
        await published(old, 7)
        await published(new, 8)
        with pytest.raises(StalePublisherError, match="the next trainer"):
            await old.publish(None, await policy(old, 9))


@pytest.mark.slow
async def test_a_killed_server_costs_no_token(
    both: list[ServerProcess], start_server: StartServer
) -> None:
    victim, seeds = start_server(), range(8)
    async with Fleet(addresses([victim, both[1]])) as fleet:
        publisher = Publisher(fleet)
        await published(publisher, 2)
        wanted = await uninterrupted(both[1], seeds)
        tasks = [asyncio.create_task(fleet.generate(PROMPT, sampling(s))) for s in seeds]
        await each_sampled(fleet, 100)
        victim.kill()
        trajectories = await asyncio.gather(*tasks)
        for trajectory, want in zip(trajectories, wanted, strict=True):
            assert_equal(trajectory, want)
        assert sum(len(trajectory.servers) == 2 for trajectory in trajectories) == 4
        infos = await fleet.info()
        assert isinstance(infos[victim.address], ServerUnreachableError)
        # A publish goes on with the other one.
        report = await (await publisher.publish(None, await policy(publisher, 3))).committed
        assert [s.weights is None for s in report.servers] == [True, False]


@pytest.mark.slow
async def test_a_drained_server_s_sequences_go_on_elsewhere(
    both: list[ServerProcess], start_server: StartServer
) -> None:
    victim, seeds = start_server("--drain-seconds", "0"), range(4)
    async with Fleet(addresses([victim, both[1]])) as fleet:
        await published(Publisher(fleet), 2)
        wanted = await uninterrupted(both[1], seeds)
        tasks = [asyncio.create_task(fleet.generate(PROMPT, sampling(s))) for s in seeds]
        await sampled(fleet, 200)
        victim.process.send_signal(signal.SIGTERM)
        for task, want in zip(tasks, wanted, strict=True):
            assert_equal(await task, want)
    assert victim.stop() == 0


@pytest.mark.slow
async def test_a_frozen_server_delays_a_publish_and_loses_its_sequences(
    both: list[ServerProcess],
) -> None:
    seeds = range(4)
    async with Fleet(addresses(both), timeouts=QUICK, probe_interval=0.2) as fleet:
        publisher = Publisher(fleet, timeouts=PublishTimeouts(silence=3, discard=1))
        await published(publisher, 4)
        wanted = await uninterrupted(both[1], seeds)
        tasks = [asyncio.create_task(fleet.generate(PROMPT, sampling(s))) for s in seeds]
        await sampled(fleet, 200)
        both[0].process.send_signal(signal.SIGSTOP)
        try:
            for task, want in zip(tasks, wanted, strict=True):
                assert_equal(await task, want)
            report = await (await publisher.publish(None, await policy(publisher, 5))).committed
        finally:
            both[0].process.send_signal(signal.SIGCONT)
        assert [s.weights is None for s in report.servers] == [True, False]
        assert isinstance(report.servers[0].error, ServerUnreachableError)
        # Back again, it is behind and gets nothing, until the next publish brings it up.
        frozen = fleet._pool.servers[0]
        await until(lambda: "the next publish or catch_up() updates it" in str(frozen.problem))
        assert (await fleet.generate(PROMPT, sampling(1, 4))).servers == (both[1].address,)
        await published(publisher, 6)
        await until(lambda: frozen.problem is None)
        infos = [i for i in (await fleet.info()).values() if isinstance(i, ServerInfo)]
        assert len({info.weights.digest for info in infos}) == 1
        assert len(infos) == 2

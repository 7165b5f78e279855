"""A server that died and came back empty is caught up while the other goes on sampling."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from rollwire_client import Fleet, Publisher, RolloutClient, Sampling, ServerInfo, ServerState
from rollwire_server import builtin_model
from support.calls import connected, until
from support.fleets import policy
from support.publishing import status

if TYPE_CHECKING:
    from rollwire_client import Chunk
    from support.servers import StartServer

LONG = Sampling(max_new_tokens=4000, seed=1, ignore_eos=True)


async def test_a_restarted_server_is_caught_up_and_the_other_is_not_disturbed(
    start_server: StartServer,
) -> None:
    # So slow that the sequence outlasts everything else, on any machine.
    slow = ("--engine", "synthetic", "--model", "none", "--engine-arg", "tokens-per-second=20")
    steady, victim = start_server(*slow), start_server(*slow)
    async with Fleet([steady.address, victim.address], probe_interval=0.2) as fleet:
        publisher = Publisher(fleet)
        tensors = await policy(publisher, 3)
        published = await (await publisher.publish(7, tensors)).committed
        assert published.failed == ()
        assert (await publisher.catch_up(tensors)).servers == ()

        victim.kill()
        start_server(*slow, "--listen", victim.address, "--await-weights")

        async def state() -> ServerState | None:
            info = (await fleet.info())[victim.address]
            return info.state if isinstance(info, ServerInfo) else None

        async def awaits() -> bool:
            return await state() is ServerState.AWAITING_WEIGHTS

        await until(awaits)
        async with RolloutClient(steady.address) as client, connected(steady.address) as api:
            before = await status(api)
            stream = client.stream([1, 2, 3], LONG)
            chunks: list[Chunk] = [await anext(stream)]
            report = await publisher.catch_up(tensors)
            chunks += [await anext(stream) for _ in range(2)]  # it goes on
            await stream.aclose()
            after = await status(api)
        assert [told.address for told in report.servers] == [victim.address]
        assert report.failed == ()
        assert (report.version, report.digest) == (7, published.digest)
        assert report.servers[0].weights is not None
        assert report.servers[0].weights.digest == published.digest
        # The other was neither announced to, nor has it committed or held anything.
        assert {chunk.weights for chunk in chunks} == {published.servers[0].weights}
        assert after.committed_update_id == before.committed_update_id == published.update_id
        assert after.history == before.history

        # The one that came back serves again, equal to the other.
        assert await state() is ServerState.SERVING
        await until(lambda: asyncio.sleep(0, not any(m.problem for m in fleet._pool.servers)))
        assert (await publisher.catch_up(tensors)).servers == ()


@pytest.mark.slow
async def test_a_server_whose_checkpoint_is_the_policy_is_named_after_it(
    start_server: StartServer,
) -> None:
    """As when a trainer publishes what it has loaded: the bytes are equal, the version is not."""
    steady, victim = start_server(), start_server()
    tensors = builtin_model("builtin:tiny").state_dict()
    async with Fleet([steady.address, victim.address], probe_interval=0.2) as fleet:
        publisher = Publisher(fleet)
        await (await publisher.publish(5, tensors)).committed
        victim.kill()
        start_server("--listen", victim.address)

        async def is_up() -> bool:
            info = (await fleet.info())[victim.address]
            return isinstance(info, ServerInfo) and info.state is ServerState.SERVING

        await until(is_up)
        report = await publisher.catch_up(tensors)
        assert [told.address for told in report.servers] == [victim.address]
        info = (await fleet.info())[victim.address]
        assert isinstance(info, ServerInfo)
        assert info.weights.version == 5

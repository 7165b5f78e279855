"""What clients and networks do to a server, and that it is as before afterwards."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import pytest
from rollwire.v1 import rollout_pb2
from support.calls import Api, Generation, Output, Stream, connected, generate, request
from support.footprint import Footprint, level
from support.servers import ServerProcess, resident_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LONG = 3000


@asynccontextmanager
async def as_before(server: ServerProcess, *, grown: int = 192) -> AsyncIterator[None]:
    """No threads or files are left, and no memory beyond the KV cache's first use (MiB)."""
    pid = server.process.pid
    before, memory = Footprint.of(pid), resident_bytes(pid)
    yield
    await level(server, before)
    assert resident_bytes(pid) <= memory + (grown << 20)


@pytest.mark.slow
async def test_200_streams_cut_at_random_times_and_picked_up(
    api: Api, server: ServerProcess
) -> None:
    count, length, draw = 200, 40, random.Random(0)
    undisturbed = Stream(api)
    for i in range(count):
        await undisturbed.start(i, request((1 + i, 7), length, seed=i))
    expected = await undisturbed.all()

    async def cut_and_pick_up(i: int, cuts: list[int]) -> Output:
        name, whole = uuid.uuid4().hex, Output()
        for cut in [*cuts, length + 1]:
            message = request(
                (1 + i, 7), length, seed=i, request_id=name, grace=30, prefix=whole.tokens
            )
            generation = Generation(api, message)
            await generation.some(max(1, cut - len(whole.tokens)))
            whole.tokens += generation.output.tokens
            whole.finish = generation.output.finish
            if whole.finish is not None:
                break
            generation.call.cancel()
        return whole

    async with as_before(server):
        cuts = [sorted(draw.sample(range(1, length), draw.randint(0, 4))) for _ in range(count)]
        outputs = await asyncio.gather(*(cut_and_pick_up(i, cuts[i]) for i in range(count)))
        for i, output in enumerate(outputs):
            assert output.tokens == expected[i].tokens, f"sequence {i}, cut at {cuts[i]}"
            assert output.reason == "LENGTH"
        await api.idle()


@pytest.mark.slow
async def test_a_client_that_never_reads(api: Api, server: ServerProcess) -> None:
    """What is pending for it is put together: fewer, larger messages, and nothing is lost."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    length = 1000
    async with as_before(server):
        async with grpc.aio.insecure_channel(server.address, options=narrow) as channel:
            deaf = Stream(Api(channel))
            for handle in range(8):
                await deaf.start(handle, request((handle + 1,), length, seed=handle))
            await api.until(lambda info: info.running_sequences == 8)
            await api.until(lambda info: info.running_sequences == 0, seconds=60)
            outputs = await deaf.all()
        assert all(len(output.tokens) == length for output in outputs.values())
        assert deaf.messages < length / 2
        assert deaf.largest <= 1 << 20


CLIENT = """
import asyncio, sys
from support.calls import Stream, connected, request
async def main():
    async with connected(sys.argv[1]) as api:
        stream = Stream(api)
        for handle in range(20):
            await stream.start(handle, request((handle + 1,), 3000))
        await stream.read()
        print("reading", flush=True)
        while await stream.read():
            pass
asyncio.run(main())
"""


async def test_clients_that_are_killed(api: Api, server: ServerProcess) -> None:
    async with as_before(server):
        for _ in range(2):
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            client = await asyncio.create_subprocess_exec(
                sys.executable, "-c", CLIENT, server.address,
                stdout=subprocess.PIPE, env=environment,
            )  # fmt: skip
            assert client.stdout is not None
            async with asyncio.timeout(60):
                assert await client.stdout.readline() == b"reading\n"
                client.kill()
                await client.wait()
            await api.idle()


async def test_10_000_aborts_of_whatever(api: Api, server: ServerProcess) -> None:
    """Unknown, finished, waiting, held and running ids, many times over."""
    draw = random.Random(1)
    async with as_before(server):
        finished = uuid.uuid4().hex
        await generate(api, request((1,), 2, request_id=finished))
        ids = [uuid.uuid4().hex for _ in range(100)]  # more than run at once: some wait
        stream = Stream(api)
        for handle, request_id in enumerate(ids):
            await stream.start(handle, request((1,), LONG, request_id=request_id))
        await api.until(lambda info: info.running_sequences + info.waiting_sequences == len(ids))
        aborted = 0
        for turn in range(100):
            if turn == 30:
                await api.pause("p")
            if turn == 60:
                await api.resume("p")
            chosen = draw.sample(ids, 2)
            unknown = [uuid.uuid4().hex for _ in range(97)]
            count, not_found = await api.abort(*chosen, *unknown, finished)
            aborted += count
            assert count + len(not_found) == 100
            assert {*unknown, finished} <= set(not_found)
        aborted += (await api.abort(*ids))[0]
        assert aborted == len(ids)
        outputs = await stream.all()
        assert {output.reason for output in outputs.values()} == {"ABORTED"}
        await api.idle()


async def test_1000_sequences_over_one_stream(api: Api, server: ServerProcess) -> None:
    count, length = 1000, 8
    async with as_before(server):
        stream = Stream(api)
        for handle in range(count):
            await stream.start(handle, request((handle % 500, 3), length, seed=handle))
        outputs = await stream.all()
        assert sum(len(output.tokens) for output in outputs.values()) == count * length
        assert {output.reason for output in outputs.values()} == {"LENGTH"}
        await api.idle()


@pytest.mark.slow
async def test_1000_generate_streams(api: Api, server: ServerProcess) -> None:
    count, length = 1000, 8
    async with as_before(server):
        outputs = await asyncio.gather(
            *(generate(api, request((i % 500, 3), length, seed=i)) for i in range(count))
        )
        assert [len(output.tokens) for output in outputs] == [length] * count
        await api.idle()


async def test_memory_stays_level(api: Api, server: ServerProcess) -> None:
    used = []
    for _ in range(6):
        stream = Stream(api)
        for handle in range(300):
            await stream.start(handle, request((1,), 4, seed=handle, grace=0.05))
        await stream.all()
        await api.idle()
        used.append(resident_bytes(server.process.pid) >> 20)
    assert used[-1] <= used[2] + 4


async def test_raw_bytes_are_refused_and_the_server_serves_on(
    api: Api, server: ServerProcess
) -> None:
    draw = random.Random(2)
    async with grpc.aio.insecure_channel(server.address) as channel:
        for method in ("Generate", "Abort", "Pause", "GetServerInfo"):
            call = channel.unary_stream(f"/rollwire.v1.RolloutService/{method}")
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError):
                    async for _ in call(b"\xff" + draw.randbytes(40), timeout=60):
                        pass
    async with connected(server.address) as again:
        assert (await generate(again, request((1,), 2))).reason == "LENGTH"
        await again.rollouts.Resume(rollout_pb2.ResumeRequest(), timeout=60)

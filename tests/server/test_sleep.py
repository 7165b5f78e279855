"""Sleep in its three forms: memory that is really given back, and a policy that is there again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from rollwire.v1 import common_pb2, rollout_pb2
from support.calls import Generation, Stream, connected, generate, reason_of, request
from support.checkpoints import dense
from support.publishing import Update, random_weights, status
from support.servers import StartServer, resident_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from support.calls import Api

LONG = 4000


@pytest.mark.parametrize("kept", ["KEEP", "HOST_BACKUP"])
async def test_sleep_frees_memory_and_waking_brings_the_policy_back(
    start_server: StartServer, kept: str
) -> None:
    async with connected(start_server().address) as api:
        await Update(api, await random_weights(api, 1), 3).publish()
        before = await generate(api, request((4, 5), 30, seed=1))
        running = Generation(api, request((1,), LONG))
        await running.some(2)
        assert await sleep(api, kept) > 0
        assert (await running.all()).reason == "INTERRUPTED"
        assert (await api.info()).state == common_pb2.SERVER_STATE_SLEEPING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(api, request())
        assert reason_of(caught.value) == "SLEEPING"
        woken = await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
        assert woken.weights.version == 3
        after = await generate(api, request((4, 5), 30, seed=1))
        assert after.tokens == before.tokens
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)
        assert (await status(api, verify=True)).intact


async def test_discarded_weights_are_gone(start_server: StartServer) -> None:
    async with connected(start_server().address) as api:
        base = await generate(api, request((4, 5), 30, seed=1))
        tensors = await random_weights(api, 1)
        await Update(api, tensors, 3).publish()
        await sleep(api, "DISCARD")
        await api.rollouts.WakeUp(rollout_pb2.WakeUpRequest(), timeout=60)
        assert (await api.info()).state == common_pb2.SERVER_STATE_AWAITING_WEIGHTS
        answer = await Update(api, tensors, 3).publish()
        assert not answer.already_current
        assert (await status(api, verify=True)).intact
        await sleep(api, "DISCARD")
        reload = rollout_pb2.WakeUpRequest(reload_checkpoint=True)
        woken = await api.rollouts.WakeUp(reload, timeout=60)
        assert not woken.weights.HasField("version")
        assert woken.weights.revision == answer.weights.revision + 1
        again = await generate(api, request((4, 5), 30, seed=1))
        assert again.tokens == base.tokens
        assert {tag.SerializeToString() for tag in again.tags} == {
            woken.weights.SerializeToString()
        }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["KEEP", "HOST_BACKUP", "DISCARD"])
async def test_the_memory_goes_back_to_the_system(
    start_server: StartServer, tmp_path: Path, how: str
) -> None:
    slots, context, layers, head_dim = 16, 4096, 2, 128
    cache = slots * context * layers * 2 * head_dim * 4
    weights = 2 * 32768 * 256 * 4  # what counts of them: both embeddings
    model = dense(tmp_path / "model", vocab_size=32768, hidden_size=256)
    flags = ("--max-running", str(slots), "--context-length", str(context))
    server = start_server("--model", str(model), *flags)
    async with connected(server.address) as api:
        before = await generate(api, request((4, 5), 30, seed=1))
        await fill(api, slots, context - 1)
        awake = resident_bytes(server.process.pid)
        freed = await sleep(api, how)
        # On a CPU the weights are in host memory already, where HOST_BACKUP keeps them.
        assert freed >= cache + (weights if how == "DISCARD" else 0)
        assert awake - resident_bytes(server.process.pid) >= 0.9 * freed
        wake = rollout_pb2.WakeUpRequest(reload_checkpoint=how == "DISCARD")
        await api.rollouts.WakeUp(wake, timeout=30)
        after = await generate(api, request((4, 5), 30, seed=1))
        assert after.tokens == before.tokens
        assert after.logprobs == pytest.approx(before.logprobs, abs=1e-5)


async def fill(api: Api, slots: int, tokens: int) -> None:
    """Writes every slot of the cache, one prompt in all of them."""
    stream = Stream(api)
    for handle in range(slots):
        await stream.start(handle, request([7] * tokens, 1))
    await stream.all()


async def sleep(api: Api, how: str) -> int:
    weights = rollout_pb2.SleepingWeights.Value(f"SLEEPING_WEIGHTS_{how}")
    answer = await api.rollouts.Sleep(rollout_pb2.SleepRequest(weights=weights), timeout=30)
    return answer.freed_bytes

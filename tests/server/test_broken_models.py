"""Weights and steps that fail: one sequence ends, the others go on, and the server serves on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch
from rollwire.v1 import common_pb2
from rollwire_server.engines.embedded.runner import MAX_FAILED_STEPS
from safetensors.torch import load_file, save_file
from support.calls import Generation, connected, generate, reason_of, request
from support.checkpoints import dense
from support.publishing import Update
from support.servers import memory_limit

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import ServerProcess, StartServer

POISON = 77


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A checkpoint that gives NaN after token POISON, and is sound otherwise."""
    folder = dense(tmp_path / "poisoned")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def test_nan_ends_its_sequence_and_no_other(
    start_server: StartServer, poisoned: Path
) -> None:
    async with connected(start_server("--model", str(poisoned)).address) as api:
        sound = Generation(api, request((1, 2, 3), 600, temperature=0))
        await sound.some(3)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(api, request((1, POISON), 10))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert reason_of(caught.value) == "NOT_FINITE"
        output = await sound.all()
        assert output.reason in ("LENGTH", "STOP")
        again = await generate(api, request((1, 2, 3), 20, temperature=0))
        assert again.tokens == output.tokens[:20]
        await api.idle()
        tensors = load_file(poisoned / "model.safetensors")
        tensors["model.embed_tokens.weight"][POISON] = 0.1
        await Update(api, tensors, 1).publish()
        assert (await generate(api, request((1, POISON), 10))).reason == "LENGTH"


async def test_a_policy_that_is_all_nan_is_told_for_each_sequence(
    start_server: StartServer, poisoned: Path
) -> None:
    async with connected(start_server("--model", str(poisoned)).address) as api:
        tensors = load_file(poisoned / "model.safetensors")
        change = Update(api, {n: torch.full_like(t, torch.nan) for n, t in tensors.items()}, 1)
        await change.stage()
        under_way = Generation(api, request((1, 2, 3), 900, temperature=0))  # never POISON
        await under_way.some(3)
        await change.commit()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await under_way.all()
        assert reason_of(caught.value) == "NOT_FINITE"
        assert (await api.info()).state == common_pb2.SERVER_STATE_SERVING
        sound = {**tensors, "model.embed_tokens.weight": torch.rand(512, 64)}
        await Update(api, sound, 2).publish()
        assert (await generate(api, request((1, 2), 10))).reason == "LENGTH"
        await api.idle()


@pytest.mark.slow
async def test_a_sequence_whose_step_raises_ends_alone(
    start_server: StartServer, tmp_path: Path
) -> None:
    """The system refuses its memory, however often it comes: the others and the server go on."""
    model = dense(tmp_path / "wide", vocab_size=32768)
    server = start_server("--model", str(model))
    server.breaks = True
    greedy = {"temperature": 0, "ignore_eos": True}
    async with connected(server.address) as api:
        whole = await generate(api, request((1, 2, 3), 300, **greedy))
        under_way = Generation(api, request((1, 2, 3), 300, **greedy))
        await under_way.some(10)
        with memory_limit(server.process.pid, spare=64 << 20):
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    # The logits of its prompt take 256 MiB.
                    await generate(api, request(range(2048), 5, prompt_logprobs=True))
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert reason_of(caught.value) == "STEP_FAILED"
                assert "RuntimeError: " in (caught.value.details() or "")
                assert (await api.info()).state == common_pb2.SERVER_STATE_SERVING
            output = await under_way.all()
        assert output.tokens == whole.tokens
        await api.idle()
        wide = await generate(api, request(range(2048), 5, prompt_logprobs=True))
        assert len(wide.prompt_logprobs) == 2047
    told, *_ = _events(server, "a step failed: a sequence that fails alone ends, the others go on")
    assert "Traceback" in told["exception"]
    assert told["level"] == "error"


@pytest.mark.slow
async def test_a_server_whose_every_step_fails_ends(
    start_server: StartServer, tmp_path: Path
) -> None:
    """So that its orchestrator starts another."""
    # The logits of one step's rows take 64 MiB.
    server = start_server(
        "--model", str(dense(tmp_path / "wide", vocab_size=1 << 20, hidden_size=16))
    )
    server.breaks = True
    with memory_limit(server.process.pid, spare=32 << 20):
        async with connected(server.address) as api:
            for _ in range(MAX_FAILED_STEPS):
                broken = await generate(api, request((1, 2, 3), 5))
                assert (broken.reason, broken.tokens) == ("INTERRUPTED", [])
            assert broken.finish is not None
            assert "the engine died: 16 steps failed in a row" in broken.finish.message
        assert server.ended() == 1
    (died,) = _events(server, "the engine died")
    assert "16 steps failed in a row, the last with" in died["error"]
    last = server.log.read_text().splitlines()[-1]
    assert last.startswith("rollwire-server: 16 steps failed in a row")


def _events(server: ServerProcess, event: str) -> list[dict[str, Any]]:
    lines = [line for line in server.log.read_text().splitlines() if line.startswith("{")]
    return [told for line in lines if (told := json.loads(line))["event"] == event]

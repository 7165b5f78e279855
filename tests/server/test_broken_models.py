"""Weights and steps that fail: one sequence ends, or all go on elsewhere; the server serves on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
import torch
from rollwire.v1 import common_pb2
from safetensors.torch import load_file, save_file
from support.calls import Generation, connected, generate, reason_of, request
from support.publishing import Update
from transformers import Qwen2Config, Qwen2ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import StartServer

POISON = 77


@pytest.fixture
def poisoned(tmp_path: Path) -> Path:
    """A checkpoint that gives NaN after token POISON, and is sound otherwise."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder = tmp_path / "poisoned"
    Qwen2ForCausalLM(config).save_pretrained(folder)
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
        under_way = Generation(api, request((1, 2, 3), 900))
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

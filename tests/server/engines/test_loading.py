from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from rollwire_server.engines.embedded.checkpoint import build
from support import reference
from support.engines import Recorder, prompts, running, spec
from transformers import AutoConfig, AutoModelForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 5,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 8},  # four heads share keys
    "mistral": {"sliding_window": 24},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 8, "sliding_window": 16},
    "phi3": {},
    "olmo2": {},
    "starcoder2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "gpt_neox": {},
}


def make(kind: str, path: Path, **more: Any) -> Any:
    shape = SMALL if kind != "gpt2" else {"vocab_size": 512, "eos_token_id": 5}
    config = AutoConfig.for_model(kind, **{**shape, **KINDS.get(kind, {}), **more})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():  # biases too, which start as zeros
            parameter.data += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize("kind", KINDS)
async def test_kinds_of_models(kind: str, tmp_path: Path) -> None:
    model = make(kind, tmp_path)
    config = EmbeddedConfig(str(tmp_path), device="cpu", max_running_sequences=3, prefill_tokens=40)
    async with running(EmbeddedEngine(config)) as driver:
        info = driver.engine.describe()
        assert info.eos_token_ids == (5,)
        assert info.context_length == 256
        assert info.vocab_size == 512
        assert info.deterministic
        asked = [spec(p, 30, seed=i) for i, p in enumerate(prompts(1, 30, 90, 150))]
        for one, got in zip(asked, await driver.sample(*asked), strict=True):
            expected = reference.logprobs(model, one.prompt, got.token_ids)
            torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-5, rtol=0)


async def refusal(**config: Any) -> str:
    engine = EmbeddedEngine(EmbeddedConfig(**{"device": "cpu", **config}))
    with pytest.raises(EngineError) as caught:
        await engine.start("server", Recorder())
    await engine.stop()
    message = str(caught.value)
    assert "\n" not in message
    return message


async def test_what_cannot_be_served_is_refused_with_one_line(tmp_path: Path) -> None:
    assert "no such directory" in await refusal(model=str(tmp_path / "nowhere"))
    assert "no such directory" in await refusal(model="Qwen/Qwen2-0.5B")
    assert "no config.json" in await refusal(model=str(tmp_path))
    assert "builtin:tiny-moe" in await refusal(model="builtin:huge")

    def holds(config: dict[str, Any] | str) -> str:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "config.json").write_text(text)
        return str(tmp_path)

    for config in (
        "{",
        {"model_type": "unheard-of"},
        {"model_type": "t5"},
        {"model_type": "llama"},
    ):
        assert "cannot load the model" in await refusal(model=holds(config))
    for wrong in ("float7", "int8", "nn"):
        assert "dtype" in await refusal(model="builtin:tiny", dtype=wrong)
    for wrong in ("cuda:93", "quantum"):
        assert "cannot be used" in await refusal(model="builtin:tiny", device=wrong)
    assert "4096" in await refusal(model="builtin:tiny", context_length=5000)
    many = await refusal(model="builtin:tiny", max_running_sequences=10**7)
    assert "lower --max-running" in many
    many = await refusal(model="builtin:tiny", max_running_sequences=10**7, context_length=4000)
    assert "does not fit" in many


async def test_a_checkpoint_that_lacks_tensors_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = await refusal(model=str(tmp_path))
    assert "lacks 1 of the model's tensors: model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("gemma2", {"head_dim": 8}, "softcap"),
        ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "s_aux"),
        ("bloom", {"n_layer": 2, "n_head": 4}, "attention of its own"),
        ("mamba", {}, "cannot be served"),
    ],
)
async def test_kinds_of_attention_that_are_not_computed_are_refused(
    kind: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    make(kind, tmp_path, **more)
    message = await refusal(model=str(tmp_path))
    assert "ForCausalLM cannot be served" in message or "LMHeadModel cannot be served" in message
    assert why in message


def test_built_in_models_are_always_the_same() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build("builtin:tiny").state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = build("builtin:tiny").state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.02)


async def test_the_context_is_what_was_asked_for() -> None:
    config = EmbeddedConfig(
        "builtin:tiny", device="cpu", context_length=100, max_running_sequences=2
    )
    async with running(EmbeddedEngine(config)) as driver:
        assert driver.engine.describe().context_length == 100
        (got,) = await driver.sample(spec(prompts(90)[0], 50, seed=1))
        assert len(got.token_ids) == 10
        assert driver.engine.load().kv_tokens_total == 200

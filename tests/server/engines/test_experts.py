from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from rollwire_server.engines.embedded import EmbeddedConfig, EmbeddedEngine
from support import reference
from support.engines import prompts, running, spec
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen2MoeConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from rollwire_server.engines.base import RoutedExperts
    from support.engines import Driver, Sampled
    from transformers import PreTrainedModel


@pytest.fixture
async def moe() -> AsyncIterator[Driver]:
    config = EmbeddedConfig(
        "builtin:tiny-moe", device="cpu", max_running_sequences=4, prefill_tokens=48
    )
    async with running(EmbeddedEngine(config)) as started:
        yield started


def routing(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    return reference.routing(model, tokens).numpy()


def told(sampled: Sampled) -> list[tuple[RoutedExperts, int]]:
    return [(part, r) for extras, r in sampled.extras for part in extras.routed_experts]


def rows(part: RoutedExperts) -> np.ndarray:
    dtype = {1: np.uint8, 2: np.dtype("<u2")}[part.bytes_per_expert]
    shape = (part.num_tokens, part.num_layers, part.top_k)
    return np.frombuffer(part.experts, dtype).reshape(shape)


async def test_every_input_token_comes_with_its_experts(
    moe: Driver, tiny_moe: PreTrainedModel
) -> None:
    (shared,) = prompts(60, seed=9)
    asked = [
        spec(prompt, 12, seed=i, routed_experts=True)
        for i, prompt in enumerate([*prompts(1, 5, 100), shared, shared, [*shared, 7, 8]])
    ]
    for one, got in zip(asked, await moe.sample(*asked), strict=True):
        parts = [part for part, _ in told(got)]
        starts = np.cumsum([0, *(p.num_tokens for p in parts)]).tolist()
        assert [p.start_position for p in parts] == starts[:-1]
        tokens = [*one.prompt, *got.token_ids[:-1]]
        expected = routing(tiny_moe, tokens)
        assert np.array_equal(np.concatenate([rows(p) for p in parts]), expected)
    assert moe.engine.describe().routed_experts


async def test_recomputed_rows_are_told_again_under_the_new_weights(
    moe: Driver, tiny_moe: PreTrainedModel
) -> None:
    own = tiny_moe.state_dict()
    generator = torch.Generator().manual_seed(0)
    names = [s.name for s in moe.engine.schema()]
    gates = {
        n: torch.randn(own[n].shape, generator=generator)
        for n in names
        if n.endswith("gate.weight")
    }
    assert len(gates) == 2
    new = reference.with_tensors(tiny_moe, gates)
    (prompt,) = prompts(70)
    (got,) = moe.submit(spec(prompt, 30, seed=1, routed_experts=True))
    await moe.tokens(5, got)
    await moe.commit(gates, max_kv_lag=0)
    await moe.ended(got)
    tokens = [*prompt, *got.token_ids[:-1]]
    for revision, model in ((0, tiny_moe), (1, new)):
        parts = [part for part, r in told(got) if r == revision]
        assert parts[0].start_position == 0
        together = np.concatenate([rows(p) for p in parts])
        assert np.array_equal(together, routing(model, tokens)[: len(together)])
    assert len(together) == len(tokens)


async def test_a_dense_model_tells_none(driver: Driver) -> None:
    assert not driver.engine.describe().routed_experts
    (got,) = await driver.sample(spec(prompts(5)[0], routed_experts=True))
    assert told(got) == []


async def test_the_schema_names_experts_as_checkpoints_do(
    moe: Driver, tiny_moe: PreTrainedModel, tmp_path: Path
) -> None:
    from safetensors import safe_open

    tiny_moe.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - a file, no dict
    assert {s.name: s.shape for s in moe.engine.schema()} == saved
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in saved


async def test_an_update_by_checkpoint_names_reaches_the_experts(
    moe: Driver, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    names = {s.name: s.shape for s in moe.engine.schema() if "experts" in s.name}
    tensors = {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in names.items()}
    await moe.commit(tensors)
    (prompt,) = prompts(30)
    (got,) = await moe.sample(spec(prompt, 20, temperature=0.0))

    from rollwire_server.engines.embedded.checkpoint import build
    from safetensors.torch import load_file, save_file

    build("builtin:tiny-moe").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert got.token_ids == reference.greedy(model, prompt, 20)


SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe"])
async def test_other_mixtures(kind: str, tmp_path: Path) -> None:
    if kind == "mixtral":
        model = MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=4))
    else:
        config = Qwen2MoeConfig(
            **SMALL, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=6
        )
        model = AutoModelForCausalLM.from_config(config)
    model.eval().save_pretrained(tmp_path)
    config = EmbeddedConfig(str(tmp_path), device="cpu", max_running_sequences=3, prefill_tokens=20)
    async with running(EmbeddedEngine(config)) as driver:
        info = driver.engine.describe()
        assert (info.deterministic, info.routed_experts) == (True, True)
        for prompt, got in zip(
            prompts(40, 3, 17),
            await driver.sample(*(spec(p, routed_experts=True) for p in prompts(40, 3, 17))),
            strict=True,
        ):
            expected = reference.logprobs(model, prompt, got.token_ids)
            torch.testing.assert_close(torch.tensor(got.logprobs), expected, atol=1e-5, rtol=0)
            together = np.concatenate([rows(p) for p, _ in told(got)])
            assert np.array_equal(together, routing(model, [*prompt, *got.token_ids[:-1]]))

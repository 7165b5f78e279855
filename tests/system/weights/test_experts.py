"""A trainer's mixture of experts, as transformers has it in memory, is what servers sample from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from rollwire_client import DtypeCast, Sampling
from support import reference
from support.fleets import open_fleet, publisher

if TYPE_CHECKING:
    from pathlib import Path

    from support.servers import StartServer
    from torch import Tensor
    from transformers import PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PROMPT = list(range(7, 40, 3))


def model(kind: str, seed: int) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    more = {"num_local_experts": 4} if kind == "mixtral" else {
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 6,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **SMALL, **more)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def addresses(start_server: StartServer, tmp_path: Path, kind: str) -> list[str]:
    """Two servers of a model's checkpoint."""
    model(kind, 0).save_pretrained(tmp_path / "checkpoint")
    flags = ("--model", str(tmp_path / "checkpoint"), "--dtype", "float32")
    return [start_server(*flags).address for _ in range(2)]


@pytest.mark.parametrize("kind", ["mixtral", pytest.param("qwen2_moe", marks=pytest.mark.slow)])
async def test_servers_sample_what_the_published_model_does(
    addresses: list[str], kind: str
) -> None:
    async with open_fleet(addresses) as fleet:
        trainer = publisher(fleet)
        schema = {spec.name: spec for spec in await trainer.schema()}
        for version in (1, 2, 3):
            trained = model(kind, version)
            tensors: Any = trained.state_dict()
            assert tensors.keys() != schema.keys()
            if version == 2:
                trained = trained.double()
                tensors = trained.named_parameters
            elif version == 3:
                tensors = checkpoint_of(trained)
                assert tensors.keys() == schema.keys()
            report = await trainer.publish_and_wait(version, tensors)
            double = (DtypeCast("float64", "float32", len(schema)),)
            assert report.casts == (double if version == 2 else ())
            expected = reference.greedy(trained.float(), PROMPT, 20)
            for address in addresses:
                async with open_fleet([address]) as one:
                    got = await one.generate(PROMPT, Sampling(max_new_tokens=20, temperature=0.0))
                assert got.token_ids == tuple(expected)
                assert got.segments[0].weights.version == version


def checkpoint_of(trained: PreTrainedModel) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(trained, trained.state_dict())

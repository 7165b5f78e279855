"""What a publish says of names that the servers do not know: advice that works."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch
from client.publishing import publish, publishing
from rollwire_client import SchemaMismatchError
from rollwire_client._publishing.names import ServerNames
from rollwire_client._publishing.schema import match_schema
from rollwire_client._publishing.tensors import ChangeDetector
from rollwire_transport import TensorSpec, describe_all

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


def layer(number: int) -> dict[str, Tensor]:
    name = f"model.layers.{number}."
    return {
        f"{name}self_attn.q_proj.weight": torch.zeros(8, 8),
        f"{name}self_attn.k_proj.weight": torch.zeros(4, 8),
        f"{name}self_attn.v_proj.weight": torch.zeros(4, 8),
        f"{name}input_layernorm.weight": torch.zeros(8),
    }


DENSE = {
    "model.embed_tokens.weight": torch.zeros(16, 8),
    **layer(0),
    **layer(1),
    "model.norm.weight": torch.zeros(8),
}
EXPERTS = {
    f"model.layers.0.mlp.experts.{i}.{name}.weight": torch.zeros(*shape)
    for i in range(4)
    for name, shape in (("gate_proj", (6, 8)), ("up_proj", (6, 8)), ("down_proj", (8, 6)))
}
PACKED = {
    "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 12, 8),
    "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8, 6),
}


def told(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], **options: bool) -> str:
    """What is wrong with ``tensors``, of servers that want ``wanted``."""
    with pytest.raises(SchemaMismatchError) as caught:
        match_schema(
            tensors,
            ServerNames(describe_all(wanted)),
            partial=options.get("partial", False),
            detector=ChangeDetector(),
        )
    return str(caught.value).partition("nothing was sent: ")[2]


def renamed(rename: Callable[[str], str]) -> dict[str, Tensor]:
    return {rename(name): tensor for name, tensor in DENSE.items()}


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("rename", "advice"),
    [
        (lambda name: f"policy.{name}", "remove `policy.` from the name"),
        (lambda name: name.removeprefix("model."), "put `model.` before the name"),
        (
            lambda name: name.replace("model.", "model.language_model."),
            "replace `model.language_model.` by `model.` in the name",
        ),
    ],
)
def test_what_wraps_all_names_is_told_once(
    rename: Callable[[str], str], advice: str, *, partial: bool
) -> None:
    tensors = renamed(rename)
    first, more = next(iter(tensors)), len(tensors) - 1
    assert told(tensors, DENSE, partial=partial) == (
        f"{first} and {more} more like it are unknown to the servers: {advice}"
    )


def test_many_wrapped_names_are_refused_at_once() -> None:
    wanted = {
        f"model.layers.{i}.mlp.experts.{j}.{name}_proj.weight": torch.zeros(1)
        for i in range(24)
        for j in range(32)
        for name in ("gate", "up", "down")
    }
    schema = ServerNames(describe_all(wanted))
    for prefix in ("policy.", "other.wrapping."):
        tensors = {prefix + name: tensor for name, tensor in wanted.items()}
        began = time.process_time()
        with pytest.raises(SchemaMismatchError, match=f"2303 more .*`{prefix}`"):
            match_schema(tensors, schema, partial=False, detector=ChangeDetector())
        assert time.process_time() - began < 15  # 150 s when each was compared with each
    other = {f"{i}x": tensor for i, tensor in enumerate(wanted.values())}
    with pytest.raises(SchemaMismatchError, match="and 4588 more"):
        match_schema(other, schema, partial=False, detector=ChangeDetector())


@pytest.mark.parametrize("change", [{"shape": (4, 8)}, {"dtype": "int8"}], ids=["shape", "dtype"])
@pytest.mark.parametrize("prefix", ["actor.", "policy."])
def test_no_other_name_is_proposed_for_a_tensor_that_does_not_fit(
    prefix: str, change: dict[str, object]
) -> None:
    tensors = {f"{prefix}model.norm.weight": torch.zeros(8)}
    fields = {"name": "model.norm.weight", "dtype": "float32", "shape": (8,), **change}
    with pytest.raises(SchemaMismatchError) as caught:
        match_schema(
            tensors,
            ServerNames([TensorSpec(**fields)]),
            partial=False,
            detector=ChangeDetector(),
        )
    assert str(caught.value).endswith(
        f"{prefix}model.norm.weight is unknown to the servers; model.norm.weight is missing"
    )


def test_a_name_that_could_be_several_is_not_renamed() -> None:
    wanted = {f"{tower}.layers.0.norm.weight": torch.zeros(8) for tower in ("text", "vision")}
    assert told({"layers.0.norm.weight": torch.zeros(8)}, wanted).startswith(
        "layers.0.norm.weight is unknown to the servers; text.layers.0.norm.weight is missing"
    )


@pytest.mark.parametrize("merged", [False, True], ids=["adapter apart", "adapter merged"])
def test_an_adapter_is_to_be_merged_never_its_base_published(*, merged: bool) -> None:
    tensors: dict[str, Tensor] = {}
    for name, tensor in DENSE.items():
        layer, _, module = name.removesuffix(".weight").rpartition(".")
        if not module.endswith("_proj"):
            tensors[f"base_model.model.{name}"] = tensor
            continue
        tensors[f"base_model.model.{layer}.{module}.base_layer.weight"] = tensor
        if not merged:
            tensors[f"base_model.model.{layer}.{module}.lora_A.default.weight"] = torch.zeros(2, 8)
    answer = told(tensors, DENSE)
    assert f"and {len(tensors) - 1} more like it are unknown to the servers: a PEFT" in answer
    assert "model.merge_and_unload().state_dict()" in answer
    assert "missing" not in answer
    assert "rename" not in answer
    assert "from the name" not in answer


def test_packed_experts_that_lie_otherwise_are_not_taken_for_those_of_the_servers() -> None:
    transposed = {name: tensor.mT for name, tensor in PACKED.items()}
    answer = told({**DENSE, **transposed}, {**DENSE, **EXPERTS})
    for name, here, there in (
        ("gate_up_proj", [4, 8, 12], [4, 12, 8]),
        ("down_proj", [4, 6, 8], [4, 8, 6]),
    ):
        assert (
            f"model.layers.0.mlp.experts.{name} has shape {here}, the servers want {there}: "
            "transpose its last two dimensions"
        ) in answer
    fewer = {name: tensor[:3] for name, tensor in PACKED.items()}
    assert "has shape [3, 12, 8], the servers want [4, 12, 8]: split or reshape it" in told(
        {**DENSE, **fewer}, {**DENSE, **EXPERTS}
    )


def test_packed_experts_under_other_names_are_to_be_split() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_bias"
    wanted = {f"model.layers.0.mlp.experts.{i}.gate_proj.bias": torch.zeros(6) for i in range(4)}
    assert told({**DENSE, name: torch.zeros(4, 12)}, {**DENSE, **wanted}) == (
        f"{name} is unknown to the servers: all experts of a layer are in one tensor, and the "
        "servers want each by itself, such as model.layers.0.mlp.experts.0.gate_proj.bias: split "
        "it, as save_pretrained does"
    )


def test_single_experts_under_other_names_are_to_be_stacked() -> None:
    single = {f"model.layers.0.mlp.experts.{i}.linear.weight": torch.zeros(8, 6) for i in range(4)}
    assert told({**DENSE, **single}, {**DENSE, **PACKED}) == (
        "model.layers.0.mlp.experts.0.linear.weight and 3 more like it are unknown to the "
        "servers: the servers want all experts of a layer in one tensor, such as "
        "model.layers.0.mlp.experts.gate_up_proj: stack them"
    )


@pytest.mark.parametrize("partial", [False, True])
def test_some_experts_of_a_packed_tensor_are_not_enough(*, partial: bool) -> None:
    some = {name: tensor for name, tensor in EXPERTS.items() if ".3." not in name}
    answer = told({**DENSE, **some}, {**DENSE, **PACKED}, partial=partial)
    assert answer == "; ".join(
        f"model.layers.0.mlp.experts.3.{name}.weight is missing"
        for name in ("gate_proj", "up_proj", "down_proj")
    )


def test_the_same_experts_twice_are_refused() -> None:
    for wanted in (EXPERTS, PACKED):
        with pytest.raises(SchemaMismatchError, match=r"are both .* on the servers: leave one out"):
            match_schema(
                {**EXPERTS, **PACKED},
                ServerNames(describe_all(wanted)),
                partial=False,
                detector=ChangeDetector(),
            )


def test_fused_projections_are_to_be_split_and_single_ones_to_be_fused() -> None:
    single = {n: t for n, t in DENSE.items() if "_proj" in n}
    fused = {f"model.layers.{i}.self_attn.qkv_proj.weight": torch.zeros(16, 8) for i in range(2)}
    assert told(fused, single).endswith("split them into q_proj, k_proj, v_proj")
    assert told(single, fused).endswith("want q_proj, k_proj, v_proj in one, qkv_proj")
    wider = {name: torch.zeros(16, 9) for name in fused}
    longer = {name: torch.zeros(17, 8) for name in fused}
    for other in (wider, longer):
        assert "split" not in told(other, single)
    assert "in one" not in told(single, wider)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("model.rotary_emb.inv_freq", "servers compute such a buffer themselves: leave it out"),
        ("model.layers.0.attn.masked_bias", "such a buffer themselves: leave it out"),
        ("score.weight", "a value or reward head is not part of the policy: leave it out"),
        ("v_head.summary.weight", "head is not part of the policy: leave it out"),
        ("module.v_head.summary.bias", "head is not part of the policy: leave it out"),
        ("model.layers.0.self_attn.q_proj.weight.absmax", "its layer is quantized"),
        ("model.layers.0._flat_param", "FSDP has flattened parameters into it: publish what"),
    ],
)
def test_what_servers_have_no_use_for_is_to_be_left_out(name: str, advice: str) -> None:
    answer = told({**DENSE, name: torch.zeros(8)}, DENSE)
    assert answer.startswith(f"{name} is unknown to the servers: ")
    assert advice in answer


def test_a_transposed_matrix_is_to_be_transposed() -> None:
    answer = told({**DENSE, "model.embed_tokens.weight": torch.zeros(8, 16)}, DENSE)
    assert answer.endswith("the servers want [16, 8]: transpose its last two dimensions")


def test_a_shard_is_to_be_gathered() -> None:
    for shard in (torch.zeros(0), torch.zeros(64)):
        answer = told({**DENSE, "model.embed_tokens.weight": shard}, DENSE)
        assert answer.endswith("the servers want [16, 8]: gather its shards first, as "
                               "for a checkpoint (ZeRO-3, FSDP)")  # fmt: skip


async def test_a_model_is_not_taken_for_a_source() -> None:
    async with publishing(1) as (servers, _, publisher):
        with pytest.raises(
            SchemaMismatchError,
            match=r"a Linear is a model, not its tensors: publish\(version, model\.state_dict",
        ):
            await publisher.publish(1, torch.nn.Linear(2, 2))
        assert servers[0].update is None
        await publish(publisher)

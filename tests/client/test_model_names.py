"""What transformers calls the tensors of a model, for servers that have those of its checkpoint."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollwire_client import SchemaMismatchError
from rollwire_client._publishing.names import ServerNames
from rollwire_client._publishing.schema import match_schema
from rollwire_client._publishing.source import CheckedSource, GivenOrder
from rollwire_client._publishing.tensors import ChangeDetector
from rollwire_client._publishing.tied import TiedTensors
from rollwire_transport import Receiver, Sender, describe_all, plan
from support.memory_link import MemoryLink
from support.tensors import content, room_for
from support.transfers import receive

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollwire_client._publishing.tensors import TensorSource
    from rollwire_transport import TensorSpec
    from torch import Tensor

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "minimax": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "qwen2_moe": {"num_experts": 6, "shared_expert_intermediate_size": 8},
    "qwen3_moe": {"num_experts": 6},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": {"n_routed_experts": 4, "first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": 4},
    "jamba": {"num_experts": 2},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "exaone_moe": {"num_experts": 4},
    "gemma3": {},
}


def names_of(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's tensors, and those that transformers would write into its checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = AutoConfig.for_model(kind)
    for each in (config, config.get_text_config(), getattr(config, "vision_config", None)):
        for name, value in {**SMALL, **FAMILIES[kind]}.items():
            if hasattr(each, name):
                setattr(each, name, value)
    if hasattr(config, "layers_block_type"):
        config.attn_layer_offset, config.attn_layer_period = 0, 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    own = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    return own, revert_weight_conversion(model, own)


def arrived(
    specs: Sequence[TensorSpec], source: TensorSource, want: Mapping[str, Tensor], words: int
) -> None:
    """Checks that what is sent of a source is what servers ``want``, bit for bit."""
    manifest = plan(specs, bucket_bytes=64 * words)
    link, destination = MemoryLink(), room_for(manifest)
    Sender(manifest).send(link, source, bucket_timeout=1)
    receive(Receiver(manifest, destination), link)
    expected = {spec.name for spec in describe_all(want) if spec.alias_of is None}
    assert destination.keys() == expected
    for name in expected:
        assert content(destination[name]) == content(want[name]), name


def arrived_by_name(
    tensors: Mapping[str, Tensor], want: Mapping[str, Tensor], words: int = 999
) -> None:
    names = ServerNames(describe_all(want))
    specs, source = match_schema(tensors, names, partial=False, detector=ChangeDetector())
    arrived(specs, source, want, words)


@pytest.fixture(scope="module")
def transformers() -> None:
    """Imported, which takes a while."""
    import transformers.core_model_loading
    import transformers.modeling_utils  # noqa: F401


@pytest.mark.usefixtures("transformers")
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_and_its_checkpoint_fit_each_other(kind: str) -> None:
    model, checkpoint = names_of(kind)
    assert model.keys() != checkpoint.keys()
    arrived_by_name(model, checkpoint)
    arrived_by_name(checkpoint, model)


def experts(layer: int, kind: str, *, packed: bool, checkpoint: bool) -> dict[str, Tensor]:
    """Of three experts, with the same values however they are kept."""
    generator = torch.Generator().manual_seed(layer)
    gate_up = torch.randn(3, 10, 7, generator=generator)
    down = torch.randn(3, 7, 5, generator=generator)
    block = "block_sparse_moe" if checkpoint and kind == "mixtral" else "mlp"
    prefix = f"model.layers.{layer}.{block}.experts"
    if packed:
        return {f"{prefix}.gate_up_proj": gate_up, f"{prefix}.down_proj": down}
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    return {
        f"{prefix}.{i}.{name}.weight": tensor
        for i in range(3)
        for name, tensor in zip(names, (*gate_up[i].chunk(2), down[i]), strict=True)
    }


@st.composite
def weights(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a trainer has, and the same as servers want it."""
    kind = draw(st.sampled_from(("mixtral", "qwen2_moe")))
    here, there = {"head": torch.ones(1, 3)}, {"head": torch.ones(1, 3)}
    for layer in range(2):
        here |= experts(layer, kind, packed=draw(st.booleans()), checkpoint=draw(st.booleans()))
        there |= experts(layer, kind, packed=draw(st.booleans()), checkpoint=draw(st.booleans()))
    if draw(st.booleans()):  # other strides
        here = {name: tensor.mT.contiguous().mT for name, tensor in here.items()}
    to = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float64)))
    return here, {name: tensor.to(to) for name, tensor in there.items()}


@given(drawn=weights(), words=st.integers(1, 40))
def test_experts_arrive_however_both_ends_keep_them(
    drawn: tuple[dict[str, Tensor], dict[str, Tensor]], words: int
) -> None:
    arrived_by_name(*drawn, words)


@given(
    drawn=weights(),
    words=st.integers(1, 40),
    order=st.randoms(use_true_random=False),
    called=st.booleans(),
    publishes=st.integers(1, 2),
)
def test_a_callable_s_experts_arrive_in_any_order(
    drawn: tuple[dict[str, Tensor], dict[str, Tensor]],
    words: int,
    order: Any,
    publishes: int,
    *,
    called: bool,
) -> None:
    here, there = drawn
    items: list[tuple[str, Any]] = [*here.items()]
    order.shuffle(items)
    calls: list[str] = []

    def give(name: str) -> Tensor:
        calls.append(name)
        return here[name]

    if called:
        items = [(name, functools.partial(give, name)) for name in here]
    names, given_order = ServerNames(describe_all(there)), GivenOrder()
    for _ in range(publishes):
        calls.clear()
        source = CheckedSource(
            lambda: items, names, given_order, ChangeDetector(), None, TiedTensors(names)
        )
        arrived(given_order.sort(names.schema), source, there, words)
        assert sorted(calls) == (sorted(here) if called else [])


def test_matrices_of_packed_experts_are_views() -> None:
    packed = experts(0, "mixtral", packed=True, checkpoint=False)
    names = ServerNames(describe_all(experts(0, "mixtral", packed=False, checkpoint=True)))
    _, source = match_schema(packed, names, partial=False, detector=ChangeDetector())
    memory = {tensor.untyped_storage().data_ptr() for tensor in packed.values()}
    given_names = []
    for name, tensor in source():
        given_names.append(name)
        assert tensor.untyped_storage().data_ptr() in memory
        assert tensor.is_contiguous()
    assert sorted(given_names) == sorted(names.specs)


def test_what_a_callable_gives_twice_is_refused() -> None:
    packed = experts(0, "qwen2_moe", packed=True, checkpoint=True)
    single = experts(0, "qwen2_moe", packed=False, checkpoint=True)
    for first, second in ((packed, single), (single, packed)):
        for want in (packed, single):
            names = ServerNames(describe_all(want))
            source = CheckedSource(
                lambda first=first, second=second: [*first.items(), *second.items()],
                names,
                GivenOrder(),
                ChangeDetector(),
                None,
                TiedTensors(names),
            )
            name = next(iter(second))
            with pytest.raises(SchemaMismatchError, match=rf"gave {re.escape(name)} twice"):
                list(source())

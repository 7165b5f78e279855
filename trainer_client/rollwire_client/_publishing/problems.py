"""What is wrong with a trainer's tensors, and how to make them match the servers' schema."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import rollwire_transport as transport

from rollwire_client._errors import SchemaMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollwire_transport import TensorSpec

_SERVER_DTYPES = {"float32", "bfloat16", "float16"}  # that ``rollwire-server --dtype`` takes
_SCALED = ("float8", "float4")  # quantized: the values have scales, in other tensors


def mismatch(problem: str) -> SchemaMismatchError:
    """Of tensors that a source gave while they were sent."""
    return SchemaMismatchError(
        f"the tensors do not match the servers' schema; nothing was committed: {problem}"
    )


def shape_problem(got: TensorSpec, want: TensorSpec) -> str:
    if got.shape == (0,) or (len(got.shape) == 1 < len(want.shape)):
        advice = "gather its shards first, as for a checkpoint (ZeRO-3, FSDP)"
    elif len(want.shape) > 1 and got.shape == (*want.shape[:-2], want.shape[-1], want.shape[-2]):
        advice = "transpose its last two dimensions"
    else:
        advice = "split or reshape it"
    return f"{got.name} has shape {list(got.shape)}, the servers want {list(want.shape)}: {advice}"


def dtype_problem(names: Sequence[str], here: str, there: str) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    if transport.castable(here, there):
        advice = "cast before publishing, or let the publisher cast (cast=True)"
        if here in _SERVER_DTYPES:
            advice += f", or start the servers with --dtype {here}"
    elif there.startswith(_SCALED):
        advice = "quantize before publishing: a cast would lack the scales"
    elif here.startswith(_SCALED):
        advice = "dequantize before publishing: a cast would ignore the scales"
    else:
        advice = "cast before publishing: only floating point is cast to floating point"
    return f"{names[0]}{more} {here}, the servers want {there}: {advice}"


def unknown_names(
    unknown: Iterable[TensorSpec], missing: Iterable[TensorSpec]
) -> tuple[list[str], set[str]]:
    """One problem for all ``unknown`` tensors of equal advice, and their names on the servers.

    Looks at each name a fixed number of times: a policy may have a hundred thousand tensors, and
    this runs on the event loop.
    """
    index = _Missing(missing)
    unknown_by_advice: dict[str, tuple[str, list[str]]] = {}
    hinted: set[str] = set()
    for spec in unknown:
        advice, wanted = _advice(spec, index)
        # Each tensor without advice is a problem of its own.
        unknown_by_advice.setdefault(advice or spec.name, (advice, []))[1].append(spec.name)
        hinted.update(wanted)
    problems = []
    for advice, (first, *others) in unknown_by_advice.values():
        subject = f"{first} and {len(others)} more like it are" if others else f"{first} is"
        explained = f": {advice.replace('{it}', 'them' if others else 'it')}" if advice else ""
        problems.append(f"{subject} unknown to the servers{explained}")
    return problems, hinted


class _Missing:
    """The tensors that the servers want and did not get, indexed."""

    def __init__(self, specs: Iterable[TensorSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}
        self.experts = [name for name in self.specs if _EXPERT.search(name)]
        self.packed_experts = [name for name in self.specs if _PACKED_EXPERTS.search(name)]
        self.by_ending: defaultdict[str, list[str]] = defaultdict(list)
        for name in self.specs:
            self.by_ending[_ending(name)].append(name)

    def fits(self, spec: TensorSpec, name: str) -> bool:
        want = self.specs.get(name)
        return want is not None and want.shape == spec.shape and _castable(spec, want)

    def add_up(self, pieces: Sequence[str], spec: TensorSpec) -> bool:
        """Whether ``pieces``, one below the other, are such a tensor."""
        wanted = [want for name in pieces if (want := self.specs.get(name)) is not None]
        return (
            len(wanted) == len(pieces)
            and all(want.shape[1:] == spec.shape[1:] and _castable(spec, want) for want in wanted)
            and sum(want.shape[0] for want in wanted) == spec.shape[0]
        )

    def contains(self, name: str, spec: TensorSpec) -> bool:
        """Whether the tensor ``name`` has room for one like ``spec`` beside others."""
        want = self.specs.get(name)
        return (
            want is not None
            and want.shape[1:] == spec.shape[1:]
            and want.shape[:1] > spec.shape[:1]
            and _castable(spec, want)
        )


def _castable(spec: TensorSpec, want: TensorSpec) -> bool:
    return transport.castable(spec.dtype, want.dtype)


def _ending(name: str) -> str:
    """The end of a name that wrapping a model does not change: from its layer number's parent on,
    or else the last two parts.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[max(number - 1, 0) :])


_PEFT = re.compile(
    r"(?:^|\.)(?:base_model\.model|base_layer|lora_\w+|modules_to_save|original_module)(?:\.|$)"
)
_PEFT_WRAPPING = re.compile(r"(?:^|(?<=\.))base_model\.model\.|\.base_layer(?=\.)")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)\w*$")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_BUFFER = re.compile(
    r"(?:^|\.)(?:(?:original_)?inv_freq|(?:cos|sin)_cached|position_ids|masked_bias|attn\.bias)$"
)
_HEAD = re.compile(r"(?:^|\.)(?:score|v_head|value_head|reward_head|classifier|regression_head)\.")
_QUANTIZED = re.compile(
    r"\.(?:absmax|quant_map|quant_state\..*|nested_\w+|SCB|qweight|qzeros|weight_scale_inv)$"
)


def _advice(spec: TensorSpec, missing: _Missing) -> tuple[str, Iterable[str]]:
    """What to do about a tensor whose name the servers do not know, with "{it}" for what is
    concerned, and the servers' names for it. It tells how trainers' libraries wrap, pack or extend
    a model.
    """
    name, parts = spec.name, spec.name.split(".")
    if _PEFT.search(name):
        # The base layers have the shapes that the servers want: renamed, they would pass as the
        # policy, without the adapter.
        return (
            "a PEFT model's base layers and adapters are not its policy. Merge the adapter first: "
            "publish model.merge_and_unload().state_dict(), or, between model.merge_adapter() and "
            "model.unmerge_adapter(), the tensors without `base_model.model.` and `.base_layer` in "
            "their names, and without those of lora_",
            [plain] if missing.fits(spec, plain := _PEFT_WRAPPING.sub("", name)) else [],
        )
    if name.endswith("_flat_param"):
        return (
            "FSDP has flattened parameters into {it}: publish what torch.distributed.checkpoint."
            "state_dict.get_model_state_dict(model) gives",
            (),
        )
    # What can be split or stacked by the table of names is no problem at all.
    if _PACKED_EXPERTS.search(name) and missing.experts:
        return (
            "all experts of a layer are in one tensor, and the servers want each by itself, such "
            f"as {missing.experts[0]}: split {{it}}, as save_pretrained does",
            missing.experts,
        )
    if _EXPERT.search(name) and missing.packed_experts:
        return (
            "the servers want all experts of a layer in one tensor, such as "
            f"{missing.packed_experts[0]}: stack {{it}}",
            missing.packed_experts,
        )
    for fused, pieces in _FUSED.items():
        whole, *split = (".".join([*parts[:-2], m, parts[-1]]) for m in (fused, *pieces))
        if name == whole and missing.add_up(split, spec):
            return f"split {{it}} into {', '.join(pieces)}", split
        if name in split and missing.contains(whole, spec):
            return f"the servers want {', '.join(pieces)} in one, {fused}", [whole]
    if _BUFFER.search(name):
        return "servers compute such a buffer themselves: leave {it} out", ()
    if _HEAD.search(name):
        return "a value or reward head is not part of the policy: leave {it} out", ()
    if _QUANTIZED.search(name):
        return "its layer is quantized: publish the weights as the servers want them", ()
    # The same tensor may be at another place, such as beneath `model.language_model.`.
    candidates = missing.by_ending.get(_ending(name), [])
    if len(candidates) == 1 and missing.fits(spec, candidates[0]):
        return _advice_to_rename(parts, candidates[0].split(".")), candidates
    return "", ()


def _advice_to_rename(parts: list[str], theirs: list[str]) -> str:
    while parts and theirs and parts[-1] == theirs[-1]:
        parts.pop()
        theirs.pop()
    before, wanted = ("".join(f"{part}." for part in some) for some in (parts, theirs))
    if not before:
        return f"put `{wanted}` before the name"
    if not wanted:
        return f"remove `{before}` from the name"
    return f"replace `{before}` by `{wanted}` in the name"

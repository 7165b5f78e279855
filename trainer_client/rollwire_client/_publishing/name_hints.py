"""Advice about tensors whose names the servers do not know.

A rule recognizes how a trainer's library wraps, packs or extends a model. ``_RULES`` lists them;
the first that applies to a name wins. Together they look at each name a fixed number of times: a
policy may have a hundred thousand tensors, and this runs on the event loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rollwire_transport import TensorSpec

    # What to do, with "{it}" for the tensors concerned, and the servers' names for them.
    _Advice = tuple[str, Iterable[str]]
    _Rule = Callable[[TensorSpec, "_Missing"], _Advice | None]  # None: the rule does not apply


@dataclass(slots=True)
class Hint:
    """What to do about the tensors ``names``, which the servers want as ``wanted``."""

    advice: str
    names: list[str] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        first, more = self.names[0], len(self.names) - 1
        subject = f"{first} and {more} more like it are" if more else f"{first} is"
        advice = self.advice.replace("{it}", "them" if more else "it")
        return f"{subject} unknown to the servers{f': {advice}' if advice else ''}"


def name_hints(unknown: Iterable[TensorSpec], missing: Sequence[TensorSpec]) -> list[Hint]:
    """One hint for all ``unknown`` tensors of equal advice.

    Args:
        unknown: Tensors whose names the servers do not know.
        missing: Tensors that the servers want, and that were not given under their names.
    """
    hints: dict[str, Hint] = {}
    index = _Missing.of(missing)
    for spec in unknown:
        advice, wanted = next(filter(None, (rule(spec, index) for rule in _RULES)), ("", ()))
        # Each tensor that no rule knows gets a hint of its own.
        hint = hints.setdefault(advice or spec.name, Hint(advice))
        hint.names.append(spec.name)
        hint.wanted.update(wanted)
    return list(hints.values())


def shape_hint(got: tuple[int, ...], want: tuple[int, ...]) -> str:
    if got == (0,) or (len(got) == 1 < len(want)):
        return "its shards are to be gathered first, as for a checkpoint (ZeRO-3, FSDP)"
    return "split or reshape it"


@dataclass(frozen=True, slots=True)
class _Missing:
    """The tensors that the servers want and did not get, indexed for the rules."""

    specs: Mapping[str, TensorSpec]
    by_ending: Mapping[str, Sequence[str]]
    experts: Sequence[str]  # one expert's tensors
    packed_experts: Sequence[str]

    @classmethod
    def of(cls, missing: Sequence[TensorSpec]) -> _Missing:
        by_ending = defaultdict(list)
        for spec in missing:
            by_ending[_ending(spec.name)].append(spec.name)
        names = [spec.name for spec in missing]
        return cls(
            {spec.name: spec for spec in missing},
            by_ending,
            [name for name in names if _EXPERT.search(name)],
            [name for name in names if _PACKED_EXPERTS.search(name)],
        )

    def fits(self, spec: TensorSpec, name: str) -> bool:
        want = self.specs.get(name)
        return want is not None and (want.shape, want.dtype) == (spec.shape, spec.dtype)


def _ending(name: str) -> str:
    """The end of a name that wrapping a model does not change: from its layer number's parent on,
    or else the last two parts.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[max(number - 1, 0) :])


# PEFT. Its base layers have the shapes that the servers want: renamed, they would pass as the
# policy, without the adapter.

_PEFT = re.compile(
    r"(?:^|\.)(?:base_model\.model|base_layer|lora_\w+|modules_to_save|original_module)(?:\.|$)"
)
_PEFT_WRAPPING = re.compile(r"(?:^|(?<=\.))base_model\.model\.|\.base_layer(?=\.)")


def _adapter(spec: TensorSpec, _: _Missing) -> _Advice | None:
    if not _PEFT.search(spec.name):
        return None
    return (
        "a PEFT model's base layers and adapters are not its policy. Merge the adapter first: "
        "publish model.merge_and_unload().state_dict(), or, between model.merge_adapter() and "
        "model.unmerge_adapter(), the tensors without `base_model.model.` and `.base_layer` in "
        "their names, and without those of lora_",
        [_PEFT_WRAPPING.sub("", spec.name)],
    )


# Wrappers of a model or its modules that show in the names.

_WRAPPERS = {
    "module": "DistributedDataParallel, DeepSpeed",
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
}


def _wrapped(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    parts = spec.name.split(".")
    found = [part for part in parts if part in _WRAPPERS]
    plain = ".".join(part for part in parts if part not in _WRAPPERS)
    if not found or not missing.fits(spec, plain):
        return None
    outer = parts[: next(i for i, part in enumerate(parts) if part not in _WRAPPERS)]
    wrappers = " and ".join(f"`{part}.` ({_WRAPPERS[part]})" for part in dict.fromkeys(found))
    if outer != found or "_fsdp_wrapped_module" in found:
        return f"remove {wrappers} from the name", [plain]
    advice = f"remove {wrappers} from the name, or publish model.{'.'.join(outer)}.state_dict()"
    return advice, [plain]


def _flat(spec: TensorSpec, _: _Missing) -> _Advice | None:
    if not spec.name.endswith("_flat_param"):
        return None
    return (
        "FSDP has flattened parameters into {it}: publish what torch.distributed.checkpoint."
        "state_dict.get_model_state_dict(model) gives",
        (),
    )


# Tensors that one side has fused or packed, and the other has not.

_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)\w*$")


def _packed_experts(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    if _PACKED_EXPERTS.search(spec.name) and missing.experts:
        return (
            "all experts of a layer are in one tensor, as transformers 5 has them in memory, and "
            f"the servers want each by itself, such as {missing.experts[0]}: split {{it}}, as "
            "save_pretrained does",
            missing.experts,
        )
    if _EXPERT.search(spec.name) and missing.packed_experts:
        return (
            "the servers want all experts of a layer in one tensor, such as "
            f"{missing.packed_experts[0]}: stack {{it}}",
            missing.packed_experts,
        )
    return None


_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARTS = {part: fused for fused, parts in _FUSED.items() for part in parts}


def _fused(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    before, part, after = _last_module(spec.name)
    if part in _FUSED:
        wanted = [f"{before}{piece}{after}" for piece in _FUSED[part]]
        if all(name in missing.specs for name in wanted):
            return f"split {{it}} into {', '.join(_FUSED[part])}", wanted
    if part in _PARTS and (name := f"{before}{_PARTS[part]}{after}") in missing.specs:
        fused = _PARTS[part]
        return f"the servers want {', '.join(_FUSED[fused])} in one, {fused}", [name]
    return None


def _last_module(name: str) -> tuple[str, str, str]:
    """Splits a name around the innermost module: before it, its name, the parameter."""
    before, _, parameter = name.rpartition(".")
    outer, dot, module = before.rpartition(".")
    return f"{outer}{dot}", module, f".{parameter}"


# Tensors that servers do not need.

_BUFFER = re.compile(
    r"(?:^|\.)(?:(?:original_)?inv_freq|(?:cos|sin)_cached|position_ids|masked_bias|attn\.bias)$"
)
_HEAD = re.compile(r"(?:^|\.)(?:score|v_head|value_head|reward_head|classifier|regression_head)\.")
_QUANTIZED = re.compile(
    r"\.(?:absmax|quant_map|quant_state\..*|nested_\w+|SCB|qweight|qzeros|weight_scale_inv)$"
)


def _superfluous(spec: TensorSpec, _: _Missing) -> _Advice | None:
    if _BUFFER.search(spec.name):
        return "servers compute such a buffer themselves: leave {it} out", ()
    if _HEAD.search(spec.name):
        return "a value or reward head is not part of the policy: leave {it} out", ()
    if _QUANTIZED.search(spec.name):
        return "its layer is quantized: publish the weights as the servers want them", ()
    return None


# The same tensor at another place, such as beneath `model.language_model.`.


def _elsewhere(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    ending = _ending(spec.name)
    candidates = missing.by_ending.get(ending, ())
    if len(candidates) != 1 or not missing.fits(spec, candidates[0]):
        return None
    before, wanted = _without_common_ending(spec.name, candidates[0])
    if not before:
        return f"put `{wanted}` before the name", candidates
    if not wanted:
        return f"remove `{before}` from the name", candidates
    return f"replace `{before}` by `{wanted}` in the name", candidates


def _without_common_ending(name: str, other: str) -> tuple[str, str]:
    parts, others = name.split("."), other.split(".")
    while parts and others and parts[-1] == others[-1]:
        parts.pop()
        others.pop()
    return "".join(f"{part}." for part in parts), "".join(f"{part}." for part in others)


_RULES: Sequence[_Rule] = (
    _adapter,
    _wrapped,
    _flat,
    _packed_experts,
    _fused,
    _superfluous,
    _elsewhere,
)

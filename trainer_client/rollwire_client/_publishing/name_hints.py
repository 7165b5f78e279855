"""What to do about tensors whose names the servers do not know: a table of rules.

The rules know how trainers' libraries wrap, pack and extend a model. A new one belongs into
``_RULES``; the first that applies to a name counts. All of them together look at each name a fixed
number of times: a policy may have a hundred thousand tensors, and this runs on an event loop.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rollwire_transport import TensorSpec

    # What to do, with "{it}" for the tensors that it is about, and the servers' names for them.
    _Advice = tuple[str, Iterable[str]]
    _Rule = Callable[[TensorSpec, "_Missing"], _Advice | None]  # None: it does not apply


@dataclass(slots=True)
class Hint:
    """One piece of advice.

    Attributes:
        advice: What to do.
        names: Of the tensors that it is about.
        instead: The servers' names for them.
    """

    advice: str
    names: list[str] = field(default_factory=list)
    instead: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        """For an error's message."""
        first, more = self.names[0], len(self.names) - 1
        subject = f"{first} and {more} more like it are" if more else f"{first} is"
        advice = self.advice.replace("{it}", "them" if more else "it")
        return f"{subject} unknown to the servers{f': {advice}' if advice else ''}"


def hints(unknown: Iterable[TensorSpec], missing: Sequence[TensorSpec]) -> list[Hint]:
    """What to do about ``unknown`` tensors, equal advice together.

    Args:
        unknown: Given, under names that the servers do not know.
        missing: Those that the servers want, and that were not given under their names.
    """
    found: dict[str, Hint] = {}
    table = _Missing.of(missing)
    for spec in unknown:
        advice, instead = next(filter(None, (rule(spec, table) for rule in _RULES)), ("", ()))
        # What nothing is known of stands for itself.
        hint = found.setdefault(advice or spec.name, Hint(advice))
        hint.names.append(spec.name)
        hint.instead.update(instead)
    return list(found.values())


def shape_hint(got: tuple[int, ...], want: tuple[int, ...]) -> str:
    """What to do about a tensor of another shape than the servers want."""
    if got == (0,) or (len(got) == 1 < len(want)):
        return "its shards are to be gathered first, as for a checkpoint (ZeRO-3, FSDP)"
    return "split or reshape it"


@dataclass(frozen=True, slots=True)
class _Missing:
    """What the servers want and did not get, by what is looked for."""

    specs: Mapping[str, TensorSpec]
    by_ending: Mapping[str, Sequence[str]]
    of_experts: Sequence[str]  # one expert's tensors
    of_packed_experts: Sequence[str]

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
        """Whether a tensor is what the servers want under ``name``."""
        want = self.specs.get(name)
        return want is not None and (want.shape, want.dtype) == (spec.shape, spec.dtype)


def _ending(name: str) -> str:
    """What different wrappings of a model leave of a name: from its layer on, or the last two
    parts.
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[max(number - 1, 0) :])


# PEFT. Its base layers have the shapes that servers want: renamed, they would pass for the policy.

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


# What wraps a model as a whole, or modules in it, and shows in the names.

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
    told = " and ".join(f"`{part}.` ({_WRAPPERS[part]})" for part in dict.fromkeys(found))
    if outer != found or "_fsdp_wrapped_module" in found:
        return f"take {told} out of the name", [plain]
    advice = f"take {told} off the name, or publish model.{'.'.join(outer)}.state_dict()"
    return advice, [plain]


def _flat(spec: TensorSpec, _: _Missing) -> _Advice | None:
    if not spec.name.endswith("_flat_param"):
        return None
    return (
        "FSDP has flattened parameters into {it}: publish what torch.distributed.checkpoint."
        "state_dict.get_model_state_dict(model) gives",
        (),
    )


# Several tensors in one, or one in several.

_EXPERT = re.compile(r"\.experts\.\d+\.")
_PACKED_EXPERTS = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)\w*$")


def _packed_experts(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    if _PACKED_EXPERTS.search(spec.name) and missing.of_experts:
        return (
            "all experts of a layer are in one tensor, as transformers 5 has them in memory, and "
            f"the servers want each by itself, such as {missing.of_experts[0]}: split {{it}}, as "
            "save_pretrained does",
            missing.of_experts,
        )
    if _EXPERT.search(spec.name) and missing.of_packed_experts:
        return (
            "the servers want all experts of a layer in one tensor, such as "
            f"{missing.of_packed_experts[0]}: stack {{it}}",
            missing.of_packed_experts,
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
    """A name, cut around the module whose parameter it is."""
    before, _, parameter = name.rpartition(".")
    outer, dot, module = before.rpartition(".")
    return f"{outer}{dot}", module, f".{parameter}"


# What servers have no use for.

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
        return "a value or reward head is no part of the policy: leave {it} out", ()
    if _QUANTIZED.search(spec.name):
        return "its layer is quantized: publish the weights as the servers want them", ()
    return None


# Another place in the model, such as beneath `model.language_model.`.


def _elsewhere(spec: TensorSpec, missing: _Missing) -> _Advice | None:
    ending = _ending(spec.name)
    candidates = missing.by_ending.get(ending, ())
    if len(candidates) != 1 or not missing.fits(spec, candidates[0]):
        return None
    before, wanted = _apart(spec.name, candidates[0])
    if not before:
        return f"put `{wanted}` before the name", candidates
    if not wanted:
        return f"take `{before}` off the name", candidates
    return f"say `{wanted}` for `{before}` in the name", candidates


def _apart(name: str, other: str) -> tuple[str, str]:
    """Two names without what both end with."""
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

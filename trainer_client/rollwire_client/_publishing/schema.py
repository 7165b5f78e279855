"""Checks a trainer's tensors against the schema of the servers, and says how to make them match."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import rollwire_transport as transport
import torch
from rollwire_transport import TensorSpec

from rollwire_client._errors import SchemaMismatchError
from rollwire_client._publishing.names import name_on_servers
from rollwire_client._publishing.tensors import check_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor

    from rollwire_client._publishing.sharded.coordination import Coordinator
    from rollwire_client._publishing.tensors import ChangeDetector, TensorOrFunction, TensorSource

_SERVER_DTYPES = {"float32", "bfloat16", "float16"}  # that ``rollwire-server --dtype`` takes
_SCALED = ("float8", "float4")  # quantized: the values have scales, in other tensors
_MAX_PROBLEMS = 20  # in an error's message


def match_schema(
    tensors: Mapping[str, Tensor],
    schema: Sequence[TensorSpec],
    *,
    partial: bool,
    cast: bool = True,
    detector: ChangeDetector,
    on_untied: Callable[[str, str, TensorOrFunction], None] | None = None,
    coordinator: Coordinator | None = None,
) -> tuple[list[TensorSpec], TensorSource]:
    """The specs of what is sent, aliases included, and the source that gives it, in the trainer's
    dtypes. As it is read, ``on_untied`` gets each tensor that is tied on the servers only: its
    name, the name of the one that is sent, and itself.

    With a ``coordinator`` the other ranks of a sharded trainer gather in step.
    """
    snapshot = dict(tensors)  # read once: a mapping may read each tensor from a file
    if isinstance(tensors, dict):  # to which the trainer may assign other tensors meanwhile
        tensors = snapshot
    check_tensors(snapshot)
    wanted = {spec.name: spec for spec in schema}
    local_names = _local_names(snapshot, wanted)
    named = {name: snapshot[local_name] for name, local_name in local_names.items()}
    selected, untied = _select(named, schema, partial=partial, cast=cast)
    for name in [*selected.values(), *untied]:
        detector.watch(local_names[name], named[name])
    specs = [wanted[name] for name in selected]
    specs += [spec for spec in schema if spec.alias_of in selected]
    del named

    def value_of(name: str) -> TensorOrFunction:
        local_name = local_names[name]
        value = tensors[local_name]
        return value if coordinator is None else coordinator.gather(local_name, value)

    def items() -> Iterator[tuple[str, TensorOrFunction]]:
        for name, source in selected.items():
            yield name, value_of(source)
        for name, sent_as in untied.items():
            if on_untied is not None:
                on_untied(name, sent_as, value_of(name))

    return specs, items


def _local_names(tensors: Iterable[str], wanted: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The trainer's names by those that the servers have for the same tensors."""
    local_names: dict[str, str] = {}
    for local_name in tensors:
        name = name_on_servers(local_name, wanted)
        if (other := local_names.setdefault(name, local_name)) != local_name:
            raise SchemaMismatchError(
                f"nothing was sent: {other} and {local_name} are both {name} on the servers: leave "
                "one out"
            )
    return local_names


def check_given(
    name: str, value: TensorOrFunction, wanted: Mapping[str, TensorSpec], *, cast: bool
) -> None:
    """Raises SchemaMismatchError unless the servers want such a tensor, or one that it is ``cast``
    to. What a function gives is checked when it is called.
    """
    try:
        if isinstance(value, torch.Tensor) or not callable(value):
            got = transport.describe(name, value)
        else:
            got = None
    except ValueError as error:
        raise mismatch(str(error)) from error
    problems: list[str] = []
    if (want := wanted.get(name)) is None:
        problems, _ = _unknown_names([got or TensorSpec(name, "", ())], wanted.values())
    elif got is not None and got.shape != want.shape:
        problems = [_shape_problem(got, want)]
    elif got is not None and not _dtype_fits(got, want, cast=cast):
        problems = [_dtype_problem([name], got.dtype, want.dtype)]
    if problems:
        raise mismatch(problems[0])


def mismatch(problem: str) -> SchemaMismatchError:
    """Of tensors that a source gave while they were sent."""
    return SchemaMismatchError(
        f"the tensors do not match the servers' schema; nothing was committed: {problem}"
    )


def _select(
    tensors: Mapping[str, Tensor], schema: Sequence[TensorSpec], *, partial: bool, cast: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """The tensors to send, each memory once, from the servers' names to the trainer's; and the
    trainer's names of those that are tied on the servers only, to such a name of what is sent.
    """
    wanted = {spec.name: spec for spec in schema}
    alias_of = {spec.name: spec.alias_of for spec in schema if spec.alias_of is not None}
    try:
        described = transport.describe_all(tensors)
    except ValueError as error:
        raise SchemaMismatchError(f"nothing was sent: {error}") from error
    memory_of = {spec.name: spec.alias_of or spec.name for spec in described}
    selected: dict[str, str] = {}
    untied: dict[str, str] = {}
    problems, hinted = _unknown_names(
        [spec for spec in described if spec.name not in wanted],
        [spec for spec in schema if spec.name not in tensors],
    )
    shapes: list[str] = []
    miscast: dict[tuple[str, str], list[str]] = {}  # names by (dtype here, dtype on the servers)
    for local_name, tensor in tensors.items():
        if local_name not in wanted:
            continue
        name = alias_of.get(local_name, local_name)
        got, want = replace(transport.describe(local_name, tensor), name=name), wanted[name]
        if got.shape != want.shape:
            shapes.append(_shape_problem(replace(got, name=local_name), want))
        if not _dtype_fits(got, want, cast=cast):
            miscast.setdefault((got.dtype, want.dtype), []).append(local_name)
        sent = selected.setdefault(name, name if name in tensors else local_name)
        if memory_of[local_name] != memory_of[sent]:
            untied[local_name] = sent
    problems += shapes
    problems += [_dtype_problem(names, *dtypes) for dtypes, names in miscast.items()]
    if not partial:
        given = {*tensors, *alias_of, *selected, *hinted}
        problems += [f"{name} is missing" for name in wanted if name not in given]
    if problems:
        shown = problems[:_MAX_PROBLEMS]
        if more_problems := len(problems) - len(shown):
            shown.append(f"and {more_problems} more")
        raise SchemaMismatchError(
            "the tensors do not match the servers' schema; nothing was sent: " + "; ".join(shown)
        )
    return selected, untied


def _shape_problem(got: TensorSpec, want: TensorSpec) -> str:
    if got.shape == (0,) or (len(got.shape) == 1 < len(want.shape)):
        advice = "gather its shards first, as for a checkpoint (ZeRO-3, FSDP)"
    else:
        advice = "split or reshape it"
    return f"{got.name} has shape {list(got.shape)}, the servers want {list(want.shape)}: {advice}"


def _dtype_fits(got: TensorSpec, want: TensorSpec, *, cast: bool) -> bool:
    return got.dtype == want.dtype or (cast and transport.castable(got.dtype, want.dtype))


def _dtype_problem(names: Sequence[str], here: str, there: str) -> str:
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


def _unknown_names(
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
        return (
            want is not None
            and want.shape == spec.shape
            and transport.castable(spec.dtype, want.dtype)
        )


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
            [_PEFT_WRAPPING.sub("", name)],
        )
    if name.endswith("_flat_param"):
        return (
            "FSDP has flattened parameters into {it}: publish what torch.distributed.checkpoint."
            "state_dict.get_model_state_dict(model) gives",
            (),
        )
    if _PACKED_EXPERTS.search(name) and missing.experts:
        return (
            "all experts of a layer are in one tensor, as transformers 5 has them in memory, and "
            f"the servers want each by itself, such as {missing.experts[0]}: split {{it}}, as "
            "save_pretrained does",
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
        if name == whole and all(piece in missing.specs for piece in split):
            return f"split {{it}} into {', '.join(pieces)}", split
        if name in split and whole in missing.specs:
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

"""What models and checkpoints call the same tensors: one table, for trainers and servers.

A checkpoint has the names of a model's first release. Wrappers of a model insert parts into them.
transformers 5 renames some modules, and keeps the experts of a layer in one tensor, where most
checkpoints have each matrix of each expert by itself.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_transport._manifest import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The parts of names that each wrapper inserts.
_WRAPPERS = {
    "module",  # DistributedDataParallel, DeepSpeed
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FSDP
    "_checkpoint_wrapped_module",  # activation checkpointing
}

# What transformers 5 and checkpoints call the same: anywhere in a name if there is a dot before it,
# else at the beginning; up to the name's end if there is none behind it.
_RENAMED = (
    ("lm_head.", "embed_out."),  # GPT-NeoX
    (".mlp.", ".block_sparse_moe."),  # Mixtral, MiniMax
    (".mlp.router.", ".block_sparse_moe.gate."),  # PhiMoE
    (".experts.gate_up_proj", ".input_linear.weight"),  # GraniteMoE
    (".experts.down_proj", ".output_linear.weight"),
    (".router.weight", ".router.layer.weight"),
    (".experts.gate_up_proj", ".experts.fc1.weight"),  # Aria
    (".experts.down_proj", ".experts.fc2.weight"),
    (".mlp.gate.e_score_correction_bias", ".mlp.e_score_correction_bias"),  # EXAONE MoE
    (".mlp.gate.moe_statics.", ".mlp.moe_statics."),  # ERNIE 4.5
    ("model.language_model.", "language_model.model."),  # LLaVA, Gemma 3
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
)

# By the last part of a packed tensor's name, [experts, rows, columns]: the matrices of one expert
# that lie in it one below the other, as checkpoints of several families call them.
_PACKED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "gate_proj": (("gate_proj",), ("w1",)),
    "up_proj": (("up_proj",), ("w3",)),
    "down_proj": (("down_proj",), ("w2",)),
}
_PACKED_NAME = re.compile(rf"((?:.*\.)?experts)\.({'|'.join(_PACKED)})")
_MATRIX_NAME = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(\w+)\.weight")


def unwrapped(name: str) -> str:
    """The name of the same tensor in the model without its wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def other_names(name: str) -> Iterator[str]:
    """What a checkpoint may call a tensor of a model, or a model one of a checkpoint."""
    for pair in _RENAMED:
        for here, there in (pair, pair[::-1]):
            begin = name.find(here)
            if begin < 0 or (begin and not here.startswith(".")):
                continue
            if here.endswith(".") or begin + len(here) == len(name):
                yield name[:begin] + there + name[begin + len(here) :]


def matrices_per_expert(name: str) -> int:
    """How many matrices of each expert a tensor of this name packs; 0: it packs no experts."""
    packed = _PACKED_NAME.fullmatch(name)
    return len(_PACKED[packed[2]][0]) if packed else 0


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The matrices of all experts that a packed tensor holds, in the order in which they lie in it.

    Attributes:
        packed: The packed tensor.
        matrices: One matrix each, of equal shapes and dtypes.
    """

    packed: TensorSpec
    matrices: tuple[TensorSpec, ...]


def packed_from(name: str, specs: Mapping[str, TensorSpec]) -> ExpertMatrices | None:
    """The tensor of this name that packs those of ``specs``, if these are all there."""
    if (found := _PACKED_NAME.fullmatch(name)) is None:
        return None
    for kinds in _PACKED[found[2]]:
        matrices: list[TensorSpec] = []
        for expert in itertools.count():
            row = [specs.get(f"{found[1]}.{expert}.{kind}.weight") for kind in kinds]
            if None in row:
                break
            matrices += [spec for spec in row if spec is not None]
        if matrices and len({(s.dtype, s.shape, s.alias_of) for s in matrices}) == 1:
            first = matrices[0]
            if len(first.shape) == 2 and first.alias_of is None:
                shape = (len(matrices) // len(kinds), len(kinds) * first.shape[0], first.shape[1])
                packed = TensorSpec(name, first.dtype, shape)
                return ExpertMatrices(packed, tuple(matrices))
    return None


def matrices_in(packed: TensorSpec) -> ExpertMatrices | None:
    """The matrices of a tensor that packs them; None for any other."""
    found = _PACKED_NAME.fullmatch(packed.name)
    if found is None or len(packed.shape) != 3 or packed.alias_of is not None:
        return None
    kinds = _PACKED[found[2]][0]
    experts, rows, columns = packed.shape
    if rows % len(kinds):
        return None
    shape = (rows // len(kinds), columns)
    return ExpertMatrices(
        packed,
        tuple(
            TensorSpec(f"{found[1]}.{expert}.{kind}.weight", packed.dtype, shape)
            for expert in range(experts)
            for kind in kinds
        ),
    )


def packed_around(name: str) -> Iterator[tuple[str, str]]:
    """The packed tensors that may hold a matrix of this name, and what ``matrices_in`` calls it."""
    if (found := _MATRIX_NAME.fullmatch(name)) is None:
        return
    experts, expert, matrix = found.groups()
    for kind, namings in _PACKED.items():
        for naming in namings:
            if matrix in naming:
                known_as = namings[0][naming.index(matrix)]
                yield f"{experts}.{kind}", f"{experts}.{expert}.{known_as}.weight"

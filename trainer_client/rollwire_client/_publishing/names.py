"""The names that wrappers of a model give to its tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

# The parts of names that each of them inserts.
_WRAPPERS = {
    "module",  # DistributedDataParallel, DeepSpeed
    "_orig_mod",  # torch.compile
    "_fsdp_wrapped_module",  # FSDP
    "_checkpoint_wrapped_module",  # activation checkpointing
}


def unwrapped(name: str) -> str:
    """The name of the same tensor in the model without its wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def name_on_servers(name: str, wanted: Container[str]) -> str:
    """The one of the ``wanted`` names that a trainer's name stands for, or else this name."""
    if name in wanted or (plain := unwrapped(name)) not in wanted:
        return name
    return plain

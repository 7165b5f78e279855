"""Reads checkpoint folders: the tensors that SGLang's models load, and that updates bring."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rollwire_transport import TensorSpec, describe, tensor_digest

from rollwire_server.engines.base import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch
    from torch import Tensor

INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a checkpoint's safetensors files, one after the other."""
    from safetensors import safe_open

    for path in _files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no mapping
                yield name, file.get_tensor(name)


def describe_checkpoint(
    folder: Path, dtype: torch.dtype, device: torch.device
) -> tuple[list[TensorSpec], dict[str, int]]:
    """The tensors of a checkpoint in ``dtype``, and their digests, computed on ``device``.

    Tied embeddings are an alias, whether the files contain them or not. Raises EngineError with
    one line if the folder cannot be read.
    """
    specs: dict[str, TensorSpec] = {}
    digests: dict[str, int] = {}
    tied = _is_tied(folder)
    for name, stored in read_tensors(folder):
        if name == OUTPUT and tied:
            continue
        tensor = stored.to(device, dtype if stored.is_floating_point() else None)
        specs[name] = describe(name, tensor)
        digests[name] = tensor_digest(specs[name], tensor)
    if tied and INPUT in specs:
        of = specs[INPUT]
        specs[OUTPUT] = TensorSpec(OUTPUT, of.dtype, of.shape, alias_of=INPUT)
    return list(specs.values()), digests


def check_folder(folder: Path) -> None:
    """Raises EngineError with one line if this is not a checkpoint that SGLang can load."""
    if str(folder).startswith("builtin:"):
        raise EngineError(f"{folder} is a model of the built-in engine: SGLang takes a directory")
    if not folder.is_dir():
        raise EngineError(f"no model at {folder}: there is no such directory")
    if not (folder / "config.json").is_file():
        raise EngineError(f"no model at {folder}: it has no config.json")
    if not _files(folder):
        raise EngineError(f"no model at {folder}: it has no .safetensors files")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _is_tied(folder: Path) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return bool(config.get("tie_word_embeddings", False))

"""Reads a model from local files, or builds a built-in one; asks no hub."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.embedded.builtin import BUILTIN, build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.config import EmbeddedConfig


def read_model(config: EmbeddedConfig) -> PreTrainedModel:
    """The model of a configuration on the CPU; raises EngineError with one line if there is none
    that transformers can load as a causal language model.
    """
    dtype = _dtype(config.dtype)
    with quiet():
        if not config.model.startswith("builtin:"):
            return _read(Path(config.model), dtype)
        if config.model not in BUILTIN:
            known = ", ".join(sorted(BUILTIN))
            raise EngineError(f"unknown built-in model {config.model!r}; there are {known}")
        model = build(config.model)
        return model if dtype == "auto" else model.to(dtype)


def first_line(error: BaseException) -> str:
    """What an error says, as one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and advice out of the server's output."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _dtype(name: str) -> Any:
    """A torch.dtype, or "auto", as transformers takes it."""
    if name == "auto":
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise EngineError(f"{name!r} is not a floating-point dtype of torch")
    return dtype


def _read(path: Path, dtype: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if not path.is_dir():
        raise EngineError(f"no model at {path}: there is no such directory")
    if not (path / "config.json").is_file():
        raise EngineError(f"no model at {path}: it has no config.json")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise EngineError(f"cannot load the model at {path}: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise EngineError(
            f"the checkpoint at {path} lacks {len(missing)} of the model's tensors: "
            f"{', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}"
        )
    loaded: PreTrainedModel = model
    return loaded

"""Loads a model from local files and puts it behind this engine's attention."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollwire_server.engines.base import EngineError

from .attention import ATTENTION, UnservableModelError, attend
from .builtin import BUILTIN, build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

    from .config import EmbeddedConfig


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that serves.

    Attributes:
        model: Its attention is ``attention.attend``.
        vocab_size: Rows of its logits.
        eos_token_ids: Ascending.
        max_context: What its positions allow.
    """

    model: PreTrainedModel
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_context: int


def choose_device(name: str) -> torch.device:
    """The device that a configuration names; raises EngineError if it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {name!r} cannot be used: {_first_line(error)}") from error
    return device


def load_model(config: EmbeddedConfig, device: torch.device) -> LoadedModel:
    """Loads ``config.model``; raises EngineError with one line if it cannot be served."""
    dtype = _dtype(config.dtype)
    with _quiet():
        if config.model.startswith("builtin:"):
            if config.model not in BUILTIN:
                known = ", ".join(sorted(BUILTIN))
                raise EngineError(f"unknown built-in model {config.model!r}; there are {known}")
            model = build(config.model)
            model.to(dtype=torch.float32 if dtype == "auto" else dtype)
        else:
            model = _load_checkpoint(Path(config.model), dtype)
        model.to(device=device).eval().requires_grad_(requires_grad=False)
        _use_slot_attention(model, config.model)
    text = model.config.get_text_config()
    return LoadedModel(
        model=model,
        vocab_size=int(text.vocab_size),
        eos_token_ids=_eos_token_ids(model),
        max_context=_max_context(text),
    )


def _dtype(name: str) -> Any:
    if name == "auto":
        return name
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise EngineError(f"{name!r} is not a floating-point dtype of torch")
    return dtype


def _load_checkpoint(path: Path, dtype: Any) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    if not path.is_dir():
        raise EngineError(f"no model at {path}: there is no such directory")
    if not (path / "config.json").is_file():
        raise EngineError(f"no model at {path}: it has no config.json")
    try:
        model_config = AutoConfig.from_pretrained(path, local_files_only=True)
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            config=model_config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises whatever its many loaders raise
        raise EngineError(f"cannot load the model at {path}: {_first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise EngineError(
            f"the checkpoint at {path} lacks {len(missing)} tensors of the model, {missing[0]} first"
        )
    loaded: PreTrainedModel = model
    return loaded


def _use_slot_attention(model: PreTrainedModel, name: str) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, attend)
    try:
        model.set_attn_implementation(ATTENTION)
    except (ValueError, KeyError, ImportError) as error:
        raise EngineError(f"{name} cannot be served: {_first_line(error)}") from error
    if model.config._attn_implementation != ATTENTION:  # noqa: SLF001 - there is no other way to ask
        kind = type(model).__name__
        raise EngineError(f"{name} cannot be served: {kind} has an attention of its own")


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config().eos_token_id
    if ids is None:
        return ()
    return tuple(sorted({ids} if isinstance(ids, int) else set(ids)))


def _max_context(config: Any) -> int:
    context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # These turn every position differently once one sequence of the batch is longer.
        context = min(context, int(rope.get("original_max_position_embeddings", context)))
    return context


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


__all__ = ["LoadedModel", "UnservableModelError", "choose_device", "load_model"]

"""Reads models from local files or builds tiny ones, and names tensors as checkpoints do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rollwire_transport import matrices_per_expert

from rollwire_server.engines.base import EngineError
from rollwire_server.engines.memory import first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

BUILTIN = ("builtin:tiny", "builtin:tiny-moe")

_SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def build(name: str) -> PreTrainedModel:
    """A built-in model in fp32 on the CPU with the weights of seed 0."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    # The weights are drawn here, not by transformers, so that they are the same with each of its
    # releases and whatever other threads draw meanwhile. The process's random state stays as it is.
    with torch.random.fork_rng(devices=[]):
        if name == "builtin:tiny":
            model = Qwen2ForCausalLM(Qwen2Config(**_SHAPE, tie_word_embeddings=True))
        else:
            config = Qwen3MoeConfig(**_SHAPE, **_EXPERTS, tie_word_embeddings=False)
            model = Qwen3MoeForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02, generator=generator)
            else:
                parameter.fill_(0.0 if parameter_name.endswith("bias") else 1.0)
    built: PreTrainedModel = model
    return built


def read_model(name: str, dtype_name: str) -> PreTrainedModel:
    """A model on the CPU, from the directory ``name`` or built in."""
    from transformers.utils import logging

    # Its progress bars and advice are not for the server's output.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtype = getattr(torch, dtype_name, None) if dtype_name != "auto" else None
    if dtype_name != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise EngineError(f"{dtype_name!r} is not a floating-point dtype of torch")
    if not name.startswith("builtin:"):
        return _read(Path(name), dtype or "auto")
    if name not in BUILTIN:
        raise EngineError(f"unknown built-in model {name!r}; there are {', '.join(BUILTIN)}")
    return build(name).to(dtype or torch.float32)


def checkpoint_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Views of parameters and persistent buffers by their names in a checkpoint, with aliases."""
    # transformers keeps the experts of a layer in two tensors where checkpoints have three matrices
    # an expert. Only transformers knows how one becomes the other, so its own conversion runs on
    # stand-ins: a row of two equal numbers for each matrix. Where the conversion does more than
    # split and rename, the tensors keep the model's own names.
    from transformers.core_model_loading import revert_weight_conversion

    own = {name: tensor.detach() for name, tensor in hf.state_dict(keep_vars=True).items()}
    matrices: list[Tensor] = []
    stand_ins: dict[str, Tensor] = {}
    for name, tensor in own.items():
        stacked = _stacked(hf, name, tensor)
        rows = stacked.flatten(0, 1) if stacked is not None else tensor[None]
        numbers = torch.arange(len(matrices), len(matrices) + len(rows))
        lead = stacked.shape[:2] if stacked is not None else (1,) * (tensor.ndim - 1)
        stand_ins[name] = numbers.view(*lead, 1).expand(*lead, 2)
        matrices.extend(rows)

    tensors: list[tuple[int, str]] = []
    for name, stand_in in revert_weight_conversion(hf, stand_ins).items():
        first, *others = stand_in.flatten().tolist()
        if stand_in.shape[-1] != 2 or others != [first]:
            return own
        tensors.append((first, name))
    tensors.sort()
    if [number for number, _ in tensors] != list(range(len(matrices))):
        return own
    return {name: matrices[number] for number, name in tensors}


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


def _stacked(hf: PreTrainedModel, name: str, tensor: Tensor) -> Tensor | None:
    """A tensor that holds the matrices of all experts, as [experts, matrices, rows, columns]."""
    matrices = matrices_per_expert(name)
    module = hf.get_submodule(name.rpartition(".")[0])
    plain = getattr(module, "is_concatenated", False) and not getattr(module, "is_transposed", True)
    if not matrices or tensor.ndim != 3 or not plain:
        return None
    return tensor.view(tensor.shape[0], matrices, -1, tensor.shape[2])

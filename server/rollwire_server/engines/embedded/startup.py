"""From a configuration to a runner that serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollwire_server.engines.base import EngineError, EngineInfo, LogprobBasis

from .config import CPU_CONTEXT_CAP
from .model import choose_device, load_model
from .runner import Runner

if TYPE_CHECKING:
    from .config import EmbeddedConfig

MAX_TOP_LOGPROBS = 64


def start_runner(config: EmbeddedConfig, server_id: str) -> tuple[Runner, EngineInfo]:
    """Loads the model and sizes its cache; raises EngineError with one line if that fails."""
    device = choose_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    loaded = load_model(config, device)
    context = config.context_length or loaded.max_context
    if config.context_length is None and device.type == "cpu":
        context = min(context, CPU_CONTEXT_CAP)
    if context > loaded.max_context:
        raise EngineError(
            f"context length {context} is more than the {loaded.max_context} positions of the model"
        )
    exact = device.type == "cpu" and loaded.model.dtype == torch.float32
    runner = Runner(
        loaded,
        slots=config.max_running_sequences,
        context=context,
        prefill_tokens=config.prefill_tokens,
        batch_invariant=exact,
        server_id=server_id,
    )
    info = EngineInfo(
        engine="embedded",
        model=config.model,
        vocab_size=loaded.vocab_size,
        context_length=context,
        eos_token_ids=loaded.eos_token_ids,
        logprob_bases=frozenset(LogprobBasis),
        deterministic=exact,
        max_running_sequences=config.max_running_sequences,
        max_top_logprobs=min(MAX_TOP_LOGPROBS, loaded.vocab_size),
        routed_experts=False,
    )
    return runner, info

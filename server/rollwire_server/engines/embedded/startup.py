"""The engine's configuration, and how a runner is made from it: load, probe, size the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rollwire.types import LogprobBasis

from rollwire_server.engines.base import EngineError, EngineInfo
from rollwire_server.engines.embedded.checkpoint import first_line, read_model
from rollwire_server.engines.embedded.probe import probe
from rollwire_server.engines.embedded.runner import ModelRunner
from rollwire_server.engines.embedded.weights import StagingPlace, choose_staging

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.probe import ProbeResult

MAX_TOP_LOGPROBS = 64
SAMPLING_PARAMETERS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_new_tokens",
        "min_new_tokens",
        "stop_token_ids",
        "ignore_eos",
        "seed",
    }
)

CPU_CONTEXT_CAP = 4096
"""The longest context on a CPU, unless a longer one is configured."""

MIN_CONTEXT = 256
"""A shorter context than this must be configured explicitly."""

KV_SHARE = 0.5
"""The KV cache's share of the memory that is free beside the weights and a staged update."""


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """How to start an ``EmbeddedEngine``.

    Attributes:
        model: The directory of a Hugging Face checkpoint, ``builtin:tiny`` or ``builtin:tiny-moe``.
        dtype: Of the weights, as torch names it; "auto" is the checkpoint's own.
        device: As torch names it; "auto" is a CUDA device if there is one, else the CPU.
        max_running_sequences: Sequences sampled at the same time; the rest wait.
        context_length: Most prompt and output tokens of one sequence. None: the model's own limit,
            as far as memory for the KV cache allows (and at most 4096 on a CPU).
        prefill_tokens: Most prompt tokens that one step computes beside decoding.
        staging: Where an update waits for its commit.
        threads: torch's threads on a CPU. With two, small models on a busy machine are many times
            slower than with one.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    max_running_sequences: int = 64
    context_length: int | None = None
    prefill_tokens: int = 2048
    staging: StagingPlace = StagingPlace.AUTO
    threads: int = 1


def start_runner(config: EmbeddedConfig, server_id: str) -> tuple[ModelRunner, EngineInfo]:
    """Loads the model and sizes its cache; raises EngineError with a one-line message."""
    device = _device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(config.threads)
    hf = read_model(config.model, config.dtype).eval().requires_grad_(requires_grad=False)
    try:
        return _start(config, server_id, hf.to(device))
    except torch.OutOfMemoryError as error:
        message = f"{config.model} does not fit on {device}: {first_line(error)}"
        raise EngineError(message) from error


def _start(
    config: EmbeddedConfig, server_id: str, hf: PreTrainedModel
) -> tuple[ModelRunner, EngineInfo]:
    result = probe(hf)
    model = result.model
    staging = choose_staging(
        config.staging, model.device, _weight_bytes(hf), _free_bytes(model.device)
    )
    context = _context_length(config, result, staging)
    runner = ModelRunner(
        model,
        result.cache.resized(config.max_running_sequences, context),
        lambda: read_model(config.model, config.dtype),
        context=context,
        prefill_tokens=config.prefill_tokens,
        staging=staging,
        server_id=server_id,
    )
    info = EngineInfo(
        engine="embedded",
        model=config.model,
        device=model.device,
        staging="host" if staging is StagingPlace.HOST else "device",
        staging_bytes=runner.weights.nbytes,
        vocab_size=model.vocab_size,
        context_length=context,
        eos_token_ids=model.eos_token_ids,
        logprob_bases=frozenset(LogprobBasis),
        deterministic=result.deterministic,
        max_running_sequences=config.max_running_sequences,
        max_top_logprobs=min(MAX_TOP_LOGPROBS, model.vocab_size),
        routed_experts=runner.routing is not None,
        sampling_parameters=SAMPLING_PARAMETERS,
    )
    return runner, info


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"device {name!r} cannot be used: {first_line(error)}") from error
    return device


def _context_length(config: EmbeddedConfig, result: ProbeResult, staging: StagingPlace) -> int:
    """What is configured, or what the model, the memory and CPU_CONTEXT_CAP allow."""
    model = result.model
    slots = config.max_running_sequences
    staged_beside = model.device.type == "cpu" or staging is not StagingPlace.HOST
    staged = _weight_bytes(model.hf) if staged_beside else 0
    free = int(KV_SHARE * max(0, _free_bytes(model.device) - staged))
    small = result.cache
    kv_bytes_per_token = small.nbytes // (small.slots * small.context)
    fits = free // (slots * kv_bytes_per_token)
    limit = f"the KV cache may take {free >> 20} MiB, which is {fits} tokens for each of {slots}"
    if config.context_length is not None:
        if config.context_length > result.max_context:
            raise EngineError(
                f"a context of {config.context_length} tokens is more than the model's "
                f"{result.max_context}"
            )
        if config.context_length > fits:
            raise EngineError(
                f"a context of {config.context_length} tokens does not fit: {limit} running "
                "sequences; ask for less of either"
            )
        return config.context_length
    longest = result.max_context
    if model.device.type == "cpu":
        longest = min(longest, CPU_CONTEXT_CAP)
    if fits < min(longest, MIN_CONTEXT):
        raise EngineError(f"{limit} running sequences; run fewer of them")
    return min(longest, fits)


def _weight_bytes(hf: PreTrainedModel) -> int:
    return sum(parameter.nbytes for parameter in hf.parameters())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if (meminfo := Path("/proc/meminfo")).exists():
        available = meminfo.read_text().partition("MemAvailable:")[2]
        free = int(available.split()[0]) << 10
    group = Path("/sys/fs/cgroup")  # a container's limit
    limit = group / "memory.max"
    if limit.exists() and (maximum := limit.read_text().strip()) != "max":
        free = min(free, int(maximum) - int((group / "memory.current").read_text()))
    return free

"""Makes a runner of a configuration: loads the model, probes it, and sizes its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rollwire.types import LogprobBasis
from rollwire_transport import free_memory

from rollwire_server.engines.base import SAMPLING_PARAMETERS, EngineError, EngineInfo
from rollwire_server.engines.embedded.batch import KvCache, PrefillChunk, pack
from rollwire_server.engines.embedded.checkpoint import read_model
from rollwire_server.engines.embedded.model import PackedModel, is_batch_invariant
from rollwire_server.engines.embedded.runner import ModelRunner
from rollwire_server.engines.embedded.weights import choose_staging
from rollwire_server.engines.memory import first_line

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from rollwire_server.engines.embedded.weights import Staging

MAX_TOP_LOGPROBS = 64

CPU_CONTEXT_CAP = 4096  # unless a longer one is configured
MIN_CONTEXT = 256  # unless a shorter one is configured
KV_SHARE = 0.5  # of the memory that is free beside the weights and a staged update
PROBED, DECODED = 40, 12  # tokens that a probe computes, the last of them one at a time


@dataclass(frozen=True, slots=True)
class EmbeddedConfig:
    """How to start an ``EmbeddedEngine``; see ``ServerSettings``."""

    model: str  # the directory of a Hugging Face checkpoint, or a built-in model
    dtype: str = "auto"  # as torch names it; "auto" is the checkpoint's own
    device: str = "auto"  # as torch names it; "auto" is a CUDA device if there is one
    max_running_sequences: int = 64
    context_length: int | None = None  # None: the model's, as far as there is memory for it
    prefill_tokens: int = 2048  # the most that one step computes beside decoding
    staging: Staging = "auto"
    threads: int = 1  # with two, small models on a busy machine are many times slower


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
    model, probed_cache, max_context, deterministic = _probe(hf)
    weight_bytes, free_bytes = sum(p.nbytes for p in hf.parameters()), free_memory(model.device)
    staging = choose_staging(config.staging, model.device, weight_bytes, free_bytes)
    staged_beside = model.device.type == "cpu" or staging != "host"
    kv_bytes = int(KV_SHARE * max(0, free_bytes - (weight_bytes if staged_beside else 0)))
    context = _context_length(config, model.device, probed_cache, max_context, kv_bytes)
    runner = ModelRunner(
        model,
        probed_cache.resized(config.max_running_sequences, context),
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
        staging="host" if staging == "host" else "device",
        staging_bytes=runner.weights.nbytes,
        vocab_size=model.vocab_size,
        context_length=context,
        eos_token_ids=model.eos_token_ids,
        logprob_bases=frozenset(LogprobBasis),
        deterministic=deterministic,
        max_running_sequences=config.max_running_sequences,
        max_top_logprobs=min(MAX_TOP_LOGPROBS, model.vocab_size),
        routed_experts=runner.routing is not None,
        sampling_parameters=SAMPLING_PARAMETERS | {"min_new_tokens"},
        deltas=runner.weights.takes_deltas,
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


def _context_length(
    config: EmbeddedConfig, device: torch.device, probed: KvCache, max_context: int, kv_bytes: int
) -> int:
    """What is configured, or what the model, the memory and CPU_CONTEXT_CAP allow."""
    slots = config.max_running_sequences
    bytes_per_token = probed.nbytes // (probed.slots * probed.context)
    fits = kv_bytes // (slots * bytes_per_token)
    limit = (
        f"the KV cache may take {kv_bytes >> 20} MiB, which is {fits} tokens for each of {slots}"
    )
    if config.context_length is not None:
        if config.context_length > max_context:
            raise EngineError(
                f"a context of {config.context_length} tokens is more than the model's "
                f"{max_context}"
            )
        if config.context_length > fits:
            raise EngineError(
                f"a context of {config.context_length} tokens does not fit: {limit} running "
                "sequences: lower --context-length or --max-running"
            )
        return config.context_length
    longest = min(max_context, CPU_CONTEXT_CAP) if device.type == "cpu" else max_context
    if fits < min(longest, MIN_CONTEXT):
        raise EngineError(f"{limit} running sequences: lower --max-running")
    return min(longest, fits)


@torch.inference_mode()
def _probe(hf: PreTrainedModel) -> tuple[PackedModel, KvCache, int, bool]:
    """Gives a model this engine's attention; raises EngineError if its results then differ.

    Also returns a small cache with the model's layers, the longest context that the model allows,
    and whether its results are the same in any batch, bit for bit.
    """
    kind = type(hf).__name__
    config = hf.config.get_text_config()
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(3, 4 * PROBED))
    nothing = np.empty(0, dtype=np.int64)
    try:
        ids = torch.from_numpy(tokens[:1, :PROBED]).to(hf.device)
        expected = hf(input_ids=ids, use_cache=False).logits[0].float()
        model = PackedModel(hf)
        cache = KvCache(3, tokens.shape[1], hf.device)
        chunks = [PrefillChunk(0, 0, PROBED)]
        batch, *_ = pack(cache, tokens, nothing, nothing, chunks, model.row_step)
        packed = model.logits(batch, np.arange(PROBED))
    except (EngineError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # models break in their own ways
        raise EngineError(f"{kind} cannot be served: {first_line(error)}") from error
    spread = (expected - expected.mean(-1, keepdim=True)).norm()
    off = float((packed - expected).norm() / spread.clamp(min=1e-30))
    if not off <= (1e-4 if hf.dtype is torch.float32 else 0.05):
        raise EngineError(
            f"{kind} cannot be served: in a packed batch its logits are off by {off:.1%} of their "
            "spread"
        )
    context = _max_context(config, batch.windows)
    deterministic = is_batch_invariant(hf.dtype, hf.device) and _is_deterministic(
        model, cache, tokens[:, :context], packed
    )
    return model, cache, context, deterministic


def _max_context(config: Any, windows: set[int | None]) -> int:
    """The context that a model's configuration allows; its layers asked for ``windows``."""
    context = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            # Beyond their original length these rotate all positions of a batch differently.
            context = min(context, int(parameters["original_max_position_embeddings"]))
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if window and sliding and windows == {None}:
        context = min(context, int(window))  # the model applies its window by a mask of its own
    return context


def _is_deterministic(
    model: PackedModel, cache: KvCache, tokens: np.ndarray, expected: Tensor
) -> bool:
    """Whether the first tokens of slot 0 give the same logits again, bit for bit, when computed in
    slot 1, in pieces, beside a longer sequence.
    """
    tokens = tokens.copy()
    tokens[1] = tokens[0]
    decoded_from = PROBED - DECODED
    third = decoded_from // 3
    longer = tokens.shape[1] - DECODED
    nothing = np.empty(0, dtype=np.int64)
    pieces = []
    for chunks in (
        [PrefillChunk(1, 0, third), PrefillChunk(2, 0, longer)],
        [PrefillChunk(1, third, decoded_from)],
    ):
        batch, *_ = pack(cache, tokens, nothing, nothing, chunks, model.row_step)
        pieces.append(model.logits(batch, np.arange(chunks[0].end - chunks[0].start)))
    for step in range(DECODED):
        slots = np.array([1, 2] if step % 2 else [1])
        last = np.array([decoded_from + step, longer + step])[: len(slots)]
        batch, *_ = pack(cache, tokens, slots, last, [], model.row_step)
        pieces.append(model.logits(batch, np.array([0])))
    return torch.equal(torch.cat(pieces), expected)

"""The contract on each engine: how it is started, and what it cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = {
    "embedded": [],
    "synthetic": ["--model", "none", "--engine-arg", "tokens-per-second=500"],
    "sglang": ["--dtype", "float32", "--engine-arg", "enable-deterministic-inference=true"],
}


def flags(engine: str, folder: Path, model: str = "builtin:tiny") -> list[str]:
    """How an engine is started with a built-in model; ``folder`` is for a checkpoint of it."""
    if engine != "sglang":
        return [*FLAGS[engine], *(("--model", model) if engine == "embedded" else ())]
    from rollwire_server.engines.embedded.checkpoint import build

    build(model).save_pretrained(folder / "model")
    return ["--model", str(folder / "model"), *FLAGS[engine]]


_NO_MODEL = "it has no model: its log-probabilities are those of equal logits"
_NO_SHAPE = "it takes what shapes a distribution, so that a load test may send it, and has none"
_NO_MINIMUM = "SGLang counts min_new_tokens with a tokenizer, and has none here: it is refused"
_NO_MIN_P = "SGLang's sampler has no min-p in the mode that honours seeds: it is refused"
_NO_SCALED = "SGLang never divides the prompt's logits by the temperature: it is refused"
_NO_ROUTING = "SGLang reports routing on GPUs only"
_LATE_ROUTING = "SGLang reports routing when a sequence has ended there, which an abort is ahead of"
_NO_CACHE = "it has no KV cache to share"

# By engine, with the reason: a case, one of its parameters, or a whole file.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "embedded": {},
    "sglang": {
        "test_an_abort_keeps_what_was_told": _LATE_ROUTING,
        "test_min_new_tokens_keeps_stop_tokens_away": _NO_MINIMUM,
        "test_logprobs_are_of_the_basis_that_was_asked_for[TEMPERATURE-0.6]": _NO_SCALED,
        "test_logprobs_are_of_the_basis_that_was_asked_for[TEMPERATURE-1.7]": _NO_SCALED,
        "test_only_what_truncation_leaves_is_drawn[0-1.0-0.4]": _NO_MIN_P,
        "test_only_what_truncation_leaves_is_drawn[50-0.8-0.1]": _NO_MIN_P,
        "test_min_new_tokens_counts_what_came_before_an_interruption": _NO_MINIMUM,
    },
    "synthetic": {
        "test_experts.py": "it has no experts",
        "test_end_tokens.py": _NO_MODEL,
        "test_prefix_cache.py": _NO_CACHE,
        "test_sampling.py": _NO_MODEL,
        "test_top_and_prompt_logprobs": _NO_MODEL,
        **{
            "test_a_sampling_parameter_changes_what_is_sampled_or_is_refused_by_name"
            f"[{name}]": _NO_SHAPE
            for name in ("temperature", "top_p", "top_k", "min_p")
        },
        "test_a_sequence_goes_on_under_the_new_policy_which_computes_all_anew": _NO_MODEL,
        "test_kept_keys_and_values_are_owned_up_to": _NO_MODEL,
        "test_a_sequence_whose_keys_get_too_old_goes_on_as_under_the_new_policy": _NO_MODEL,
        "test_a_manifest_that_does_not_fit_names_every_tensor": "it has one tensor",
    },
}

# How far log-probabilities in fp32 may lie from those of the model here, if not 1e-4.
NEAR: dict[str, float] = {}

if torch.cuda.is_available():
    NEAR["sglang"] = 3e-2  # there its kernels, which are Triton's, multiply as TF32 does
else:
    EXCEPTIONS["sglang"]["test_experts.py"] = _NO_ROUTING

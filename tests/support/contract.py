"""The contract on each engine: how it is started, and what it cannot do."""

from __future__ import annotations

FLAGS = {
    "embedded": ["--model", "builtin:tiny"],
    "synthetic": ["--model", "none", "--engine-arg", "tokens-per-second=2000"],
}

_NO_MODEL = "it has no model: its log-probabilities are those of equal logits"
_NO_CACHE = "it has no KV cache to share"

# By engine, with the reason: a case, or a whole file of them.
EXCEPTIONS: dict[str, dict[str, str]] = {
    "embedded": {},
    "synthetic": {
        "test_experts.py": "it has no experts",
        "test_prefix_cache.py": _NO_CACHE,
        "test_sampling.py": _NO_MODEL,
        "test_top_and_prompt_logprobs": _NO_MODEL,
        "test_a_sequence_goes_on_under_the_new_policy_which_computes_all_anew": _NO_MODEL,
        "test_kept_keys_and_values_are_owned_up_to": _NO_MODEL,
        "test_a_manifest_that_does_not_fit_names_every_tensor": "it has one tensor",
    },
}

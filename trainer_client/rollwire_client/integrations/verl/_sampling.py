"""verl's sampling parameters and outputs, as rollwire's."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol

from rollwire.types import FinishReason

from rollwire_client._data import Sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollwire_client._trajectory import Trajectory

# Parameters without effect at these values, which rollwire does not have otherwise.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None),
    "presence_penalty": (0.0, None),
    "frequency_penalty": (0.0, None),
    "n": (1, None),
    "prompt_logprobs": (None, False),
    "stop": (None, "", [], ()),
}


class RolloutConfig(Protocol):
    """What is read of verl's."""

    prompt_length: int
    response_length: int
    repetition_penalty: float
    ignore_eos: bool
    full_determinism: bool
    seed: int


def sampling(
    params: Mapping[str, Any], config: RolloutConfig, prompt_length: int, request_id: str
) -> tuple[Sampling, bool]:
    """How to sample, and whether log-probabilities are wanted.

    As in verl's own servers, the limit is by default what the configured lengths leave, and at
    least one token.

    Raises:
        ValueError: rollwire does not have a parameter.
    """
    given = {"repetition_penalty": config.repetition_penalty, **params}
    room = config.prompt_length + config.response_length - prompt_length
    limit = given.pop("max_new_tokens", None)
    limit = given.pop("max_tokens", limit)
    seed = given.pop("seed", None)
    if seed is None and config.full_determinism:
        seed = _seed(config.seed, request_id, prompt_length)
    with_logprobs = given.pop("logprobs", None)
    made = Sampling(
        temperature=given.pop("temperature", 1.0),
        top_p=given.pop("top_p", 1.0),
        top_k=given.pop("top_k", 0),
        min_p=given.pop("min_p", None) or 0.0,
        max_new_tokens=max(1, min(config.response_length, room) if limit is None else limit),
        min_new_tokens=given.pop("min_tokens", None) or 0,
        stop_token_ids=tuple(given.pop("stop_token_ids", None) or ()),
        ignore_eos=given.pop("ignore_eos", config.ignore_eos),
        seed=seed,
    )
    for name, value in given.items():
        if name not in _NEUTRAL:
            raise ValueError(f"rollwire has no sampling parameter {name} ({value!r})")
        if value not in _NEUTRAL[name]:
            raise ValueError(f"rollwire cannot do {name}={value!r}: leave it out")
    return made, with_logprobs is not None and with_logprobs is not False


def _seed(seed: int, request_id: str, prompt_length: int) -> int:
    """Another one for each turn of each request: one seed makes the same draws again."""
    text = f"{seed}/{request_id}/{prompt_length}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def output(trajectory: Trajectory, *, with_logprobs: bool) -> dict[str, Any]:
    """The fields of verl's ``TokenOutput``.

    ``global_steps`` is the oldest version that sampled a token, since verl's
    ``FullyAsyncLLMServerClient`` takes it for both ends of the range.
    """
    versions = [segment.weights.version for segment in trajectory.segments]
    known = [version for version in versions if version is not None]
    oldest, newest = min(known, default=None), max(known, default=None)
    finish = trajectory.finish
    complete = finish is not None and finish.reason in {FinishReason.STOP, FinishReason.LENGTH}
    return {
        "token_ids": list(trajectory.token_ids),
        "log_probs": list(trajectory.logprobs) if with_logprobs else None,
        "stop_reason": "completed" if complete else "aborted",
        "num_preempted": max(len(trajectory.segments) - 1, 0),
        "extra_fields": {
            "global_steps": oldest,
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "num_cached_tokens": None if finish is None else finish.cached_prompt_tokens,
        },
    }

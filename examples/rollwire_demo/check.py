"""Checks labels and log-probabilities against the weights that the labels name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rollwire_demo.results import TOLERANCE, CheckResult
from rollwire_demo.trainer import logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollwire_client import Trajectory
    from torch import Tensor


def check_labels(
    model: Any,
    trajectories: Sequence[Trajectory],
    weights: Mapping[int | None, Mapping[str, Tensor]],
    digests: Mapping[int | None, int],
) -> CheckResult:
    """Compares tags with what was published, and scores every token again.

    A token's log-probability is computed by a plain forward over its whole prefix, with the weights
    of the version that its tag names.

    Args:
        model: A causal LM of the policy's shape; its weights are overwritten.
        trajectories: What to check.
        weights: The policy by version; None is the initial checkpoint.
        digests: Of what was published, by version.
    """
    problems = [problem for t in trajectories for problem in _wrong_tags(t, weights, digests)]
    tokens, worst = 0, 0.0
    model.eval()
    versions = {version for t in trajectories for version in t.versions} & weights.keys()
    for version in versions:
        model.load_state_dict(weights[version])
        for trajectory in trajectories:
            errors = _errors(model, trajectory, version)
            if not len(errors):
                continue
            tokens += len(errors)
            error = errors.nan_to_num(torch.inf).max().item()
            worst = max(worst, error)
            if error > TOLERANCE:
                problems.append(
                    f"sequence {trajectory.request_id}: a token tagged {_named(version)} has not "
                    f"the log-probability which that gives it, but one {error:.2g} off"
                )
    return CheckResult(len(trajectories), tokens, len(versions), worst, tuple(problems))


def _wrong_tags(
    trajectory: Trajectory,
    weights: Mapping[int | None, Mapping[str, Tensor]],
    digests: Mapping[int | None, int],
) -> Iterator[str]:
    for segment in trajectory.segments:
        tag = segment.weights
        prefix = f"sequence {trajectory.request_id}: tagged {_named(tag.version)}"
        if tag.version not in weights:
            yield f"{prefix}, which was never published"
        elif digests.get(tag.version, tag.digest) != tag.digest:
            yield (
                f"{prefix} with digest {tag.digest:016x}; published was {digests[tag.version]:016x}"
            )
        if segment.oldest_kv_revision != tag.revision:
            yield (
                f"{prefix}, revision {tag.revision}, but read keys and values of revision "
                f"{segment.oldest_kv_revision}"
            )


@torch.no_grad()
def _errors(model: Any, trajectory: Trajectory, version: int | None) -> Tensor:
    """Of the trajectory's tokens of this version, which the model has."""
    chosen = torch.tensor([v == version for v in trajectory.versions], dtype=torch.bool)
    if not chosen.any():
        return torch.empty(0)
    token_ids = torch.tensor([trajectory.prompt_ids + trajectory.token_ids])
    scored, _ = logprobs(model, token_ids, len(trajectory.token_ids))
    return (scored[0] - torch.tensor(trajectory.logprobs)).abs()[chosen]


def _named(version: int | None) -> str:
    return "as the initial checkpoint" if version is None else f"version {version}"

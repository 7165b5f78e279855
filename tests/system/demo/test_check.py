"""The check: it passes what is right, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from rollwire_client import Finish, FinishReason, Segment, Trajectory, WeightTag
from rollwire_demo.report import TOLERANCE
from rollwire_demo.trainer import check_labels, make_policy, snapshot
from torch import Tensor

LENGTH = 24
DIGESTS: dict[int | None, int] = {1: 111, 2: 222, 3: 333}

Weights = dict[int | None, dict[str, Tensor]]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return make_policy(0)


@pytest.fixture(scope="module")
def weights(model: Any) -> Weights:
    """Versions as an optimizer's small steps make them."""
    generator = torch.Generator().manual_seed(0)
    versions: Weights = {None: snapshot(model)}
    for version in (1, 2, 3):
        before = versions[version - 1 or None]
        versions[version] = {
            name: tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)
            for name, tensor in before.items()
        }
    return versions


@pytest.fixture(scope="module")
def trajectory(model: Any, weights: Weights) -> Trajectory:
    """Sampled token by token under the initial checkpoint, then version 1, 2 and 3."""
    generator = torch.Generator().manual_seed(1)
    token_ids, chosen, segments = [26, 3, 1, 4, 27], [], []
    for start, version in zip(range(0, LENGTH, 6), (None, 1, 2, 3), strict=True):
        model.load_state_dict(weights[version])
        for _ in range(6):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
            distribution = logits.log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=generator))
            token_ids.append(token)
            chosen.append(distribution[token].item())
        revision = version or 0
        tag = WeightTag(version, revision, "s", DIGESTS.get(version, 0))
        segments.append(Segment(start, start + 6, tag, revision))
    finish = Finish(FinishReason.LENGTH)
    output = tuple(token_ids[5:])
    return Trajectory(
        "a", tuple(token_ids[:5]), output, tuple(chosen), tuple(segments), finish, ("s",)
    )


def retagged(trajectory: Trajectory, index: int, tag: WeightTag) -> Trajectory:
    segments = list(trajectory.segments)
    segments[index] = replace(segments[index], weights=tag, oldest_kv_revision=tag.revision)
    return replace(trajectory, segments=tuple(segments))


def test_honest_labels_pass(model: Any, weights: Weights, trajectory: Trajectory) -> None:
    result = check_labels(model, [trajectory], weights, DIGESTS)
    assert result.problems == ()
    assert result.worst_error <= TOLERANCE
    assert (result.sequences, result.tokens, result.versions) == (1, LENGTH, 4)


def test_tags_shifted_by_one_version_fail(
    model: Any, weights: Weights, trajectory: Trajectory
) -> None:
    tags = [segment.weights for segment in trajectory.segments]
    shifted = trajectory
    for index in (1, 2, 3):
        shifted = retagged(shifted, index, tags[index - 1])
    result = check_labels(model, [trajectory, shifted], weights, DIGESTS)
    assert result.worst_error > TOLERANCE
    assert result.problems


def test_one_token_under_the_version_before_its_tag_fails(
    model: Any, weights: Weights, trajectory: Trajectory
) -> None:
    first, second, *rest = trajectory.segments
    moved = (replace(first, end=first.end - 1), replace(second, start=second.start - 1), *rest)
    result = check_labels(model, [replace(trajectory, segments=moved)], weights, DIGESTS)
    assert result.worst_error > TOLERANCE
    assert "tagged version 1" in result.problems[0]


def test_another_content_under_the_same_version_fails(
    model: Any, weights: Weights, trajectory: Trajectory
) -> None:
    other = retagged(trajectory, 2, replace(trajectory.segments[2].weights, digest=5))
    result = check_labels(model, [other], weights, DIGESTS)
    assert result.worst_error <= TOLERANCE
    assert "00000000000000de was published" in result.problems[0]


def test_a_version_that_was_never_published_fails(
    model: Any, weights: Weights, trajectory: Trajectory
) -> None:
    unknown = retagged(trajectory, 3, replace(trajectory.segments[3].weights, version=9))
    result = check_labels(model, [unknown], weights, DIGESTS)
    assert "tagged version 9, which was never published" in result.problems[0]


def test_keys_and_values_of_an_older_policy_fail(
    model: Any, weights: Weights, trajectory: Trajectory
) -> None:
    kept = replace(trajectory.segments[2], oldest_kv_revision=1)
    stale = replace(trajectory, segments=(*trajectory.segments[:2], kept, *trajectory.segments[3:]))
    result = check_labels(model, [stale], weights, DIGESTS)
    assert "read keys and values of revision 1" in result.problems[0]


def test_what_is_not_a_number_fails(model: Any, weights: Weights, trajectory: Trajectory) -> None:
    broken = replace(trajectory, logprobs=(float("nan"), *trajectory.logprobs[1:]))
    result = check_labels(model, [broken], weights, DIGESTS)
    assert result.worst_error == float("inf")
    assert result.problems

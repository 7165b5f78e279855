"""Lag counts the steps of a run, whatever their labels do."""

from __future__ import annotations

import math

import pytest
from rollwire_client import WeightTag
from rollwire_client._batches.trainer_steps import REMEMBERED, TrainerStep, TrainerSteps


def tag(version: int | None, digest: int = 0) -> WeightTag:
    return WeightTag(version, 1, "any", digest)


def published(steps: TrainerSteps, *versions: int, digest: int = 0) -> None:
    """The trainer publishes each and goes on with it."""
    for version in versions:
        steps.add_published(tag(version, digest))
        steps.reach(version)


def lags(steps: TrainerSteps, *versions: int) -> list[float]:
    return [steps.lag(tag(version)) for version in versions]


def test_a_publish_is_one_step_wherever_its_number_jumps_to() -> None:
    steps = TrainerSteps()
    published(steps, 4, 5, 10)
    assert lags(steps, 10, 5, 4) == [0, 1, 2]
    assert [steps.oldest_version(n) for n in (0, 1, 2)] == [10, 5, 4]


def test_going_on_from_what_was_saved_is_one_step() -> None:
    before = TrainerSteps()
    published(before, 3, 4, 5)
    for resumes in (
        lambda steps: published(steps, 10),
        lambda steps: steps.reach(10),  # published by somebody else
    ):
        steps = TrainerSteps(before.saved(), 5)
        resumes(steps)
        assert lags(steps, 10, 5, 4, 3) == [0, 1, 2, 3]
        assert lags(steps, 6, 9) == [1, 1]  # of the life that was lost
        steps.reach(12)
        assert lags(steps, 10, 5) == [2, 3]


def test_what_an_older_release_saved_counts_back_from_its_version() -> None:
    steps = TrainerSteps((), 5)
    published(steps, 10)
    assert lags(steps, 10, 5, 4, 3) == [0, 1, 2, 3]


def test_versions_that_others_publish_are_counted_by_their_labels() -> None:
    steps = TrainerSteps()
    steps.reach(5)
    assert lags(steps, 7, 5, 4, 1) == [0, 0, 1, 4]
    assert steps.oldest_version(3) == 2
    steps.reach(8)
    assert lags(steps, 8, 7, 6, 5, 4) == [0, 1, 2, 3, 4]
    assert steps.oldest_version(2) == 6
    steps.reach(8)
    assert lags(steps, 5) == [3]


def test_a_rollback_is_one_step() -> None:
    steps = TrainerSteps()
    published(steps, 8, 9, 10)
    published(steps, 5, digest=1)
    assert lags(steps, 10, 9, 8) == [1, 2, 3]
    assert steps.lag(tag(5, 1)) == 0
    assert steps.oldest_version(2) == 5
    # The same label comes again for other weights: it is the digest that tells.
    published(steps, 9, digest=1)
    assert steps.lag(tag(9, 1)) == 0
    assert steps.lag(tag(9, 0)) == 3


def test_the_very_weights_that_were_published_again_are_of_now() -> None:
    steps = TrainerSteps()
    published(steps, 5, 6, 7, 5)
    assert lags(steps, 5, 7, 6) == [0, 1, 2]


def test_what_the_trainer_has_published_ahead_is_not_behind() -> None:
    steps = TrainerSteps()
    published(steps, 1, 2)
    steps.add_published(tag(3))
    steps.reach(2)
    assert lags(steps, 3, 2, 1) == [-1, 0, 1]


def test_a_version_falls_only_if_it_is_published() -> None:
    steps = TrainerSteps()
    published(steps, 8, 9)
    for lower in (8, 7):
        with pytest.raises(ValueError, match="versions rise unless servers are rolled back"):
            steps.reach(lower)
    assert lags(steps, 9, 8) == [0, 1]


def test_weights_without_a_version_are_behind_anything() -> None:
    steps = TrainerSteps()
    published(steps, 1)
    steps.add_published(tag(None, 9))
    published(steps, 2)
    assert steps.lag(tag(None, 9)) == math.inf
    assert lags(steps, 1) == [2]
    assert steps.oldest_version(2) == 1


def test_of_a_long_run_the_latest_steps_are_known() -> None:
    steps = TrainerSteps()
    count = REMEMBERED + 5
    published(steps, *range(0, 10 * count, 10))
    newest = 10 * (count - 1)
    assert lags(steps, newest, newest - 10, newest - 50) == [0, 1, 5]
    assert lags(steps, 0) > [REMEMBERED]
    saved = steps.saved()
    assert len(saved) == REMEMBERED
    assert saved[-1] == TrainerStep(count - 1, newest, 0)

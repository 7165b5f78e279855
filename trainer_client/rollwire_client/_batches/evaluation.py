"""Samples of one policy, whole: nothing is left out silently, nothing is of two versions."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import DropReason, Evaluation, Group, Part
from rollwire_client._batches.group import is_final, reason_of, sample_group
from rollwire_client._batches.pool import Pool
from rollwire_client._batches.progress_bar import Bar
from rollwire_client._concurrency.tasks import cancel_all
from rollwire_client._errors import CallbackError, InvalidRequestError, WeightVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire.types import WeightTag

    from rollwire_client._batches.batch import Prompt
    from rollwire_client._batches.group import LiveGroup, Recipe

logger = logging.getLogger(__name__)

AT_ONCE = 1024  # sequences
_FAILURES = 8  # of the caller's function, before anything else came


async def evaluate(
    recipe: Recipe, prompts: Sequence[Prompt], version: int | None, *, bar: bool
) -> Evaluation:
    """See ``Batcher.evaluate``."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    if version is not None:
        recipe = replace(recipe, options={**recipe.options, "max_weight_version": version})
    groups = _groups(recipe, prompts)
    places = asyncio.Semaphore(max(AT_ONCE // recipe.size, 1))

    async def sample(place: int, group: LiveGroup | Group) -> Group:
        if isinstance(group, Group):
            return group
        group.oldest_version = version
        async with places:
            try:
                await sample_group(group, recipe)
            except Exception as error:
                return _failed(place, group, error)
        return group.snapshot()

    tasks = [asyncio.create_task(sample(place, group)) for place, group in enumerate(groups)]
    with Bar("evaluation", len(tasks), wanted=bar) as shown:
        try:
            failed = 0
            for done, task in enumerate(asyncio.as_completed(tasks), 1):
                error = (await task).error
                failed += error is not None
                if failed == done == _FAILURES and isinstance(error, CallbackError):
                    raise error  # as it would of all the others
                shown.show(done)
        finally:
            await cancel_all(tasks)
    outcomes = [task.result() for task in tasks]
    samples = Part(tuple(group for group in outcomes if group.dropped is None))
    left_out = Part(tuple(group for group in outcomes if group.dropped is not None))
    for group in left_out.groups:
        if group.error is not None and not samples.groups:
            raise group.error
    weights = _weights(samples)
    return Evaluation(
        version=weights.version if weights is not None else None,
        digest=weights.digest if weights is not None else None,
        samples=samples,
        seconds=clock() - begun,
        failed=left_out,
    )


def _groups(recipe: Recipe, prompts: Sequence[Prompt]) -> list[LiveGroup | Group]:
    """One for each prompt; one that cannot be sampled is dropped already."""
    pool = Pool(recipe)
    groups: list[LiveGroup | Group] = []
    for place, prompt in enumerate(prompts):
        try:
            groups.append(pool.add(prompt))
        except InvalidRequestError as error:
            _tell(place, prompt, DropReason.FAILED, error)
            groups.append(Group(prompt, (), DropReason.FAILED, error))
        except Exception as error:
            error.add_note(f"It is prompt {place} of the evaluation.")
            raise
    return groups


def _failed(place: int, group: LiveGroup, error: Exception) -> Group:
    """A group that could not be had; raises what ends the others too."""
    if not is_final(error):
        error.add_note(f"It was met at prompt {place} of the evaluation, {group.prompt.id!r}.")
        raise error
    why = reason_of(error)
    _tell(place, group.prompt, why, error)
    return group.snapshot(why, error)


def _tell(place: int, prompt: Prompt, why: DropReason, error: Exception) -> None:
    logger.warning(
        "prompt %d of the evaluation, %r, is left out as %s: %s", place, prompt.id, why.value, error
    )
    error.add_note(f"It is of prompt {place} of the evaluation, {prompt.id!r}.")


def _weights(samples: Part) -> WeightTag | None:
    """What sampled all of it, as one of the servers serves it; None if there is no token.

    Raises:
        WeightVersionError: There are several.
    """
    tags = {
        segment.weights.digest: segment.weights
        for group in samples.groups
        for sample in group.samples
        for segment in sample.trajectory.segments
    }
    if len(tags) > 1:
        names = ", ".join(f"0x{digest:016x}" for digest in sorted(tags))
        raise WeightVersionError(
            f"the samples are of {len(tags)} different weights ({names}): something was "
            f"published meanwhile, or the servers disagree; evaluate again"
        )
    return next(iter(tags.values()), None)

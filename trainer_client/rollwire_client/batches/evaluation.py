"""Samples of one policy, whole: nothing is left out for being long, nothing is of two versions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client.batches.bar import Bar
from rollwire_client.batches.data import Evaluation, Part
from rollwire_client.batches.group import sample_group
from rollwire_client.batches.pool import Pool
from rollwire_client.errors import WeightVersionError
from rollwire_client.tasks import end

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client.batches.data import Prompt
    from rollwire_client.batches.group import LiveGroup, Recipe
    from rollwire_client.data import WeightTag

AT_ONCE = 1024  # sequences


async def evaluate(
    recipe: Recipe, prompts: Sequence[Prompt], version: int | None, *, bar: bool
) -> Evaluation:
    """See ``Batcher.evaluate``."""
    clock = asyncio.get_running_loop().time
    begun = clock()
    if version is not None:
        recipe = replace(recipe, options={**recipe.options, "max_weight_version": version})
    pool = Pool(recipe)
    groups = [pool.add(prompt) for prompt in prompts]
    places = asyncio.Semaphore(max(AT_ONCE // recipe.size, 1))

    async def sample(group: LiveGroup) -> None:
        group.oldest_version = version
        async with places:
            await sample_group(group, recipe)

    tasks = [asyncio.create_task(sample(group)) for group in groups]
    with Bar("evaluation", len(tasks), wanted=bar) as shown:
        try:
            for done, task in enumerate(asyncio.as_completed(tasks), 1):
                await task
                shown.show(done)
        finally:
            await end(tasks)
    samples = Part(tuple(group.snapshot() for group in groups))
    weights = _weights(samples)
    return Evaluation(
        version=weights.version if weights is not None else None,
        digest=weights.digest if weights is not None else None,
        samples=samples,
        seconds=clock() - begun,
    )


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

"""Whole samples under one policy: see ``Batcher.evaluate``."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import DropReason, Evaluation, Group, Part, Prompt
from rollwire_client._batches.group import LiveGroup, check_unique, drop_reason, ends_group
from rollwire_client._concurrency import cancel_all
from rollwire_client._errors import CallbackError, InvalidRequestError, WeightVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollwire.types import WeightTag

    from rollwire_client._batches.group import GroupSampler

logger = logging.getLogger(__name__)

_EVALUATED_AT_ONCE = 1024  # sequences
_FAILURES_AT_FIRST = 8  # of the caller's function, before any evaluated group is complete


async def evaluate(
    sampler: GroupSampler,
    prompts: Sequence[Prompt],
    version: int | None,
    show: Callable[[int, str], None],
) -> Evaluation:
    """See ``Batcher.evaluate``; ``show`` is told how many groups have ended."""
    clock = asyncio.get_running_loop().time
    started = clock()
    if version is not None:
        sampler = replace(sampler, options={**sampler.options, "max_weight_version": version})
    slots = asyncio.Semaphore(max(_EVALUATED_AT_ONCE // sampler.group_size, 1))

    async def sample(index: int, group: LiveGroup | Group) -> Group:
        if isinstance(group, Group):
            return group
        group.oldest_version = version
        async with slots:
            try:
                await sampler.sample(group)
            except Exception as error:
                if not ends_group(error):
                    error.add_note(
                        f"It was met at prompt {index} of the evaluation, {group.prompt.id!r}."
                    )
                    raise
                _warn_left_out(index, group.prompt, drop_reason(error), error)
                return group.snapshot(drop_reason(error), error)
        return group.snapshot()

    groups = _evaluated_groups(sampler, prompts)
    tasks = [asyncio.create_task(sample(index, group)) for index, group in enumerate(groups)]
    failed = 0
    try:
        for done, task in enumerate(asyncio.as_completed(tasks), 1):
            error = (await task).error
            failed += error is not None
            if failed == done == _FAILURES_AT_FIRST and isinstance(error, CallbackError):
                raise error  # the function would fail at all the others too
            show(done, "")
    finally:
        await cancel_all(tasks)
    results = [task.result() for task in tasks]
    samples = Part(tuple(group for group in results if group.dropped is None))
    left_out = Part(tuple(group for group in results if group.dropped is not None))
    errors = [group.error for group in left_out.groups if group.error is not None]
    if errors and not samples.groups:
        raise errors[0]
    weights = _common_weights(samples)
    return Evaluation(
        version=weights.version if weights is not None else None,
        digest=weights.digest if weights is not None else None,
        samples=samples,
        seconds=clock() - started,
        failed=left_out,
    )


def _evaluated_groups(sampler: GroupSampler, prompts: Sequence[Prompt]) -> list[LiveGroup | Group]:
    """One for each prompt; one that cannot be sampled is dropped already."""
    groups: list[LiveGroup | Group] = []
    known: set[tuple[str, int]] = set()
    for index, prompt in enumerate(prompts):
        try:
            group = sampler.new_group(prompt)
            check_unique(group.prompt, known)
            groups.append(group)
        except InvalidRequestError as error:
            _warn_left_out(index, prompt, DropReason.FAILED, error)
            groups.append(Group(prompt, (), DropReason.FAILED, error))
        except Exception as error:
            error.add_note(f"It is prompt {index} of the evaluation.")
            raise
    return groups


def _warn_left_out(index: int, prompt: Prompt, reason: DropReason, error: Exception) -> None:
    logger.warning(
        "prompt %d of the evaluation, %r, is left out as %s: %s",
        index, prompt.id, reason.value, error,
    )  # fmt: skip
    error.add_note(f"It is of prompt {index} of the evaluation, {prompt.id!r}.")


def _common_weights(samples: Part) -> WeightTag | None:
    """The weights that sampled everything, as one of the servers has them; None without a token."""
    tags = {
        segment.weights.digest: segment.weights
        for group in samples.groups
        for sample in group.samples
        for turn in sample.turns
        for segment in turn.segments
    }
    if len(tags) > 1:
        names = ", ".join(f"0x{digest:016x}" for digest in sorted(tags))
        raise WeightVersionError(
            f"the samples are of {len(tags)} different weights ({names}): something was "
            f"published meanwhile, or the servers disagree; evaluate again"
        )
    return next(iter(tags.values()), None)

"""What the caller says of complete groups, and when a batch has enough."""

from __future__ import annotations

import pytest
from client.batches.support import fates, held, ids, prompts
from rollwire_client import CallbackError, Carry, Decision, DropReason, Group


async def test_decisions() -> None:
    """Postponed groups are asked about again; dropped ones are replaced."""
    asked: list[str] = []

    def decide(group: Group) -> Decision:
        asked.append(group.prompt.id)
        if group.prompt.id == "1" and asked.count("1") == 1:
            return Decision.POSTPONE
        return Decision.DROP if group.prompt.id == "2" else Decision.TAKE

    async with held(1, 2, 3, 4, 5) as (_, batcher):
        source = prompts()
        batch = await batcher.collect(source, 2, decide=decide)
        assert len(batch.groups) == 2
        assert not {"1", "2"} & set(ids(batch.finished))
        assert ids(batch.carried) == ["1"]
        assert fates(batch.dropped) == [("2", DropReason.FILTERED)]
        batch = await batcher.collect(source, 2, decide=decide)
        assert ids(batch.finished)[0] == "1"
        assert asked.count("1") == 2


async def test_a_group_that_decide_fails_at_is_dropped_and_the_run_goes_on() -> None:
    def decide(group: Group) -> Decision:
        if group.prompt.id == "1":
            raise LookupError("no such answer")
        return None if group.prompt.id == "2" else Decision.TAKE

    async with held(1, 2, 3) as (_, batcher):
        batch = await batcher.collect(prompts(), 1, decide=decide)
        assert ids(batch.finished) == ["3"]
        assert fates(batch.dropped) == [("1", DropReason.FAILED), ("2", DropReason.FAILED)]
        first, second = (str(group.error) for group in batch.dropped.groups)
        assert first == "decide failed for the group of prompt '1': LookupError('no such answer')"
        assert second == "decide returned None, not a Decision, for the group of prompt '2'"


async def test_a_decide_that_fails_at_every_group_is_told() -> None:
    async with held(*range(1, 9)) as (_, batcher):
        with pytest.raises(CallbackError, match="decide returned True, not a Decision"):
            await batcher.collect(prompts(), 1, decide=lambda _: True)
        assert batcher.taken == 8


async def test_a_stop_that_is_not_yes_or_no() -> None:
    async with held(1) as (_, batcher):
        with pytest.raises(TypeError, match="stop returned 'no'"):
            await batcher.collect(prompts(), 1, stop=lambda _: "no")


async def test_a_batch_can_be_stopped_early() -> None:
    async with held(1, 2) as (_, batcher):
        batch = await batcher.collect(
            prompts(), 4, tail=Carry(), stop=lambda progress: progress.chosen == 2
        )
    assert (ids(batch.finished), ids(batch.carried)) == (["1", "2"], ["3", "4"])

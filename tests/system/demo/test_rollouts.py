"""Sequences in flight: enough of them, and never too many."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest
from rollwire_client.data import Finish, FinishReason, WeightTag
from rollwire_client.demo.rollouts import RolloutSource
from rollwire_client.demo.servers import DemoError
from rollwire_client.demo.task import LENGTH, Cipher
from rollwire_client.trajectory import Segment, Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client.data import Sampling
    from rollwire_client.fleet import Fleet

GROUP, GROUPS = 3, 4  # samples of a prompt, groups at once


class ScriptedFleet:
    """Finishes sequences when it is let."""

    def __init__(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.running = 0
        self.started = 0
        self.seeds: set[int | None] = set()
        self.cancelled = 0
        self.go = asyncio.Event()
        self._reason = reason

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Trajectory:
        self.running += 1
        self.started += 1
        self.seeds.add(sampling.seed)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        middle, tags = LENGTH // 2, [WeightTag(v, v, "s", v) for v in (1, 2)]
        return Trajectory(
            request_id="a",
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(range(LENGTH)),
            logprobs=(0.0,) * LENGTH,
            segments=(Segment(0, middle, tags[0], 1), Segment(middle, LENGTH, tags[1], 2)),
            finish=Finish(self._reason),
            servers=("s",),
        )


def source(fleet: ScriptedFleet) -> RolloutSource:
    return RolloutSource(cast("Fleet", fleet), Cipher(0), seed=7, group=GROUP, groups=GROUPS)


async def settle() -> None:
    """Lets every task run until all of them wait."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_groups_are_in_flight_before_anybody_asks_and_stop_at_the_bound() -> None:
    fleet = ScriptedFleet()
    rollouts = source(fleet)
    running = asyncio.create_task(rollouts.run())
    await settle()
    assert fleet.running == GROUPS * GROUP
    fleet.go.set()
    groups = await rollouts.take(2)
    await settle()
    assert fleet.started == GROUPS * GROUP  # learned from by nobody, so no more
    assert [len(group) for group in groups] == [GROUP, GROUP]
    fleet.go.clear()
    rollouts.learned(2)
    await settle()
    assert fleet.running == 2 * GROUP
    assert fleet.started == (GROUPS + 2) * GROUP
    assert len(fleet.seeds) == fleet.started
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


async def test_a_group_shares_its_prompt_and_is_rewarded() -> None:
    fleet = ScriptedFleet()
    fleet.go.set()
    rollouts = source(fleet)
    running = asyncio.create_task(rollouts.run())
    (one,), (other,) = await rollouts.take(1), await rollouts.take(1)
    running.cancel()
    await asyncio.wait([running])
    assert len({rollout.trajectory.prompt_ids for rollout in one}) == 1
    assert one[0].trajectory.prompt_ids != other[0].trajectory.prompt_ids
    assert one[0].reward == sum(one[0].rewards) / LENGTH
    assert one[0].crossed


async def test_leaving_ends_what_is_in_flight() -> None:
    fleet = ScriptedFleet()
    running = asyncio.create_task(source(fleet).run())
    await settle()
    running.cancel()
    await asyncio.wait([running])
    assert (fleet.running, fleet.cancelled) == (0, GROUPS * GROUP)


async def test_a_sequence_that_somebody_aborts_is_told() -> None:
    fleet = ScriptedFleet(FinishReason.ABORTED)
    fleet.go.set()
    with pytest.raises(ExceptionGroup) as caught:
        await source(fleet).run()
    first: Any = caught.value
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    assert isinstance(first, DemoError)
    assert "was aborted" in str(first)

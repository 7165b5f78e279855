"""Rollouts: groups of sequences, always enough of them in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollwire_client.data import Sampling
from rollwire_client.demo.servers import DemoError
from rollwire_client.demo.task import LENGTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollwire_client.demo.task import Cipher
    from rollwire_client.fleet import Fleet
    from rollwire_client.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Rollout:
    """A finished sequence.

    Attributes:
        trajectory: What the servers sampled.
        rewards: Of each of its tokens.
    """

    trajectory: Trajectory
    rewards: Sequence[float]

    @property
    def reward(self) -> float:
        """Of the sequence, 0 to 1."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def crossed(self) -> bool:
        """Whether its tokens are of more than one version."""
        return len(set(self.trajectory.versions)) > 1


class RolloutSource:
    """Samples groups for ever, while ``run`` runs.

    Args:
        fleet: Samples.
        task: Gives prompts and rewards.
        seed: Of the draws, together with a sequence's number.
        group: Samples of each prompt.
        groups: So many are sampled, finished, or being learned from: a slow trainer gets no staler
            data. Those that were ``learned`` make room for new ones, which are thus under way when
            the policy that comes of it is published, however fast the servers are.
    """

    def __init__(self, fleet: Fleet, task: Cipher, *, seed: int, group: int, groups: int) -> None:
        self._fleet = fleet
        self._task = task
        self._seed = seed
        self._group = group
        self._groups = groups
        self._room = asyncio.Semaphore(groups)
        self._ready: asyncio.Queue[list[Rollout]] = asyncio.Queue()
        self._started = 0

    async def run(self) -> None:
        """Samples until it is cancelled.

        Raises:
            RollwireError: In an exception group: a sequence failed for good.
        """
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._groups):
                tasks.create_task(self._sample_groups())

    async def take(self, groups: int) -> list[list[Rollout]]:
        """The next groups that are finished."""
        return [await self._ready.get() for _ in range(groups)]

    def learned(self, groups: int) -> None:
        """So many of those that were taken are done with."""
        for _ in range(groups):
            self._room.release()

    async def _sample_groups(self) -> None:
        while await self._room.acquire():
            prompt = self._task.prompt()
            async with asyncio.TaskGroup() as tasks:
                members = [tasks.create_task(self._sample(prompt)) for _ in range(self._group)]
            self._ready.put_nowait([member.result() for member in members])

    async def _sample(self, prompt: Sequence[int]) -> Rollout:
        self._started += 1
        sampling = Sampling(
            max_new_tokens=LENGTH, ignore_eos=True, seed=(self._seed << 32) + self._started
        )
        trajectory = await self._fleet.generate(prompt, sampling)
        if not trajectory.complete:
            why = trajectory.finish.reason.value if trajectory.finish else "cut"
            raise DemoError(f"sequence {trajectory.request_id} was {why}: who did that?")
        return Rollout(trajectory, self._task.rewards(prompt, trajectory.token_ids))

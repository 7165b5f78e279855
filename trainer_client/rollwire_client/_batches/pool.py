"""The groups that are under way: their tasks, and what those came to."""

from __future__ import annotations

import asyncio
import operator
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING

from rollwire_client._batches.batch import Prompt
from rollwire_client._batches.group import LiveGroup, Member, sample_group
from rollwire_client._concurrency.tasks import cancel_all
from rollwire_client._rpc.request import checked_token_ids
from rollwire_client._trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from rollwire_client._batches.group import Recipe


class Pool:
    """Samples groups until they are let go.

    Attributes:
        groups: By number, which rises.
        changed: Set when one of them ends.
        closed: It samples no more.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.groups: dict[int, LiveGroup] = {}
        self.changed = asyncio.Event()
        self.closed = False
        self._recipe = recipe
        self._keys: set[tuple[str, int]] = set()
        self._numbers = count(1)
        self._not_begun: dict[int, LiveGroup] = {}
        self._ended: dict[int, LiveGroup] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def add(self, prompt: Prompt, members: list[Member] | None = None) -> LiveGroup:
        """A group that does not run yet.

        Args:
            prompt: Of its samples.
            members: What there is of them already. Default: nothing.

        Raises:
            ValueError: The same prompt is under way in the same epoch: samples would be equal.
            Exception: See ``checked``.
        """
        prompt = checked(prompt)
        key = prompt.id, prompt.epoch
        if key in self._keys:
            raise ValueError(
                f"prompt {prompt.id!r} of epoch {prompt.epoch} is under way already: the seeds "
                f"of its samples would be equal; give each pass over the data its epoch"
            )
        if members is None:
            size = self._recipe.size
            members = [
                Member(index, TrajectoryBuilder("", prompt.token_ids)) for index in range(size)
            ]
        group = LiveGroup(next(self._numbers), prompt, members)
        self.groups[group.number] = self._not_begun[group.number] = group
        self._keys.add(key)
        return group

    def run(self, group: LiveGroup, oldest_version: int | None) -> None:
        """Samples it, from what it has on, under weights of that version or newer ones."""
        self.settled(group)
        self._not_begun.pop(group.number, None)
        group.failure, group.oldest_version = None, oldest_version
        group.task = asyncio.create_task(self._sample(group), name=f"rollwire {group.prompt.id}")

    def not_begun(self) -> list[LiveGroup]:
        """Those that were added, and not run yet."""
        return list(self._not_begun.values())

    def ended(self) -> list[LiveGroup]:
        """Those that were sampled, or failed, and are not settled."""
        return list(self._ended.values())

    def settled(self, group: LiveGroup) -> None:
        """What it came to is booked."""
        self._ended.pop(group.number, None)

    def remove(self, number: int) -> LiveGroup:
        """Lets a group go; what is still sampled of it is aborted."""
        group = self.groups.pop(number)
        self.settled(group)
        self._not_begun.pop(number, None)
        self._keys.discard((group.prompt.id, group.prompt.epoch))
        if group.task is not None and not group.task.done():
            group.task.cancel()
            self._ending.add(group.task)
            group.task.add_done_callback(self._ending.discard)
        return group

    async def close(self) -> None:
        """Ends what is under way. Idempotent."""
        self.closed = True
        self.changed.set()
        tasks = [group.task for group in self.groups.values() if group.task is not None]
        await cancel_all([*tasks, *self._ending])

    async def _sample(self, group: LiveGroup) -> None:
        try:
            await sample_group(group, self._recipe)
        except Exception as error:  # whoever collects gets it
            group.failure = error
        self._ended[group.number] = group
        self.changed.set()


def checked(prompt: Prompt) -> Prompt:
    """The prompt with plain integers.

    Raises:
        TypeError, ValueError: It is none, its id or epoch cannot be, or its sampling has a seed.
        InvalidRequestError: Its token ids are none.
    """
    if not isinstance(prompt, Prompt):
        raise TypeError(f"prompts gave {prompt!r:.80}, not a Prompt(id, token_ids)")
    if not isinstance(prompt.id, str):
        raise TypeError(f"the id of a prompt is {prompt.id!r}, not text")
    prompt.id.encode()  # a buffer must be able to hold it
    epoch = operator.index(prompt.epoch)
    if not -(1 << 63) <= epoch < 1 << 63:
        raise ValueError(f"the epoch of prompt {prompt.id!r} is {epoch}, from -2^63 to 2^63 - 1")
    if prompt.sampling is not None and prompt.sampling.seed is not None:
        raise ValueError(f"the sampling of prompt {prompt.id!r} has a seed: leave it out")
    return replace(prompt, epoch=epoch, token_ids=checked_token_ids(prompt.token_ids))

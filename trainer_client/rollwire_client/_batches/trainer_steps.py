"""The trainer's steps in their order: the unit that lag is counted in.

A version is a label. It may jump (a trainer that starts again continues above the highest version
of the servers) or fall (in a rollback). A publish is one step, whatever its label; so is the way
from a saved buffer to the first version of the next process. Versions that somebody else publishes
are counted by their labels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollwire.types import WeightTag

    from rollwire_client._data import ServerInfo

REMEMBERED = 1000  # steps


class TrainerStep(NamedTuple):
    """A policy that the trainer came to; the digest is None where it is not known."""

    number: int
    version: int | None
    digest: int | None


class TrainerSteps:
    """The steps of a run so far, of which the latest are remembered.

    Attributes:
        version: The trainer's, as it said last; None before that.
    """

    def __init__(self, saved: Iterable[TrainerStep] = (), version: int | None = None) -> None:
        """``saved`` are the steps of an earlier process, which ended at ``version``."""
        self.version = version
        # The number of each policy, by version and digest: the latest last.
        self._numbers: dict[tuple[int | None, int | None], int] = {}
        self._now = 0
        for step in saved:
            self._now = self._add(step)
        if version is not None and not self._numbers:  # saved by an older release
            self._add(TrainerStep(0, version, None))
        self._resumes = bool(self._numbers)  # the next version is one step after the saved ones

    def saved(self) -> list[TrainerStep]:
        return [TrainerStep(number, *policy) for policy, number in self._numbers.items()]

    def add_published(self, weights: WeightTag) -> None:
        self._add_after(1, weights.version, weights.digest)

    def follow_rollback(self, servers: Iterable[ServerInfo]) -> None:
        """Adds the version that somebody else rolled servers back to, from the trainer's."""
        for info in servers:
            weights, highest = info.weights, info.highest_version
            if weights.version is None or highest is None or self.version is None:
                continue
            known = self._numbers.get((weights.version, weights.digest), -1)
            if weights.version < self.version <= highest and known < self._now:
                self.add_published(weights)
                return

    def reach(self, version: int) -> None:
        """The trainer is at this version now.

        Raises:
            ValueError: It is lower than before, and was not published since.
        """
        numbers = (number for (known, _), number in self._numbers.items() if known == version)
        number = max(numbers, default=-1)
        if number < self._now:
            if self.version is not None and version < self.version:
                raise ValueError(
                    f"the trainer's version is {version}, and was {self.version}: a batcher is "
                    "for one run, whose versions rise unless servers are rolled back"
                )
            last, _ = next(reversed(self._numbers), (None, None))
            jump = 1 if last is None or self._resumes else max(version - last, 1)
            number = self._add_after(jump, version, None)
        self._now, self.version, self._resumes = number, version, False

    def lag(self, weights: WeightTag) -> float:
        """Steps that these weights are behind the trainer; infinity if they have no version."""
        version, numbers = weights.version, self._numbers
        if version is None:
            return math.inf
        number = numbers.get((version, weights.digest), numbers.get((version, None)))
        return self._now - (self._by_label(version) if number is None else number)

    def oldest_version(self, max_lag: int) -> int:
        """The lowest version that may be at most ``max_lag`` steps behind the trainer."""
        least = self._now - max_lag
        within = [
            (number, version)
            for (version, _), number in self._numbers.items()
            if number >= least and version is not None
        ]
        if not within:
            return 0
        number, version = within[0]
        before = version - (number - least)  # by its label
        return max(min(before, *(version for _, version in within)), 0)

    def _add(self, step: TrainerStep) -> int:
        policy = step.version, step.digest
        self._numbers.pop(policy, None)  # so that it is the latest
        self._numbers[policy] = step.number
        if len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        return step.number

    def _add_after(self, jump: int, version: int | None, digest: int | None) -> int:
        latest = next(reversed(self._numbers.values()), -jump)
        return self._add(TrainerStep(latest + jump, version, digest))

    def _by_label(self, version: int) -> float:
        """The number of a version that is no step."""
        before = -math.inf
        for (known, _), number in self._numbers.items():
            if known is not None and known >= version:
                return max(number - (known - version), before)
            before = number
        return before

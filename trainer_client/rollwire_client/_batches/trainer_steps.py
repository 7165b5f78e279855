"""The trainer's steps in their order: the unit that lag is counted in.

A version is a label. It may jump (a trainer that starts again goes on above the highest version of
the servers) or fall (in a rollback). A publish is one step, whatever its label; so is the way from
a saved buffer to the first version of the next process. Versions that somebody else publishes are
counted by their labels.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollwire.types import WeightTag

    from rollwire_client._data import ServerInfo

REMEMBERED = 1000  # steps


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """A version that the trainer came to.

    Attributes:
        number: Rises from step to step.
        version: Of the policy; None for an untagged one.
        digest: Of the policy; None where it is not known.
    """

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
        self._all: deque[TrainerStep] = deque(saved, REMEMBERED)
        if version is not None and not self._all:  # saved by an older release
            self._all.append(TrainerStep(0, version, None))
        self._resumes = bool(self._all)  # the next version is one step after the saved ones
        self._numbers = {(step.version, step.digest): step.number for step in self._all}
        self._now = self._all[-1].number if self._all else 0

    def saved(self) -> list[TrainerStep]:
        return list(self._all)

    def add_published(self, weights: WeightTag) -> None:
        self._append(1, weights.version, weights.digest)

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
        known = next((step for step in reversed(self._all) if step.version == version), None)
        if known is None or known.number < self._now:
            if self.version is not None and version < self.version:
                raise ValueError(
                    f"the trainer's version is {version}, and was {self.version}: a batcher goes "
                    "with one run, whose versions rise, unless servers are rolled back"
                )
            last = self._all[-1].version if self._all else None
            jump = 1 if last is None or self._resumes else max(version - last, 1)
            known = self._append(jump, version, None)
        self._now, self.version, self._resumes = known.number, version, False

    def lag(self, weights: WeightTag) -> float:
        """Steps that these weights are behind the trainer; infinity if they have no version."""
        if weights.version is None:
            return math.inf
        version, numbers = weights.version, self._numbers
        number = numbers.get((version, weights.digest), numbers.get((version, None)))
        return self._now - (self._between(version) if number is None else number)

    def oldest_version(self, max_lag: int) -> int:
        """The lowest version that may be at most ``max_lag`` steps behind the trainer."""
        least = self._now - max_lag
        within = [s for s in self._all if s.number >= least and s.version is not None]
        versions = [step.version for step in within if step.version is not None]
        if within and within[0].version is not None:
            versions.append(within[0].version - (within[0].number - least))
        return max(min(versions, default=0), 0)

    def _append(self, jump: int, version: int | None, digest: int | None) -> TrainerStep:
        number = self._all[-1].number + jump if self._all else 0
        if len(self._all) == REMEMBERED:
            gone = self._all[0]
            if self._numbers.get((gone.version, gone.digest)) == gone.number:
                del self._numbers[gone.version, gone.digest]
        step = TrainerStep(number, version, digest)
        self._all.append(step)
        self._numbers[version, digest] = number
        return step

    def _between(self, version: int) -> float:
        """The number of a version that is no step, by its label."""
        before = -math.inf
        for step in self._all:
            if step.version is not None and step.version >= version:
                return max(step.number - (step.version - version), before)
            before = step.number
        return before

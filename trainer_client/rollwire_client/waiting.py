"""The rollouts of a fleet for which no server is ready, and what its log says of them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

_LOOK = 0.25  # seconds
_GRACE = 1.0  # seconds; a publish may keep every server from being ready for a moment


@dataclass(frozen=True, slots=True)
class _Wait:
    since: float  # on the event loop's clock, as the next one
    give_up: float
    why: Callable[[], str]


class Waits:
    """Rollouts that wait until a server is ready. The first that waits for more than a second is
    warned of; so is the end of it, and nothing in between.
    """

    def __init__(self) -> None:
        self._waits: dict[object, _Wait] = {}  # the oldest first

    def begin(self, rollout: object, *, give_up: float, why: Callable[[], str]) -> None:
        """``rollout`` finds no server; nothing changes if that is known.

        Args:
            rollout: Whatever stands for it.
            give_up: When it stops to wait, on the event loop's clock.
            why: Tells why no server is ready for it.
        """
        if rollout not in self._waits:
            self._waits[rollout] = _Wait(asyncio.get_running_loop().time(), give_up, why)

    def end(self, rollout: object) -> None:
        """``rollout`` waits no more, if it did."""
        self._waits.pop(rollout, None)

    async def tell(self) -> None:
        """Warns, until it is cancelled."""
        clock = asyncio.get_running_loop().time
        told_since: float | None = None
        while True:
            await asyncio.sleep(_LOOK)
            first = next(iter(self._waits.values()), None)
            if first is None:
                if told_since is not None:
                    waited = clock() - told_since
                    logger.warning("no rollout waits for a server any more, after %.0f s", waited)
                told_since = None
            elif told_since is None and clock() - first.since >= _GRACE:
                told_since = first.since
                logger.warning(
                    "rollouts wait (%d), as no server is ready: %s; "
                    "the first is given up in %.0f s if that stays so",
                    len(self._waits),
                    first.why(),
                    min(wait.give_up for wait in self._waits.values()) - clock(),
                )

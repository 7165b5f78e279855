"""The rollouts of a fleet that nothing is sampled of, and what its log says of them."""

from __future__ import annotations

import asyncio
import enum
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

LOOK = 0.25  # seconds between two looks
_MOST = 100  # reasons that a line has
_LINGER = 2.0  # seconds; one that is tried in vain goes on to wait


class Want(enum.Enum):
    """What a rollout waits for: the seconds after which the log says so, and how it does."""

    def __init__(self, grace: float, told: str, over: str) -> None:
        self.grace = grace
        self.told = told
        self.over = over

    SERVER = (
        1.0,  # a publish may keep every server from being ready for a moment
        "rollouts wait (%d), as no server is ready: %s",
        "no rollout waits for a server any more, after %.0f s",
    )
    ROOM = (
        5.0,
        "rollouts wait (%d), as no server has room for them: %s",
        "no rollout waits for room any more, after %.0f s",
    )
    WEIGHTS = (
        5.0,
        "rollouts wait (%d) for newer weights: %s",
        "no rollout waits for newer weights any more, after %.0f s",
    )
    RESUME = (
        5.0,
        "rollouts wait at paused servers (%d): %s; they go on once these are resumed",
        "no rollout waits at a paused server any more, after %.0f s",
    )


@dataclass(slots=True)
class _Wait:
    want: Want
    since: float  # on the event loop's clock, as the next ones
    give_up: float
    why: Callable[[], str]
    ended: float = math.inf


class Waits:
    """Rollouts that wait. The first that waits for long is warned of; so is the end of it, and
    nothing in between.
    """

    def __init__(self) -> None:
        self._waits: dict[object, _Wait] = {}  # the oldest first
        self._told: dict[Want, float] = {}  # since when they wait

    def begin(
        self, who: object, want: Want, *, give_up: float = math.inf, why: Callable[[], str]
    ) -> None:
        """Somebody waits, or still does.

        Args:
            who: Whatever stands for it.
            want: What it waits for.
            give_up: When it stops to wait, on the event loop's clock.
            why: Tells why it has to.
        """
        wait = self._waits.get(who)
        if wait is not None and wait.want is want:
            wait.ended, wait.give_up, wait.why = math.inf, give_up, why
            return
        self._waits.pop(who, None)
        self._waits[who] = _Wait(want, asyncio.get_running_loop().time(), give_up, why)

    def end(self, who: object) -> None:
        """It waits no more, if it did."""
        if (wait := self._waits.get(who)) is None:
            return
        if wait.want is Want.ROOM:  # perhaps: it tries a server, whose queue may be full again
            wait.ended = min(wait.ended, asyncio.get_running_loop().time())
        else:
            del self._waits[who]

    def tell(self) -> None:
        """Looks at them, and says what there is to say."""
        now = asyncio.get_running_loop().time()
        for who in [who for who, wait in self._waits.items() if now - wait.ended > _LINGER]:
            del self._waits[who]
        for want in Want:
            self._tell(want, [wait for wait in self._waits.values() if wait.want is want], now)

    def _tell(self, want: Want, waits: list[_Wait], now: float) -> None:
        if not waits:
            if (since := self._told.pop(want, None)) is not None:
                logger.warning(want.over, now - since)
            return
        first = waits[0]
        if want in self._told or now - first.since < want.grace:
            return
        self._told[want] = first.since
        why = "; ".join(dict.fromkeys(wait.why() for wait in waits[:_MOST]))
        told = want.told % (len(waits), why)
        if (give_up := min(wait.give_up for wait in waits)) < math.inf:
            told += f"; the first is given up in {give_up - now:.0f} s if that stays so"
        logger.warning("%s", told)

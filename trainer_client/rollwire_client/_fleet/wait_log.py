"""What the log says of rollouts that get no tokens."""

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

LOG_INTERVAL = 0.25  # seconds
_MAX_REASONS = 100  # in a line
_LINGER = 2.0  # seconds; a rollout that is refused again within this has waited all the time


class WaitReason(enum.Enum):
    """What a rollout waits for: the seconds after which the log says so, and its two lines."""

    def __init__(self, grace: float, begun: str, over: str) -> None:
        self.grace = grace
        self.begun = begun
        self.over = over

    SERVER = (
        1.0,  # a publish may keep every server from being ready for a moment
        "rollouts wait (%d), as no server is ready: %s",
        "no rollout waits for a server any more, after %.0f s",
    )
    QUEUE = (
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
    reason: WaitReason
    since: float  # on the event loop's clock, as the next ones
    give_up: float
    describe: Callable[[], str]
    ended: float = math.inf


class WaitLog:
    """Rollouts that wait. For each reason, the log warns when the first has waited for long and
    when the last waits no more, and says nothing in between.
    """

    def __init__(self) -> None:
        self._waits: dict[object, _Wait] = {}  # the oldest first
        self._warned: dict[WaitReason, float] = {}  # since when they wait

    def begin(
        self,
        key: object,
        reason: WaitReason,
        *,
        give_up: float = math.inf,
        describe: Callable[[], str],
    ) -> None:
        """A sequence, or a server, waits, or still does.

        Args:
            key: The sequence or server.
            reason: What it waits for.
            give_up: When it stops waiting, on the event loop's clock.
            describe: Says what is in the way.
        """
        wait = self._waits.get(key)
        if wait is not None and wait.reason is reason:
            wait.ended, wait.give_up, wait.describe = math.inf, give_up, describe
            return
        self._waits.pop(key, None)
        self._waits[key] = _Wait(reason, asyncio.get_running_loop().time(), give_up, describe)

    def end(self, key: object) -> None:
        if (wait := self._waits.get(key)) is None:
            return
        if wait.reason is WaitReason.QUEUE:  # perhaps: the queue that it tries may be full again
            wait.ended = min(wait.ended, asyncio.get_running_loop().time())
        else:
            del self._waits[key]

    def log(self) -> None:
        now = asyncio.get_running_loop().time()
        for key in [key for key, wait in self._waits.items() if now - wait.ended > _LINGER]:
            del self._waits[key]
        for reason in WaitReason:
            waits = [wait for wait in self._waits.values() if wait.reason is reason]
            self._log(reason, waits, now)

    def _log(self, reason: WaitReason, waits: list[_Wait], now: float) -> None:
        if not waits:
            if (since := self._warned.pop(reason, None)) is not None:
                logger.warning(reason.over, now - since)
            return
        first = waits[0]
        if reason in self._warned or now - first.since < reason.grace:
            return
        self._warned[reason] = first.since
        obstacles = "; ".join(dict.fromkeys(wait.describe() for wait in waits[:_MAX_REASONS]))
        message = reason.begun % (len(waits), obstacles)
        if (give_up := min(wait.give_up for wait in waits)) < math.inf:
            message += f"; the first is given up in {give_up - now:.0f} s if that stays so"
        logger.warning("%s", message)

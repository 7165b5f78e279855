"""Steps that fail: what the log says of them, and how many end the engine."""

from __future__ import annotations

import time

import structlog

from rollwire_server.engines.base import EngineError

log = structlog.get_logger()

MOST_IN_A_ROW = 16
"""More than a fleet tries one sequence: that alone should not end a server."""
LOG_SECONDS = 10.0


class Failures:
    """The steps that failed since the last one that did not."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._unsaid = 0
        self._said_at: dict[type[Exception], float] = {}

    def none(self) -> None:
        """A step was computed."""
        self._in_a_row = 0

    def one(self, error: Exception) -> None:
        """A step failed; each kind of error is logged once in LOG_SECONDS.

        Raises EngineError if it is one too many: an engine that cannot compute is of no use.
        """
        self._in_a_row += 1
        now, kind = time.monotonic(), type(error)
        if now - self._said_at.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
            log.error(
                "a step failed: its sequences go on elsewhere",
                exc_info=error, in_a_row=self._in_a_row, unsaid=self._unsaid,
            )  # fmt: skip
            self._said_at[kind], self._unsaid = now, 0
        else:
            self._unsaid += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise EngineError(
                f"{self._in_a_row} steps failed in a row, the last with {kind.__name__}: {error}"
            ) from error

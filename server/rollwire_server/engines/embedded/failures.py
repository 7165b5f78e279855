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
    """Steps that failed, and how many in a row failed whatever they computed."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._unsaid = 0
        self._said_at: dict[type[Exception], float] = {}

    def say(self, error: Exception, *, sequences: int) -> None:
        """Logs a step that raised; each kind of error once in LOG_SECONDS."""
        now, kind = time.monotonic(), type(error)
        if now - self._said_at.get(kind, -LOG_SECONDS) < LOG_SECONDS:
            self._unsaid += 1
            return
        log.error(
            "a step failed: a sequence that fails alone ends, the others go on",
            exc_info=error, sequences=sequences, unsaid=self._unsaid,
        )  # fmt: skip
        self._said_at[kind], self._unsaid = now, 0

    def none(self) -> None:
        """The engine computes."""
        self._in_a_row = 0

    def one(self, error: Exception) -> None:
        """The engine computed nothing at all in a step, the last try of which raised ``error``.

        Raises EngineError if it is one too many: an engine that cannot compute is of no use.
        """
        self._in_a_row += 1
        if self._in_a_row >= MOST_IN_A_ROW:
            raise EngineError(
                f"{self._in_a_row} steps failed in a row, the last with {type(error).__name__}: "
                f"{error}"
            ) from error

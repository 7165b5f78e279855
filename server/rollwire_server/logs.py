"""How the server logs: structured, one event a line, on standard error.

No line has tokens, keys or epochs, so tracebacks come without values of variables.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor, WrappedLogger

OWN_PACKAGES = ("rollwire_server", "rollwire_transport")
MAX_CHARACTERS = 256
REFUSALS_A_SECOND = 20

_CALLER_FAULTS = {"DecodeError", "ExecuteBatchError"}  # of which one has no public class


def configure(style: str, level: str) -> None:
    """Sets logging up for the whole process; other libraries write warnings and errors."""
    text = sys.stderr.isatty() if style == "auto" else style == "text"
    first: list[Processor] = [
        RefusalLimiter(),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: list[Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    if text:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        last = [_escape, renderer]
    structlog.configure(
        processors=[*first, *last],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*first, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.captureWarnings(capture=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_not_caller_fault)
    for name in OWN_PACKAGES:
        logging.getLogger(name).setLevel(level.upper())


def bind(**names: Any) -> None:
    """Adds names to all lines of the current call, and of the tasks that it starts."""
    cut = {n: v[:MAX_CHARACTERS] if isinstance(v, str) else v for n, v in names.items()}
    structlog.contextvars.bind_contextvars(**cut)


class RefusalLimiter:
    """Limits the lines about refused calls; the next one that is written says how many were left
    out, as ``unsaid``.
    """

    def __init__(self) -> None:
        self._since = 0.0
        self._written = self._left_out = 0

    def __call__(self, _: WrappedLogger, __: str, event: EventDict) -> EventDict:
        if event["event"] != "refused":
            return event
        if (now := time.monotonic()) - self._since >= 1:
            self._since, self._written = now, 0
        if self._written >= REFUSALS_A_SECOND:
            self._left_out += 1
            raise structlog.DropEvent
        self._written += 1
        if self._left_out:
            event["unsaid"], self._left_out = self._left_out, 0
        return event


def is_caller_fault(error: BaseException | None) -> bool:
    """Whether a message could not be read, or the caller was gone when its answer came."""
    return type(error).__name__ in _CALLER_FAULTS


def _is_not_caller_fault(record: logging.LogRecord) -> bool:
    return not is_caller_fault(record.exc_info[1] if record.exc_info else None)


def _escape(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escapes control characters, which a caller may have chosen, for the terminal."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
    return event

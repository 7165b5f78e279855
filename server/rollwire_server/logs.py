"""How the server logs: structured, one event a line, on standard error."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(style: str, level: str) -> None:
    """Sets logging up for the whole process.

    Args:
        style: "text", "json", or "auto" (text on a terminal).
        level: The least severe level that is written.
    """
    text = sys.stderr.isatty() if style == "auto" else style == "text"
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *(
                [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
                if text
                else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
            ),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )

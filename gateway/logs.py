"""One way to log: structlog events, for people on a terminal and as JSON lines for machines.

Exceptions are logged by type and place, never by message: a message may quote a prompt or a key.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor

LogFormat = Literal["auto", "console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(
    log_format: LogFormat = "auto", level: LogLevel = "info", stream: TextIO | None = None
) -> None:
    """Send our events, and those of libraries that use `logging`, to `stream` (by default stderr)."""
    out = stream or sys.stderr
    as_json = log_format == "json" or (log_format == "auto" and not out.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        place_of_exception,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=out.isatty())
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(out),
    )
    _configure_libraries(shared, renderer, number, out)


def place_of_exception(logger: Any, name: str, event: EventDict) -> EventDict:
    """Replace `exc_info` by the exception's type and frames."""
    info = event.pop("exc_info", None)
    if info is True:
        info = sys.exc_info()[1]
    elif isinstance(info, tuple):
        info = info[1]
    if isinstance(info, BaseException):
        event["exception"] = type(info).__qualname__
        event["frames"] = [
            f"{frame.filename}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(info.__traceback__)
        ]
    return event


def _configure_libraries(shared: list[Processor], renderer: Processor, level: int, out: TextIO) -> None:
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                place_of_exception,
                renderer,
            ],
            keep_exc_info=True,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # A library's steps are noise; what it warns of is not.
    root.setLevel(max(level, logging.WARNING))

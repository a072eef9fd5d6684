"""How a process logs: lines on standard error, bounded and printable."""

import contextlib
import logging
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict

from pointsman.runtime.log_pace import LogPace

TRACEBACK_LINES_MAX = 500


def configure_logging(level: str, log_format: str) -> None:
    """Logs on standard error: `event key=value ...`, or one JSON object per line."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)
    )
    structlog.configure(
        processors=[
            LogPace(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _LossyErrors())),
        cache_logger_on_first_use=True,
    )


def _printable(_logger: object, _name: str, event: EventDict) -> EventDict:
    """The text renderer quotes only values with blanks; a traceback has lines, and quotes what others sent."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n")[:TRACEBACK_LINES_MAX] if name == "exception" else [value]
            event[name] = "\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines)
    return event


class _LossyErrors:
    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()

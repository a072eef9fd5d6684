"""How a process logs: lines on standard error, bounded and printable."""

import contextlib
import logging
import os
import select
import sys
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict

from pointsman.runtime.log_pace import LogPace

TRACEBACK_LINES_MAX = 500
PIECE_CHARACTERS = select.PIPE_BUF // 4
"""Four bytes each at most: a pipe that has room takes as many."""


def configure_logging(level: str, log_format: str) -> None:
    """Logs on standard error: `event key=value ...`, or one JSON object per line. Lines that nobody reads are `lost`."""
    _open_standard_streams()
    errors = _LossyErrors()
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), pad_event_to=28)
    )
    structlog.configure(
        processors=[
            LogPace(),
            errors.tell_lost,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _printable,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", errors)),
        cache_logger_on_first_use=True,
    )


def _printable(_logger: object, _name: str, event: EventDict) -> EventDict:
    """The text renderer quotes only values with blanks; a traceback has lines, and quotes what others sent."""
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            lines = value.split("\n")[:TRACEBACK_LINES_MAX] if name == "exception" else [value]
            event[name] = "\n".join(line if line.isprintable() else repr(line)[1:-1] for line in lines)
    return event


def _open_standard_streams() -> None:
    """Those that whoever started the process has closed. A socket would get such a number, and libuv ends the process when
    it closes a socket of that number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


class _LossyErrors:
    """Waits for nobody: a process whose log is not read would stand still."""

    def __init__(self) -> None:
        self._lost = 0

    def tell_lost(self, _logger: object, _name: str, event: EventDict) -> EventDict:
        """A structlog processor."""
        if self._lost:
            event["lost"] = self._lost
        return event

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            for start in range(0, len(text), PIECE_CHARACTERS):
                if not _has_room(sys.stderr):
                    self._lost += 1
                    return
                sys.stderr.write(text[start : start + PIECE_CHARACTERS])
                sys.stderr.flush()
            self._lost = 0

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def _has_room(stream: TextIO) -> bool:
    """A file always has."""
    try:
        number = stream.fileno()
    except OSError:  # it is none of the system's
        return True
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(0))

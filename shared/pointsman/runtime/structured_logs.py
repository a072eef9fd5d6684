"""How a process logs: lines on standard error, bounded and printable. What others can make us log is bounded too: lines of one
event a second, and characters of a value."""

import contextlib
import logging
import os
import select
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict

TRACEBACK_LINES_MAX = 500
PIECE_CHARACTERS = select.PIPE_BUF // 4
"""Four bytes each at most: a pipe that has room takes as many."""


BURST_MAX = 200
LINES_A_SECOND = 20.0
VALUE_CHARACTERS_MAX = 500
NEVER_DROPPED = frozenset({"admin_action"})


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


@dataclass(slots=True)
class _Bucket:
    left: float
    at: float
    suppressed: int = 0


class LogPace:
    """A structlog processor. The next line of an event says how many were `suppressed`. The names of events are ours,
    so the table is bounded."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Bucket] = {}

    def __call__(self, _logger: Any, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Raises DropEvent."""
        now, event = time.monotonic(), str(line.get("event"))
        bucket = self._buckets.setdefault(event, _Bucket(BURST_MAX, now))
        bucket.left = min(BURST_MAX, bucket.left + (now - bucket.at) * LINES_A_SECOND)
        bucket.at = now
        if bucket.left < 1 and event not in NEVER_DROPPED:
            bucket.suppressed += 1
            raise structlog.DropEvent
        bucket.left -= 1
        if bucket.suppressed:
            line["suppressed"], bucket.suppressed = bucket.suppressed, 0
        for name, value in line.items():
            if isinstance(value, str) and len(value) > VALUE_CHARACTERS_MAX:
                line[name] = value[:VALUE_CHARACTERS_MAX] + "..."
        return line

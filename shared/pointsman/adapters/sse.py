"""Server-sent events: bytes of a stream in, the data of its events out. Lines may end in LF, CRLF or CR."""

import re
from collections.abc import Iterator

TWO_LINE_ENDS = rb"[\r\n](?:(?<=\n)|(?<=\r)(?:\n|(?=\r)))(?:\r\n?|\n)"
EVENT_END = re.compile(TWO_LINE_ENDS)
"""The end of a line and an empty line. After a final CR an LF that belongs to it may still follow."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


def event_data(event: bytes) -> bytes:
    """The data lines of one event, joined by LF; empty if it has none."""
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


def events_in(stream: bytes) -> Iterator[bytes]:
    """The data of each event of a stream, or of a piece of one, in order; events without data are left out."""
    return filter(None, map(event_data, EVENT_END.split(stream)))

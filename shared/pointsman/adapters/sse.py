"""Parser of server-sent events. Lines may end in LF, CRLF or CR."""

import re
from collections.abc import Iterator

TWO_LINE_ENDS = rb"[\r\n](?:(?<=\n)|(?<=\r)(?:\n|(?=\r)))(?:\r\n?|\n)"
EVENT_END = re.compile(TWO_LINE_ENDS)
"""End of a line and an empty line. After a final CR its LF may still follow."""
_LINE_END = re.compile(rb"\r\n|\n|\r")


def event_data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


def events_in(stream: bytes) -> Iterator[bytes]:
    """Data of each event in order; events without data are skipped."""
    return filter(None, map(event_data, EVENT_END.split(stream)))

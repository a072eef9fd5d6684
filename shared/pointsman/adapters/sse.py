"""Parser of server-sent events. Lines may end in LF, CRLF or CR."""

import re
from collections.abc import Iterator

_TWO_LINE_ENDS = rb"[\r\n](?:(?<=\n)|(?<=\r)(?:\n|(?=\r)))(?:\r\n?|\n)"
EVENT_END = re.compile(_TWO_LINE_ENDS)
"""End of a line and an empty line. After a final CR its LF may still follow."""
EVENT_END_BYTES_MAX = 4
_ENDS_HERE = re.compile(_TWO_LINE_ENDS + rb"\Z")
_LINE_END = re.compile(rb"\r\n|\n|\r")


def ends_event(text: bytes) -> bool:
    """Whether an event ends with it. Its last EVENT_END_BYTES_MAX bytes are enough."""
    return _ENDS_HERE.search(text[-EVENT_END_BYTES_MAX:]) is not None


def event_data(event: bytes) -> bytes:
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


def events_in(stream: bytes) -> Iterator[bytes]:
    """Data of each event in order; events without data are skipped."""
    return filter(None, map(event_data, EVENT_END.split(stream)))

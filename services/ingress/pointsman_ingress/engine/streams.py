"""What the streams of different endpoints look like, as far as a proxy cares: where output begins, and how they end.

Completions and chats send a chunk when there is a token, and `[DONE]` when all is said. The Responses API sends named
events: some before anything was computed, then deltas, and a last one that holds the whole answer once more. So does
Anthropic's Messages API, whose usage is in the last event but one.

Lines may end in any of the three ways of the standard for server-sent events: LF, CRLF, CR.
"""

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

TAIL_BYTES_MAX = 8 * 1024
"""How much of the end of a stream is kept, and a chunk: the usage and the last event are in it."""

LAST_EVENT_BYTES_MAX = 8 * 1024 * 1024
"""How much is kept of a last event that holds the whole answer."""

USAGE_LINES_MAX = 64
"""Lines at the end of a stream in which the usage is looked for."""

_TWO_LINE_ENDS = rb"[\r\n](?:(?<=\n)|(?<=\r)(?:\n|(?=\r)))(?:\r\n?|\n)"
EVENT_END = re.compile(_TWO_LINE_ENDS)
"""The end of a line, and an empty line. Where a CR comes last, an LF that belongs to it may still follow."""

_ENDS_HERE = re.compile(_TWO_LINE_ENDS + rb"\Z")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_MARK_BYTES_MAX = 64
"""No mark of a shape is longer."""


@dataclass(frozen=True, slots=True)
class StreamShape:
    """`output`: any of these marks the first event that holds output; none, that every event does. `ends`: any of these
    marks the last event; a stream without it was broken off. Marks contain line breaks where text could look like them."""

    output: tuple[bytes, ...]
    ends: tuple[bytes, ...]

    def shows_output(self, chunk: bytes) -> bool:
        return not self.output or any(mark in chunk for mark in (*self.output, *self.ends))

    def has_ended(self, tail: bytes) -> bool:
        return any(mark in tail for mark in self.ends)


CHUNKS = StreamShape(output=(), ends=(b"[DONE]",))

_LAST_EVENTS = (b"response.completed", b"response.incomplete", b"response.failed", b"error")
_LINE_ENDS = (b"\n", b"\r")

NAMED_EVENTS = StreamShape(
    output=tuple(b".delta" + end for end in _LINE_ENDS),
    ends=tuple(b"event: " + name + end for name in _LAST_EVENTS for end in _LINE_ENDS),
)


MESSAGE_EVENTS = StreamShape(
    output=tuple(b"event: content_block_start" + end for end in _LINE_ENDS),
    ends=tuple(b"event: " + name + end for name in (b"message_stop", b"error") for end in _LINE_ENDS),
)


class StreamTail:
    """The end of a stream, as it comes: whether it is whole, and what it says last. Takes time in proportion to what it is
    fed, and keeps no more than TAIL_BYTES_MAX and a chunk, or LAST_EVENT_BYTES_MAX of a last event."""

    def __init__(self, shape: StreamShape) -> None:
        self._shape = shape
        self._chunks: deque[bytes] = deque()
        self._bytes = 0
        self._bytes_max = TAIL_BYTES_MAX
        self._seen = b""
        """Of the last chunks, what may hold the beginning of a mark."""
        self._shows_output = False
        self._last_event = False

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._bytes += len(chunk)
        while self._bytes - len(self._chunks[0]) >= self._bytes_max:
            self._bytes -= len(self._chunks.popleft())
        if self._shape.output and not self._last_event:
            seen = self._seen + chunk
            self._shows_output = self._shows_output or self._shape.shows_output(seen)
            self._seen = seen[-_MARK_BYTES_MAX:]
            if self._shape.has_ended(seen):
                self._last_event, self._bytes_max = True, LAST_EVENT_BYTES_MAX

    @property
    def shows_output(self) -> bool:
        """Whether there was output yet."""
        return self._shows_output or not self._shape.output

    @property
    def has_ended(self) -> bool:
        """Whether the last event has begun."""
        return self._last_event or self._shape.has_ended(b"".join(self._chunks))

    @property
    def mid_event(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return self._bytes > 0 and _ENDS_HERE.search(b"".join([*self._chunks][-4:])[-4:]) is None

    def data_backwards(self) -> Iterator[bytes]:
        """The data lines at the end, the last one first."""
        lines = b"".join(self._chunks).replace(b"\r", b"\n").rsplit(b"\n", USAGE_LINES_MAX)
        for line in reversed(lines):
            if line.startswith(b"data:"):
                yield line[5:]


def event_data(event: bytes) -> bytes:
    """What an event says: its data lines, joined."""
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return b"\n".join(lines)


_OWN_FAULT_TYPES = frozenset({"InternalServerError", "internal_error", "server_error", "api_error"})


class _Error(msgspec.Struct):
    type: str | None = None
    code: int | str | None = None


class _ErrorEvent(msgspec.Struct):
    error: _Error | None = None
    choices: msgspec.Raw | None = None


_error_events = msgspec.json.Decoder(_ErrorEvent)


def tells_failure(events: bytes) -> bool:
    """Whether an event says that the engine failed: vLLM and SGLang have sent 200 by the time a stream fails, and tell of it in an
    event with an `error`, before the regular end. One that blames the request (a code of 4xx) is no failure of theirs."""
    return b'"error"' in events and any(map(_is_failure, EVENT_END.split(events)))


def _is_failure(event: bytes) -> bool:
    if b'"error"' not in event:
        return False
    try:
        said = _error_events.decode(event_data(event))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if said.error is None or said.choices is not None:
        return False
    code = said.error.code
    return code >= 500 if isinstance(code, int) else said.error.type in _OWN_FAULT_TYPES

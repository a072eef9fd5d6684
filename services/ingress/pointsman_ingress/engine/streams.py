"""Incremental parsing of engine streams: takes chunks, reports first output, end, failure and last events."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from pointsman.adapters.sse import EVENT_END, EVENT_END_BYTES_MAX, ends_event, event_data
from pointsman.primitives import Tokens
from pointsman_ingress.engine.usage import TAIL_BYTES_MAX, Usage, try_decode, usage_at_end, usage_in

EVENT_BYTES_MAX = 16 * 1024  # longer events are not searched for an error
LAST_EVENT_BYTES_MIN = 1024 * 1024  # if the last event repeats the whole answer; of a longer one its end is read
LAST_EVENT_BYTES_MAX = 8 * 1024 * 1024  # and parts of the request
USAGE_LINES_MAX = 64

_LINE_ENDS = (b"\n", b"\r")
_PATTERN_BYTES_MAX = 64
_DATA = b"\ndata:"


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Byte patterns of the first event with output (empty: every event has some) and of the last event. They include
    line ends so that generated text cannot match."""

    output: tuple[bytes, ...]
    ends: tuple[bytes, ...]

    def shows_output(self, chunk: bytes) -> bool:
        return not self.output or any(pattern in chunk for pattern in (*self.output, *self.ends))

    def has_ended(self, tail: bytes) -> bool:
        return any(pattern in tail for pattern in self.ends)


def _event_names(*names: bytes) -> tuple[bytes, ...]:
    return tuple(b"event: " + name + end for name in names for end in _LINE_ENDS)


CHUNKS = StreamShape(
    output=(), ends=tuple(end + data + b"[DONE]" for end in _LINE_ENDS for data in (b"data: ", b"data:"))
)
NAMED_EVENTS = StreamShape(
    output=tuple(b".delta" + end for end in _LINE_ENDS),
    ends=_event_names(b"response.completed", b"response.incomplete", b"response.failed", b"error"),
)
MESSAGE_EVENTS = StreamShape(
    output=_event_names(b"message_start", b"content_block_start"), ends=_event_names(b"message_stop", b"error")
)
"""vLLM and SGLang send `message_start` with the model's first token, also of hidden reasoning."""


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error event. `status`: 4xx if the request is to blame, else 500. `data`: of the event."""

    status: int
    data: bytes

    @property
    def blames_engine(self) -> bool:
        return self.status >= ENGINE_ERROR


class StreamTail:
    """The end of a stream. Linear time; memory bounded by TAIL_BYTES_MAX plus a chunk, or LAST_EVENT_BYTES_MAX."""

    def __init__(self, shape: StreamShape, repeated_bytes_max: int = 0) -> None:
        """`repeated_bytes_max`: of the request, in the last event."""
        self.shape = shape
        self._last_event_bytes_max = min(LAST_EVENT_BYTES_MIN + repeated_bytes_max, LAST_EVENT_BYTES_MAX)
        self.events = 0
        self.error: StreamError | None = None  # the first one
        self._chunks: deque[bytes] = deque()
        self._start = b"\n"  # before the first chunk kept: the stream's beginning is one of a line
        self._bytes = 0
        self._bytes_max = TAIL_BYTES_MAX
        self._carry = b"\n"  # may hold the start of a pattern
        self.shows_output = not shape.output
        self._last_event = False
        self._unfinished_event = b""

    def feed(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._bytes += len(chunk)
        while self._bytes - len(self._chunks[0]) >= self._bytes_max:
            self._bytes -= len(self._chunks.popleft())
            self._start = b""
        if self.shape.output and not self._last_event:
            seen = self._carry + chunk
            self.shows_output = self.shows_output or self.shape.shows_output(seen)
            if self.shape.has_ended(seen):
                self._last_event, self._bytes_max = True, self._last_event_bytes_max
        seam = self._carry[1 - len(_DATA) :] + chunk[: len(_DATA) - 1]
        self.events += _data_lines(chunk) + _data_lines(seam)
        self._carry = (self._carry + chunk[-_PATTERN_BYTES_MAX:])[-_PATTERN_BYTES_MAX:]
        begun = self._unfinished_event
        if begun or b'"error"' in chunk or not chunk.endswith((b"\n\n", b"\r\n\r\n")):
            events = EVENT_END.split(begun + chunk)
            self.error = self.error or _first_error(events)
            rest = events[-1]
            self._unfinished_event = rest if len(rest) <= EVENT_BYTES_MAX else b""

    @property
    def opening_is_over(self) -> bool:
        """A comment is no output: vLLM's server sends some while its model may hang (`--sse-keep-alive-interval`)."""
        return self.shows_output and self.events > 0 and not (self.events == 1 and self._unfinished_event)

    @property
    def has_ended(self) -> bool:
        return self._last_event or self.shape.has_ended(self._start + b"".join(self._chunks))

    @property
    def is_over(self) -> bool:
        """Whether the last event has just come whole, also if the connection stays open. Cheap enough for each chunk."""
        if self.shape.output:
            return self._last_event and not self.mid_event
        return self._carry.rstrip().endswith(self.shape.ends)

    @property
    def mid_event(self) -> bool:
        return self._bytes > 0 and not ends_event(b"".join([*self._chunks][-EVENT_END_BYTES_MAX:]))

    @property
    def whole_events(self) -> int:
        """Which clients get, though the engine may have begun another one."""
        return self.events - _data_lines(b"\n" + self._unfinished_event)

    @property
    def usage(self) -> Usage:
        usages = (usage_in(data) for data in self.data_backwards() if b'"usage"' in data)
        found = next((usage for usage in usages if usage.completion_tokens >= 0), None)
        if found is None and self._last_event:  # one whose beginning was not kept
            found = usage_at_end(b"".join(self._chunks), within=b'{"response":{')
        return found or Usage()

    @property
    def delivered_tokens(self) -> Tokens:
        """Of a stream that ended early: the engine's newest count (some engines tell it in every event) and one token for
        each event since, or one for each event at all. An error is no output."""
        since = others = 0
        for data in self.data_backwards():
            counted = usage_in(data).completion_tokens if b'"usage"' in data else -1
            if counted >= 0:
                return counted + since
            is_output = data.strip() != b"[DONE]" and _error_in(data) is None
            since += is_output
            others += not is_output
        return self.events - others

    def data_backwards(self) -> Iterator[bytes]:
        lines = b"".join(self._chunks).replace(b"\r", b"\n").rsplit(b"\n", USAGE_LINES_MAX)
        for line in reversed(lines):
            if line.startswith(b"data:"):
                yield line[5:]


def _data_lines(text: bytes) -> int:
    return text.count(_DATA) + text.count(b"\rdata:")


_ENGINE_ERROR_TYPES = frozenset({"InternalServerError", "internal_error", "server_error", "api_error"})
ENGINE_ERROR = 500
REQUEST_ERROR = 400


class _Error(msgspec.Struct):
    type: Any = None
    code: Any = None

    @property
    def status(self) -> int:
        if isinstance(self.code, int):
            return ENGINE_ERROR if self.code >= ENGINE_ERROR else max(self.code, REQUEST_ERROR)
        named = any(isinstance(name, str) and name in _ENGINE_ERROR_TYPES for name in (self.type, self.code))
        return ENGINE_ERROR if named else REQUEST_ERROR


class _FailedResponse(msgspec.Struct):
    error: _Error | None = None


class _ErrorEvent(msgspec.Struct):
    """Completions have `error`; the Responses API has the event `error`, with its fields at the top, or
    `response.failed`."""

    error: _Error | str | None = None
    choices: msgspec.Raw | None = None
    type: Any = None
    code: Any = None
    response: _FailedResponse | None = None

    @property
    def found(self) -> _Error | None:
        if self.error is not None:
            return _Error(code=self.code) if isinstance(self.error, str) else self.error
        if self.type == "error":
            return _Error(code=self.code)
        return self.response.error if self.response is not None else None


_error_events = msgspec.json.Decoder(_ErrorEvent)


def _first_error(events: Iterable[bytes]) -> StreamError | None:
    """vLLM and SGLang report errors in an event after status 200. Most may be empty, and many."""
    return next(filter(None, (_error_in(event_data(event)) for event in events if b'"error"' in event)), None)


def _error_in(data: bytes) -> StreamError | None:
    if b'"error"' not in data:
        return None
    decoded = try_decode(_error_events, data)
    error = decoded.found if decoded is not None and decoded.choices is None else None
    return StreamError(error.status, data) if error is not None else None

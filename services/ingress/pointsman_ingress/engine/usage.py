"""Token usage: read from answers and events; usage events that only the ingress asked for are removed from streams, of
which clients get whole events."""

from typing import Annotated, TypeVar

import msgspec

from pointsman.adapters.sse import EVENT_END, event_data
from pointsman.primitives import Tokens

T = TypeVar("T")

COUNT_MAX: Tokens = 1_000_000_000  # larger counts are invalid
HELD_BYTES_MAX = 64 * 1024  # longer events pass unchanged
TAIL_BYTES_MAX = 8 * 1024  # holds the last fields of an answer, or the usage and the last event of a stream
USAGE_FIELDS_MAX = 64  # looked at in it
_USAGE = b'"usage"'
_CARRIED_BYTES = 3  # of an event's end that may precede its rest


class Usage(msgspec.Struct, frozen=True):
    """Token counts; -1 if unknown."""

    prompt_tokens: Tokens = -1
    completion_tokens: Tokens = -1
    cached_tokens: Tokens = -1

    def capped(self, most: "Usage") -> "Usage":
        """An engine's counts decide what a tenant pays: none above `most` is believed, in which -1 is no bound."""
        return Usage(
            capped(self.prompt_tokens, most.prompt_tokens),
            capped(self.completion_tokens, most.completion_tokens),
            capped(self.cached_tokens, most.prompt_tokens),
        )


def capped(count: Tokens, most: Tokens) -> Tokens:
    return count if most < 0 else min(count, most)


def known(tokens: Tokens) -> Tokens | None:
    return tokens if tokens >= 0 else None


_Count = Annotated[int, msgspec.Meta(ge=-1, le=COUNT_MAX)]


class _PromptDetails(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """Field names of completions, Responses API and Anthropic, whose `input_tokens` exclude cached ones."""

    prompt_tokens: _Count = -1
    completion_tokens: _Count = -1
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: _Count = -1
    output_tokens: _Count = -1
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None

    def counts(self) -> Usage:
        cache_tokens = (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)
        prompt = max(self.prompt_tokens, self.input_tokens + cache_tokens if self.input_tokens >= 0 else -1)
        details = self.prompt_tokens_details or self.input_tokens_details
        cached = details.cached_tokens if details is not None else self.cache_read_input_tokens
        return Usage(prompt, max(self.completion_tokens, self.output_tokens), -1 if cached is None else cached)


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Response | None = None


class _Object(msgspec.Struct):
    """Whatever it holds: its fields are skipped."""


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: _Object | None = None


_answers = msgspec.json.Decoder(_Answer)
_events = msgspec.json.Decoder(_Event)


def try_decode(decoder: msgspec.json.Decoder[T], data: bytes) -> T | None:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def usage_in(answer: bytes) -> Usage:
    """From an answer or an event's data; unknown if missing or invalid."""
    return _told(answer) or Usage()


def _told(answer: bytes) -> Usage | None:
    """None if it is no whole object."""
    decoded = try_decode(_answers, answer)
    if decoded is None:
        return None
    usage = decoded.usage or (decoded.response.usage if decoded.response else None)
    return usage.counts() if usage is not None else Usage()


def usage_at_end(answer: bytes, *, within: bytes = b"{") -> Usage | None:
    """Of a long answer, or of the object that begins with `within`, whose last fields are short, `usage` among them, as
    engines write it; else None. Without reading the rest, which would hold up the event loop in a thread too."""
    tail = answer[-TAIL_BYTES_MAX:]
    at = len(tail)
    for _ in range(USAGE_FIELDS_MAX):
        at = tail.rfind(b'"usage"', 0, at)
        if at < 0:
            return None
        told = _told(within + tail[at:])  # a whole object only if the field is one of the answer itself
        if told is not None:
            return told
    return None


class EventFilter:
    """Passes whole events, so that what is wrong with one is known before its beginning is shown, and an engine that dies
    leaves no part of one. Buffers at most HELD_BYTES_MAX and a chunk."""

    def __init__(self, *, removes_usage: bool) -> None:
        self._removes_usage = removes_usage
        self._held = b""
        self._passing = False  # whether the buffered event is too long and was passed on

    def feed(self, chunk: bytes) -> bytes:
        plain = not self._removes_usage or b'"usage"' not in chunk
        if not self._held and plain and chunk.endswith((b"\n\n", b"\r\n\r\n")):
            return chunk
        whole, output, start = self._held + chunk, list[bytes](), 0
        found = whole.find(_USAGE) if self._removes_usage else -1
        passed = 0  # of `whole`; a chunk may have a hundred thousand events, most of them empty
        for end in EVENT_END.finditer(whole, max(0, len(self._held) - _CARRIED_BYTES)):
            stop = end.end()
            if self._passing or start <= found < stop:
                output += (whole[passed:start], self._passed(whole[start:stop]))
                passed, self._passing, found = stop, False, whole.find(_USAGE, stop) if found >= 0 else -1
            start, self._held = stop, b""
        output.append(whole[passed:start])
        rest = whole[start:]
        if self._passing or len(rest) > HELD_BYTES_MAX:
            output.append(rest[len(self._held) if self._passing else 0 :])
            rest, self._passing = rest[-_CARRIED_BYTES:], True
        self._held = rest
        return b"".join(output)

    def rest(self) -> bytes:
        held, self._held = b"" if self._passing else self._held, b""
        return held

    def _passed(self, event: bytes) -> bytes:
        if self._passing:
            return event[len(self._held) :]
        return b"" if self._removes_usage and _is_usage(event) else event


def _is_usage(event: bytes) -> bool:
    if _USAGE not in event:
        return False
    decoded = try_decode(_events, event_data(event))
    return decoded is not None and not decoded.choices and decoded.usage is not None

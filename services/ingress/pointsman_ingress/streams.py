"""What the streams of different endpoints look like, as far as a proxy cares: where output begins, and how they end.

Completions and chats send a chunk when there is a token, and `[DONE]` when all is said. The Responses API sends named
events: some before anything was computed, then deltas, and a last one that holds the whole answer once more.
"""

from dataclasses import dataclass


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
_LINE_ENDS = (b"\n", b"\r\n")

NAMED_EVENTS = StreamShape(
    output=tuple(b".delta" + end for end in _LINE_ENDS),
    ends=tuple(b"event: " + name + end for name in _LAST_EVENTS for end in _LINE_ENDS),
)

"""What a streamed answer cost, learned without the client noticing.

Engines say the usage of a stream only to those who ask (`stream_options.include_usage`), in one more event before the
end. A client that did not ask must not see that event. So the ingress asks in the client's place, and takes the event
out again. All other events pass as they came; what is held back is at most the beginning of an event whose end is not
here yet, and of that no more than a usage event could have.
"""

from typing import Any

import msgspec

from pointsman_ingress.engine.streams import EVENT_END, event_data

HELD_BYTES_MAX = 64 * 1024
"""An event that is longer than this is no usage event, and passes as it comes."""

_CARRIED_BYTES = 3
"""How much of the end of an event may have come before the rest of it."""

_ASKED = b'"stream_options":{"include_usage":true},'
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: dict[str, Any] | None = None


_events = msgspec.json.Decoder(_Event)


def asking_for_usage(body: bytes) -> bytes:
    """The same request, asking for usage, too. `body` is a JSON object that was read before."""
    if b'"stream_options"' not in body:
        start = body.index(b"{") + 1
        return body[:start] + _ASKED + body[start:]
    fields = _fields.decode(body)
    known = fields.get("stream_options")
    options: dict[str, Any] = (msgspec.json.decode(known) if known is not None else None) or {}
    asked = {**fields, "stream_options": msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))}
    return msgspec.json.encode(asked)


class UsageRemover:
    """Takes the usage out of one stream. Holds no more than HELD_BYTES_MAX and a chunk."""

    def __init__(self) -> None:
        self._held = b""
        """The beginning of an event, or of one that is too long to be held its last few bytes."""
        self._passing = False
        """Whether the client has seen what is held: the event is too long."""

    def shown(self, chunk: bytes) -> bytes:
        """What of the stream the client may see now; may be nothing."""
        if not self._held and b'"usage"' not in chunk and chunk.endswith((b"\n\n", b"\r\n\r\n")):
            return chunk
        whole, shown, start = self._held + chunk, list[bytes](), 0
        for end in EVENT_END.finditer(whole, max(0, len(self._held) - _CARRIED_BYTES)):
            shown.append(self._of_event(whole[start : end.end()]))
            start, self._held, self._passing = end.end(), b"", False
        rest = whole[start:]
        if self._passing or len(rest) > HELD_BYTES_MAX:
            shown.append(rest[len(self._held) if self._passing else 0 :])
            rest, self._passing = rest[-_CARRIED_BYTES:], True
        self._held = rest
        return b"".join(shown)

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = b"" if self._passing else self._held, b""
        return held

    def _of_event(self, event: bytes) -> bytes:
        if self._passing:
            return event[len(self._held) :]
        return b"" if _is_usage(event) else event


def _is_usage(event: bytes) -> bool:
    """Whether an event tells of usage and of nothing else."""
    if b'"usage"' not in event:
        return False
    try:
        said = _events.decode(event_data(event))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return not said.choices and said.usage is not None

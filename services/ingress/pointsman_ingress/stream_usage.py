"""What a streamed answer cost, learned without the client noticing.

Engines say the usage of a stream only to those who ask (`stream_options.include_usage`), in one more event before the
end. A client that did not ask must not see that event. So the ingress asks in the client's place, and takes the event
out again. All other events pass as they came; what is held back is at most the beginning of an event whose end is not
here yet.
"""

from typing import Any

import msgspec

EVENT_END = b"\n\n"
EVENT_START = b"data: {"
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
    """Takes the usage out of one stream."""

    def __init__(self) -> None:
        self._held = b""

    def shown(self, chunk: bytes) -> bytes:
        """What of the stream the client may see now; may be nothing."""
        if not self._held and b'"usage"' not in chunk and chunk.endswith(EVENT_END):
            return chunk
        whole, end, self._held = (self._held + chunk).rpartition(EVENT_END)
        if b'"usage"' not in whole:
            return whole + end
        return b"".join(event + EVENT_END for event in whole.split(EVENT_END) if not _is_usage(event))

    def rest(self) -> bytes:
        """What was held back when the stream ended."""
        held, self._held = self._held, b""
        return held


def _is_usage(event: bytes) -> bool:
    """Whether an event tells of usage and of nothing else."""
    if not event.startswith(EVENT_START) or b'"usage"' not in event:
        return False
    try:
        said = _events.decode(event[len(EVENT_START) - 1 :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return not said.choices and said.usage is not None

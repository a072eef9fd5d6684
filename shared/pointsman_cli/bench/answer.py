"""Reads one streamed answer without parsing its chunks: times of data, and the last kilobytes with usage, errors and
end mark."""

from typing import Any

import msgspec

from pointsman.adapters.sse import events_in

TAIL_BYTES = 8192
DATA = b"data:"
END_MARK = b"[DONE]"


class StreamError(Exception):
    """The stream ended in an error event, or without its end mark. The message says which."""


class StreamedAnswer:
    def __init__(self) -> None:
        self.first_data_at: float | None = None
        self.last_data_at: float | None = None
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self.first_data_at is None and DATA in self._tail:
            self.first_data_at = now
        self.last_data_at = now

    def usage(self) -> dict[str, Any]:
        """The engine's own counts, from the last event that has them; empty without any. Call it at the end. Raises
        StreamError."""
        usage: dict[str, Any] = {}
        ended = False
        for event in reversed(list(events_in(self._tail))):
            if event == END_MARK:
                ended = True
                continue
            content = decoded_object(event)
            if "error" in content:
                raise StreamError(_error_text(content["error"]))
            usage = usage or content.get("usage") or {}
        if not ended:
            raise StreamError("the stream broke off")
        return usage


def error_code(body: bytes) -> str:
    return _error_text(decoded_object(body).get("error", ""))


def decoded_object(event: bytes) -> dict[str, Any]:
    """The JSON object; empty for anything else."""
    try:
        content = msgspec.json.decode(event)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or error.get("message") or "error")
    return str(error)

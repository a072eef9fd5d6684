"""Spans of requests, for OpenTelemetry: what they can do, and W3C trace headers. Where nothing is traced each span is NO_SPAN.
`otlp` has those that are sent, `tracer_opening` chooses."""

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from pointsman.ports import OnStored

SpanKind = Literal["internal", "server", "client"]
Attributes = Mapping[str, Any]
TraceHeaders = Mapping[str, str]

TRACESTATE_CHARACTERS_MAX = 512
_NONE: TraceHeaders = {}
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Span:
    """Records nothing: the request is not traced. As a context it ends with the block, and with the error that left
    it."""

    __slots__ = ()

    recording: bool = False
    """Whether attributes are worth their computation."""
    trace_id: str = ""

    @property
    def headers(self) -> TraceHeaders:
        """For whoever works on this span's behalf; empty if nothing is traced."""
        return _NONE

    def child(self, name: str, kind: SpanKind = "internal") -> "Span":  # noqa: ARG002
        return self

    def set(self, attributes: Attributes) -> None:
        """Values that are None are left out."""

    def event(self, name: str) -> None: ...

    def stored(self, event: object) -> OnStored | None:
        """Notes a log event. The result takes its sequence, for which the span is kept open a bounded time."""

    def fail(self, error_type: str) -> None: ...

    def end(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


NO_SPAN = Span()


class Tracer(Protocol):
    def begin(self, name: str, parent: TraceHeaders, kind: SpanKind = "server") -> Span:
        """A span for work that came from another process. `parent`: valid headers, or none."""
        ...

    async def close(self) -> None:
        """Sends what is left, for a bounded time."""
        ...


def trace_headers(headers: Mapping[bytes, bytes]) -> TraceHeaders:
    """The client's W3C context, bounded and as version 00; empty if there is none or it is invalid."""
    parent = headers.get(b"traceparent")
    known = None if parent is None else _TRACEPARENT.match(parent)
    if parent is None or known is None:
        return _NONE
    version, rest = parent[:2], parent[known.end() :]
    if rest and (version == b"00" or rest[:1] != b"-"):
        return _NONE
    found = {"traceparent": "00" + known[0][2:].decode()}
    state = headers.get(b"tracestate", b"").decode("latin-1")
    if state and len(state) <= TRACESTATE_CHARACTERS_MAX and state.isascii() and state.isprintable():
        found["tracestate"] = state
    return found

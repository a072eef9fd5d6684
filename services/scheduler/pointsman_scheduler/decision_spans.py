"""Spans of a leader below the ingress's: `decide` (one turn) and `queue` (placed until granted), with the log's events.
A redispatch or a move after the grant has none here: the ingress has a span for each engine."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import assert_never

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import RouteRequest
from pointsman.contracts.decisions import RequestGranted, RequestMigrated, RequestPlaced, RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestCancelled
from pointsman.ports import OnStored
from pointsman.primitives import RequestId
from pointsman.runtime import span_attributes
from pointsman.runtime.tracing import NO_SPAN, Span, SpanKind, Tracer, trace_headers

OPEN_MAX = 10_000
"""As many may wait; more are not traced."""


Decided = RequestArrived | RequestPlaced | RequestMigrated | RequestGranted | RequestRejected | RequestCancelled


@dataclass(slots=True)
class _Open:
    attempt: int
    traceparent: str
    decide: Span
    queue: Span = NO_SPAN
    decided: bool = False


class DecisionSpans:
    """Of one term."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._open: dict[RequestId, _Open] = {}

    @contextmanager
    def turn(self, command: RouteRequest) -> Iterator[None]:
        """Repeats of a waiting request have no span."""
        known = self._open.get(command.request)
        if known is not None and known.attempt < command.attempt:
            self._end(command.request)
        elif known is not None:
            yield
            return
        self._begin(command)
        try:
            yield
        finally:
            if (begun := self._open.get(command.request)) is not None:
                begun.decide.end()
                if not begun.decided:
                    del self._open[command.request]

    def decided(self, event: LogEvent) -> OnStored | None:
        if not isinstance(event, Decided) or (found := self._open.get(event.request)) is None:
            return None
        found.decided = True
        match event:
            case RequestArrived():
                return found.decide.stored(event)
            case RequestPlaced():
                found.decide.set({span_attributes.POLICY: event.policy, span_attributes.INSTANCE: event.instance})
                found.queue.end()
                found.queue = self._span("queue", found.traceparent, "internal")
                found.queue.set({span_attributes.REQUEST_ID: event.request, span_attributes.INSTANCE: event.instance})
                return found.decide.stored(event)
            case RequestMigrated():
                found.queue.set({span_attributes.INSTANCE: event.instance})
                return found.queue.stored(event)
            case RequestGranted():
                on_stored = found.queue.stored(event)
            case RequestRejected() | RequestCancelled():
                last = found.decide if found.queue is NO_SPAN else found.queue
                last.set({span_attributes.REASON: event.reason})
                on_stored = last.stored(event)
            case _:
                assert_never(event)
        self._end(event.request)
        return on_stored

    def end_absent(self, requests: Container[RequestId]) -> None:
        for gone in [request for request in self._open if request not in requests]:
            self._end(gone)

    def close(self) -> None:
        self.end_absent(())

    def _begin(self, command: RouteRequest) -> None:
        span = self._span("decide", command.traceparent, "server") if len(self._open) < OPEN_MAX else NO_SPAN
        if span.recording:
            span.set({span_attributes.REQUEST_ID: command.request, span_attributes.ATTEMPT: command.attempt})
            self._open[command.request] = _Open(command.attempt, command.traceparent, span)

    def _end(self, request: RequestId) -> None:
        found = self._open.pop(request)
        found.queue.end()
        found.decide.end()

    def _span(self, name: str, traceparent: str, kind: SpanKind) -> Span:
        parent = trace_headers({b"traceparent": traceparent.encode()})
        return self._tracer.begin(name, parent, kind) if parent else NO_SPAN

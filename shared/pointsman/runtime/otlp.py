"""Spans over OTLP (HTTP/protobuf) by OpenTelemetry's SDK, which reads the OTEL_* variables. Ended spans wait in a bounded
queue for a thread; a full queue or a failed export drops and counts them. Imported only while tracing is on."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Sequence as Several
from contextlib import suppress
from importlib.metadata import version
from types import TracebackType
from typing import Any

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind as OtelKind
from opentelemetry.trace import Status, StatusCode, get_current_span, set_span_in_context
from opentelemetry.trace import Tracer as OtelTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from typing_extensions import override

from pointsman.ports import OnStored
from pointsman.primitives import Seconds, Sequence
from pointsman.runtime import span_attributes
from pointsman.runtime.telemetry import SPANS_DROPPED
from pointsman.runtime.tracing import Attributes, Span, SpanKind, TraceHeaders, Tracer

log = structlog.get_logger()

STORED_SECONDS_MAX: Seconds = 5.0
"""How long an ended span waits for the sequences of its log events."""
FLUSH_SECONDS_MAX: Seconds = 2.0
_KINDS = {"internal": OtelKind.INTERNAL, "server": OtelKind.SERVER, "client": OtelKind.CLIENT}
_propagator = TraceContextTextMapPropagator()


class OtlpTracer(Tracer):
    def __init__(
        self, service: str, *, instance: str, trusted: bool = True, exporter: SpanExporter | None = None
    ) -> None:
        """`exporter`: replaces OTLP."""
        _log_as_ours()
        own = {"service.name": service, "service.instance.id": instance, "service.version": version("pointsman")}
        resource = Resource.create(own).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if not trusted:
            self._provider.sampler = _OwnDecision(self._provider.sampler)
        self._provider.add_span_processor(_BoundedProcessor(_CountingExporter(exporter or OTLPSpanExporter())))
        self._tracer = self._provider.get_tracer("pointsman", version("pointsman"))
        self._unstored: set[RecordedSpan] = set()

    @override
    def begin(self, name: str, parent: TraceHeaders, kind: SpanKind = "server") -> Span:
        context = _propagator.extract(parent, Context()) if parent else Context()
        span = self._tracer.start_span(name, context, _KINDS[kind])
        return RecordedSpan(self._tracer, span, self._unstored)

    @override
    async def close(self) -> None:
        for span in list(self._unstored):
            span.send()
        loop = asyncio.get_running_loop()
        flushed = asyncio.Event()

        def flush() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(flushed.set)

        threading.Thread(target=flush, daemon=True, name="traces-flush").start()
        try:
            async with asyncio.timeout(FLUSH_SECONDS_MAX):
                await flushed.wait()
        except TimeoutError:
            log.warning("traces_unsent", seconds=FLUSH_SECONDS_MAX)


class RecordedSpan(Span):
    __slots__ = (
        "_ended_at",
        "_kept",
        "_sent",
        "_sequences",
        "_span",
        "_tracer",
        "_unstored",
        "recording",
        "trace_id",
    )

    def __init__(self, tracer: OtelTracer, span: OtelSpan, kept: "set[RecordedSpan]") -> None:
        """`kept`: ended spans that wait for sequences."""
        self._tracer = tracer
        self._span = span
        self._kept = kept
        self._unstored = 0
        self._sequences: list[Sequence] = []
        self._ended_at = 0
        self._sent = False
        self.recording = span.is_recording()
        self.trace_id = f"{span.get_span_context().trace_id:032x}"

    @property
    @override
    def headers(self) -> TraceHeaders:
        headers: dict[str, str] = {}
        _propagator.inject(headers, set_span_in_context(self._span))
        return headers

    @override
    def child(self, name: str, kind: SpanKind = "internal") -> Span:
        if not self.recording:
            return self
        span = self._tracer.start_span(name, set_span_in_context(self._span), _KINDS[kind])
        return RecordedSpan(self._tracer, span, self._kept)

    @override
    def set(self, attributes: Attributes) -> None:
        if self.recording:
            self._span.set_attributes(_known(attributes))

    @override
    def event(self, name: str) -> None:
        if self.recording:
            self._span.add_event(name)

    @override
    def stored(self, event: object) -> OnStored | None:
        if not self.recording:
            return None
        at, name = time.time_ns(), type(event).__name__
        self._unstored += 1

        def on_stored(sequence: Sequence) -> None:
            self._unstored -= 1
            if self._sent:
                return
            self._sequences.append(sequence)
            self._span.add_event(name, {span_attributes.SEQUENCE: sequence}, at)
            if self._ended_at and not self._unstored:
                self.send()

        return on_stored

    @override
    def fail(self, error_type: str) -> None:
        if self.recording:
            self._span.set_attribute(span_attributes.ERROR_TYPE, error_type)
            self._span.set_status(Status(StatusCode.ERROR))

    @override
    def end(self) -> None:
        if self._ended_at or not self.recording:
            return
        self._ended_at = time.time_ns()
        if self._unstored:
            self._kept.add(self)
            asyncio.get_running_loop().call_later(STORED_SECONDS_MAX, self.send)
        else:
            self.send()

    def send(self) -> None:
        """Without the sequences that are not known yet."""
        if self._sent:
            return
        self._sent, self.recording = True, False
        self._kept.discard(self)
        if self._sequences:
            self._span.set_attribute(span_attributes.SEQUENCES, sorted(self._sequences))
        self._span.end(self._ended_at or None)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(str(getattr(error, "failure", None) or type(error).__name__))
        self.end()


class _OwnDecision(Sampler):
    """Takes trace ids from strangers, and neither their decision nor, where it is drawn by the id, their choice of it."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._ids = RandomIdGenerator()

    @override
    def should_sample(
        self, parent_context: Context | None, trace_id: int, *others: Any, **named: Any
    ) -> SamplingResult:
        parent = get_current_span(parent_context).get_span_context()
        if parent.is_valid and parent.is_remote:
            return self._sampler.should_sample(None, self._ids.generate_trace_id(), *others, **named)
        return self._sampler.should_sample(parent_context, trace_id, *others, **named)

    @override
    def get_description(self) -> str:
        return f"OwnDecision({self._sampler.get_description()})"


class _CountingExporter(SpanExporter):
    """`taken` is written by the exporting thread alone."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = 0
        SPANS_DROPPED.show_zeros()

    @override
    def export(self, spans: Several[ReadableSpan]) -> SpanExportResult:
        self.taken += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                SPANS_DROPPED.labels("not_exported").inc(len(spans))
        return result

    @override
    def shutdown(self) -> None:
        self._exporter.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    """Drops new spans while the queue is full. `_put` is written by the event loop alone."""

    def __init__(self, exporter: _CountingExporter) -> None:
        super().__init__(exporter)
        self._exporter = exporter
        self._queue_max = int(os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) or 2048)
        self._put = 0

    @override
    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._put - self._exporter.taken >= self._queue_max:
            SPANS_DROPPED.labels("queue_full").inc()
            return
        self._put += 1
        super().on_end(span)


class _OurLog(logging.Handler):
    @override
    def emit(self, record: logging.LogRecord) -> None:
        log.warning("traces_not_exported", reason=record.getMessage())


def _log_as_ours() -> None:
    """The SDK's warnings, at a bounded rate."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [_OurLog(logging.WARNING)], False


def _known(attributes: Attributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}

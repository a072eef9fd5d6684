"""Tracing: off unless an endpoint is named, bounded while the collector is in trouble, headers taken as W3C writes them."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from structlog.testing import capture_logs

from pointsman.runtime import otlp, span_attributes
from pointsman.runtime.otlp import OtlpTracer
from pointsman.runtime.telemetry import SPANS_DROPPED
from pointsman.runtime.tracer_opening import open_tracer
from pointsman.runtime.tracing import NO_SPAN, trace_headers
from tests.support.otlp_collector import collector

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
MONITORING_PAGE = Path(__file__).parents[3] / "docs" / "monitoring.md"
EVERY_SERVICE_IS_LOADED = """
import sys
import pointsman_ingress.main, pointsman_scheduler.main
from pointsman.runtime.tracer_opening import open_tracer
assert open_tracer("ingress", instance="1") is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "google"))]
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """The SDK's draw random numbers while they retry, which properties of later tests take for their own."""
    yield
    for thread in threading.enumerate():
        if thread.name in ("OtelBatchSpanRecordProcessor", "traces-flush"):
            thread.join(30)
            assert not thread.is_alive()


def test_without_an_endpoint_neither_sdk_nor_exporter_is_imported() -> None:
    subprocess.run([sys.executable, "-c", EVERY_SERVICE_IS_LOADED], check=True)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({}, None),
        ({ENDPOINT: ""}, None),
        ({ENDPOINT: "http://a:4318", "OTEL_SDK_DISABLED": "true"}, None),
        ({ENDPOINT: "http://a:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        ({ENDPOINT: "http://a:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only the protocol"),
        ({ENDPOINT: "http://a:4318", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "not understood"),
    ],
)
def test_what_is_not_understood_switches_tracing_off_and_is_said(
    variables: dict[str, str], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with capture_logs() as lines:
        assert open_tracer("ingress", instance="1") is None

    assert [reason in line["reason"] for line in lines if reason] == [True] * (reason is not None)


def test_without_the_extra_tracing_is_off_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "pointsman.runtime.otlp", None)
    with capture_logs() as lines:
        assert open_tracer("ingress", instance="1") is None

    assert "pointsman[traces]" in lines[0]["reason"]


@pytest.mark.parametrize(
    ("parent", "state", "expected"),
    [
        (PARENT, "a=b", {"traceparent": PARENT, "tracestate": "a=b"}),
        (PARENT, "x" * 513, {"traceparent": PARENT}),
        (PARENT, "a=\x01", {"traceparent": PARENT}),
        ("01" + PARENT[2:] + "-more", "", {"traceparent": PARENT}),
        (PARENT + "-more", "", {}),
        ("01" + PARENT[2:] + "more", "", {}),
        ("ff" + PARENT[2:], "a=b", {}),
        (PARENT.upper(), "", {}),
        (PARENT[:-1], "", {}),
        (f"00-{'0' * 32}-00f067aa0ba902b7-01", "", {}),
        (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01", "", {}),
        ("é" * 55, "", {}),
    ],
)
def test_a_trace_context_is_taken_as_w3c_writes_it_or_not_at_all(
    parent: str, state: str, expected: dict[str, str]
) -> None:
    headers = {b"traceparent": parent.encode(), b"tracestate": state.encode()}

    assert trace_headers(headers) == expected


def test_a_span_of_nothing_is_its_own_child_and_hands_on_nothing() -> None:
    with NO_SPAN.child("route", "client") as span:
        assert span is NO_SPAN
    assert (span.recording, span.trace_id, span.headers, span.stored(object())) == (False, "", {}, None)


async def test_a_span_waits_for_the_sequences_of_its_events_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    tracer = OtlpTracer("ingress", instance="1", exporter=exporter)
    acknowledged, lost, late = (tracer.begin(name, {}) for name in ("acknowledged", "lost", "late"))
    monkeypatch.setattr(otlp, "STORED_SECONDS_MAX", 0.01)
    on_stored, on_late = acknowledged.stored(object()), late.stored(object())
    assert on_stored is not None
    assert on_late is not None
    assert lost.stored(object()) is not None
    for span in (lost, late, acknowledged):
        span.end()
    on_stored(7)
    await asyncio.sleep(0.05)
    on_late(8)
    await tracer.close()

    sequences = {s.name: (s.attributes or {}).get(span_attributes.SEQUENCES) for s in exporter.get_finished_spans()}
    assert sequences == {"acknowledged": (7,), "lost": None, "late": None}


async def test_an_unsampled_request_hands_on_that_it_is_not_and_has_no_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = OtlpTracer("ingress", instance="1", exporter=InMemorySpanExporter())
    span = tracer.begin("request", trace_headers({b"traceparent": PARENT.encode()}))

    assert span.child("route") is span
    assert span.headers["traceparent"].endswith("-00")
    assert span.trace_id in span.headers["traceparent"]
    await tracer.close()


@pytest.mark.parametrize("manner", ["hangs", "refuses"])
async def test_a_collector_in_trouble_costs_spans_and_no_time(
    manner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setattr(otlp, "FLUSH_SECONDS_MAX", 0.1)
    before = {reason: _dropped(reason) for reason in ("queue_full", "not_exported")}
    with collector(tmp_path, manner) as running:
        monkeypatch.setenv(ENDPOINT, running.url)
        tracer = open_tracer("ingress", instance="1")
        assert tracer is not None
        for number in range(100):
            tracer.begin(f"span {number}", {}).end()
        full = _dropped("queue_full") - before["queue_full"]
        with capture_logs() as lines:
            await tracer.close()

    assert ("traces_unsent" in {line["event"] for line in lines}) or manner != "hangs"
    assert full >= 100 - 8 - 4 * 2
    assert running.spans() == []


async def test_what_was_not_sent_when_the_process_ends_is_sent_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector(tmp_path) as running:
        monkeypatch.setenv(ENDPOINT, running.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
        tracer = open_tracer("ingress", instance="1")
        assert tracer is not None
        tracer.begin("request", {}).end()
        await tracer.close()

        assert [(span.service, span.name, span.kind) for span in running.spans()] == [("mine", "request", "server")]


def test_the_documentation_names_every_attribute_of_ours() -> None:
    page = MONITORING_PAGE.read_text()
    ours = {
        value for name, value in vars(span_attributes).items() if name.isupper() and f"{value}".startswith("pointsman.")
    }

    assert {name for name in ours if f"`{name}`" not in page} == set()


def _dropped(reason: str) -> float:
    return float(SPANS_DROPPED.labels(reason)._value.get())

"""Traces: one for each request from the client to the engine; nothing of what was said. `test_several_models.py` has one through
a whole fleet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pointsman.runtime.otlp import OtlpTracer
from tests.support.fake_engine import Behaviour
from tests.support.ingress_world import CHAT, COMPLETIONS, HELLO, STREAM, IngressBench, world_with
from tests.support.tenants import ALICE, KEYS
from tests.support.waiting import eventually

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
SECRET = "the-launch-code-is-7351"


@dataclass
class Traced:
    world: IngressBench
    exporter: InMemorySpanExporter
    tracer: OtlpTracer

    async def spans(self) -> list[ReadableSpan]:
        """All so far, the earliest first. Ends the tracer."""
        await self.tracer.close()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


@asynccontextmanager
async def traced_world(*, trusted: bool = True, **settings: Any) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    tracer = OtlpTracer("pointsman-ingress", instance="ingress-1", trusted=trusted, exporter=exporter)
    keys = None if trusted else KEYS
    async with world_with(tokenizer="builtin", tracer=tracer, keys=keys, **settings) as world:
        yield Traced(world, exporter, tracer)


async def answered(world: IngressBench, path: str = COMPLETIONS, body: Any = STREAM, **headers: str) -> int:
    async with world.post(path, body, **headers) as answer:
        await answer.read()
        return int(answer.status)


def names(spans: list[ReadableSpan]) -> list[str]:
    return [span.name for span in spans]


async def test_a_request_that_is_tried_again_has_a_span_for_each_engine() -> None:
    async with traced_world() as traced:
        traced.world.one.script.append(Behaviour.ERRS)
        assert await answered(traced.world, traceparent=SAMPLED, tracestate="a=b") == 200
        sent = [engine.received[-1].headers for engine in (traced.world.one, traced.world.two)]
        server, *rest = await traced.spans()

    assert names(rest) == ["tokenise", "route", "text_completion m", "route", "text_completion m"]
    assert server.name == f"POST {COMPLETIONS}"
    assert server.parent is not None
    assert server.context is not None
    assert f"{server.parent.span_id:016x}" == PARENT
    assert {f"{span.context.trace_id:032x}" for span in rest if span.context} == {TRACE}
    assert {span.parent.span_id for span in rest if span.parent} == {server.context.span_id}

    failed, served = rest[2], rest[4]
    assert failed.attributes is not None
    assert served.attributes is not None
    assert (failed.attributes["error.type"], failed.attributes["http.response.status_code"]) == ("http_5xx", 500)
    assert served.attributes["http.request.resend_count"] == 1
    assert [event.name for event in served.events] == ["connection_opened", "response_head", "first_byte"]
    for span, headers in ((failed, sent[0]), (served, sent[1])):
        assert span.context is not None
        assert headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert headers["tracestate"] == "a=b"

    assert server.attributes is not None
    assert server.attributes["pointsman.retries"] == 1
    assert server.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert server.attributes["pointsman.predicted_cached_tokens"] == 128
    assert server.status.is_ok or server.status.is_unset


@pytest.mark.parametrize(
    "hostile",
    ["a" * 5000, f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{PARENT}-01", f"{SAMPLED}-x"],
)
async def test_a_trace_header_that_is_none_is_left_behind(hostile: str) -> None:
    async with traced_world() as traced:
        assert await answered(traced.world, traceparent=hostile, tracestate="x" * 5000) == 200
        headers = traced.world.one.received[-1].headers
        spans = await traced.spans()

    assert spans[0].parent is None
    assert TRACE not in headers["traceparent"]
    assert "tracestate" not in headers


async def test_without_tracing_only_valid_headers_of_trusted_clients_reach_the_engine() -> None:
    async with world_with() as world:
        assert await answered(world, traceparent=SAMPLED, tracestate="a=b") == 200
        assert world.one.received[-1].headers["traceparent"] == SAMPLED
        assert world.one.received[-1].headers["tracestate"] == "a=b"
        assert await answered(world, traceparent="a" * 5000, tracestate="a=b") == 200
        assert not {"traceparent", "tracestate"} & world.one.received[-1].headers.keys()
    async with world_with(keys=KEYS) as world:
        assert await answered(world, traceparent=SAMPLED, **ALICE) == 200
        assert "traceparent" not in world.one.received[-1].headers


@pytest.mark.parametrize(("trusted", "recorded"), [(True, True), (False, False)])
async def test_who_needs_a_key_does_not_decide_what_is_recorded(
    monkeypatch: pytest.MonkeyPatch, *, trusted: bool, recorded: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with traced_world(trusted=trusted) as traced:
        assert await answered(traced.world, traceparent=SAMPLED, **ALICE) == 200
        headers = traced.world.one.received[-1].headers
        spans = await traced.spans()

    assert bool(spans) == recorded
    assert headers["traceparent"].startswith(f"00-{TRACE}-")
    assert headers["traceparent"].endswith("-01" if recorded else "-00")


async def test_who_needs_a_key_does_not_hide_either() -> None:
    async with traced_world(trusted=False) as traced:
        assert await answered(traced.world, traceparent=UNSAMPLED, **ALICE) == 200
        server, *_ = await traced.spans()

    assert server.attributes is not None
    assert server.attributes["pointsman.tenant"] == "alice"
    assert server.context is not None
    assert f"{server.context.trace_id:032x}" == TRACE


async def test_spans_say_nothing_of_what_was_said_or_shown() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "stream": True}
    async with traced_world() as traced:
        assert await answered(traced.world, CHAT, body, authorization=f"Bearer {SECRET}", cookie=SECRET) == 200
        assert await answered(traced.world, CHAT, {**HELLO, "messages": [SECRET]}) == 400
        assert await answered(traced.world, CHAT, {**HELLO, "user": SECRET}) == 200
        traced.world.scheduler.rejection = (429, "slo_ttft", 1.0)
        assert await answered(traced.world) == 429
        spans = await traced.spans()

    assert SECRET not in "".join(span.to_json() for span in spans)
    routes = [span.attributes for span in spans if span.name == "route" and span.attributes]
    assert [attributes.get("pointsman.reason") for attributes in routes] == [None, None, "slo_ttft"]


async def test_a_stream_that_breaks_off_and_a_client_that_leaves_are_errors() -> None:
    async with traced_world() as traced:
        traced.world.one.script.append(Behaviour.BREAKS_OFF)
        assert await answered(traced.world) == 200
        traced.world.one.script.append(Behaviour.HANGS_AFTER_FIRST)
        async with traced.world.post(COMPLETIONS, STREAM) as answer:
            await answer.content.readany()
        await eventually(lambda: traced.world.one.given_up == 1)
        spans = await traced.spans()

    servers = [span for span in spans if span.name == f"POST {COMPLETIONS}"]
    engines = [span for span in spans if span.name == "text_completion m"]
    assert [span.attributes["error.type"] for span in servers if span.attributes] == ["engine_failed", "client_gone"]
    assert next(span.attributes["error.type"] for span in engines if span.attributes) == "stream_reset"

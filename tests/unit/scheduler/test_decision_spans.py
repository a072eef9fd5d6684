"""A leader's spans: below the ingress's, with the log's events; repeats, rejections and other leaders leave none behind."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pointsman.contracts.commands import CancelRequest, RouteGranted, RouteRejected, RouteRequest
from pointsman.contracts.subjects import command_subject
from pointsman.ports import CommandTimeoutError
from pointsman.primitives import PoolName, RequestId, Sequence, WallSeconds
from pointsman.runtime.otlp import OtlpTracer
from pointsman_scheduler.service import SchedulerService
from tests.support.events import finished, first_token, reported, route
from tests.support.memory_pool import MemoryPool
from tests.support.waiting import eventually

POOL = PoolName("default")
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACED = f"00-{TRACE}-{PARENT}-01"


@dataclass
class TracedScheduler:
    pool: MemoryPool
    service: SchedulerService
    tracer: OtlpTracer
    exporter: InMemorySpanExporter

    async def ask(self, request: str, *, seconds: float = 5.0, **fields: Any) -> object:
        """The answer to `cmd.route`; None if it waits."""
        try:
            return await self.pool.route(request, [1], timeout=seconds, **({"traceparent": TRACED} | fields))
        except CommandTimeoutError:
            return None

    async def spans(self) -> list[ReadableSpan]:
        await self.tracer.close()
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


@asynccontextmanager
async def traced_scheduler(**settings: Any) -> AsyncIterator[TracedScheduler]:
    pool, exporter = MemoryPool(), InMemorySpanExporter()
    tracer = OtlpTracer("pointsman-scheduler", instance="s", exporter=exporter)
    await pool.append(pool.joined("engine-1"), reported("engine-1", 0, [], at=pool.clock.now()))
    async with pool.scheduler(tracer=tracer, **settings) as service:
        yield TracedScheduler(pool, service, tracer, exporter)


def sequences(span: ReadableSpan) -> dict[str, Sequence]:
    return {event.name: (event.attributes or {})["pointsman.log.sequence"] for event in span.events}  # type: ignore[misc]


async def test_a_decision_and_its_queue_hang_on_the_ingress_and_name_what_is_in_the_log() -> None:
    async with traced_scheduler() as world:
        assert isinstance(await world.ask("r1"), RouteGranted)
        spans = await world.spans()
        entries = {entry.sequence: entry for entry in await world.pool.entries()}

    assert [span.name for span in spans] == ["decide", "queue"]
    assert {f"{span.parent.span_id:016x}" for span in spans if span.parent} == {PARENT}
    named = {name: entries[sequence].event for span in spans for name, sequence in sequences(span).items()}
    assert {name: type(event).__name__ for name, event in named.items()} == {
        name: name for name in ("RequestArrived", "RequestPlaced", "RequestGranted")
    }
    assert not any(TRACE.encode() in entry.payload for entry in entries.values())


@pytest.mark.parametrize("traceparent", ["", "x" * 55, f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"])
async def test_what_is_not_traced_has_no_span(traceparent: str) -> None:
    async with traced_scheduler() as world:
        assert isinstance(await world.ask("r1", traceparent=traceparent), RouteGranted)
        assert await world.spans() == []


async def test_a_request_that_waits_has_one_queue_span_however_often_it_is_asked_for() -> None:
    async with traced_scheduler(running_max=1) as world:
        assert isinstance(await world.ask("r1", traceparent=""), RouteGranted)
        assert await world.ask("r2", seconds=0.05) is None
        waiting = asyncio.create_task(world.ask("r2"))
        await asyncio.sleep(0.05)
        await world.pool.client.log.append(first_token("r1", "engine-1", at=world.pool.clock.now()))
        await world.pool.client.log.append(finished("r1", "engine-1", at=world.pool.clock.now()))
        assert isinstance(await waiting, RouteGranted)
        assert isinstance(await world.ask("r2"), RouteGranted)
        spans = await world.spans()

    assert [(span.name, list(sequences(span))) for span in spans] == [
        ("decide", ["RequestArrived", "RequestPlaced"]),
        ("queue", ["RequestGranted"]),
        ("decide", []),
    ]


async def test_rejections_cancellations_and_the_end_of_a_term_end_what_is_open() -> None:
    async with traced_scheduler(running_max=1, set=("admission.hard_limit=true",)) as world:
        assert isinstance(await world.ask("r0", slo_ttft=1e-6), RouteRejected)
        assert isinstance(await world.ask("r1", traceparent=""), RouteGranted)
        for request in ("r2", "r3"):
            assert await world.ask(request, seconds=0.05) is None
        gone = CancelRequest(request=RequestId("r2"), reason="client_gone")
        await world.pool.client.commands.request(command_subject(POOL, "cancel"), gone, timeout=WallSeconds(5.0))
        term = world.service.leading
        assert term is not None
        assert term.spans is not None
        assert list(term.spans._open) == ["r3"]
        await world.service.resign()
        await eventually(lambda: not term.spans or not term.spans._open)
        spans = await world.spans()

    last = [list(sequences(span))[-1:] for span in spans]
    assert last == [["RequestRejected"], ["RequestPlaced"], ["RequestCancelled"], ["RequestPlaced"], []]


async def test_the_spans_of_a_request_that_its_ingress_has_ended_end_with_it() -> None:
    async with traced_scheduler(prefill_window_tokens=16) as traced:
        await traced.ask("running")
        assert await traced.ask("ended", seconds=0.2) is None
        term = traced.service.leading
        assert term is not None
        assert term.spans is not None
        assert list(term.spans._open) == ["ended"]
        await traced.pool.append(finished("ended", "engine-1", at=traced.pool.clock.now()))

        await eventually(lambda: term.spans is not None and not term.spans._open)


async def test_a_further_attempt_has_spans_of_its_own() -> None:
    async with traced_scheduler() as world:
        granted = await world.ask("r1")
        assert isinstance(granted, RouteGranted)
        assert isinstance(await world.ask("r1", attempt=2), RouteGranted)
        spans = await world.spans()

    attempts = [(span.attributes or {}).get("pointsman.attempt") for span in spans if span.name == "decide"]
    assert attempts == [1, 2]


def test_a_request_that_is_not_traced_crosses_the_wire_as_before() -> None:
    command = route("r1", [1])

    assert b"traceparent" not in msgspec.json.encode(command)
    assert msgspec.json.decode(msgspec.json.encode(command), type=RouteRequest).traceparent == ""

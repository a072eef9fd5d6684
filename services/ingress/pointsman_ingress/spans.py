"""What the spans of a request say. Names follow OpenTelemetry's conventions for HTTP and generative AI, ours begin with
`pointsman.`. No prompts, no keys; tenants only where credentials prove them, as clients put addresses into `user`."""

from functools import lru_cache
from urllib.parse import urlsplit

import structlog

from pointsman.contracts.commands import RouteGranted, RouteRejected, RouteRequest
from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import InstanceId
from pointsman.runtime import span_attributes
from pointsman.runtime.tracing import Span, Tracer, trace_headers
from pointsman_ingress.engine.usage import known
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.lifecycle import RequestLifecycle

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
URLS_MAX = 10_000


def begin_request(tracer: Tracer, call: HttpExchange) -> None:
    """The server span, below the client's; lines of the log then have its trace id."""
    call.span = span = tracer.begin(f"{call.method} {call.path}", trace_headers(call.headers))
    structlog.contextvars.bind_contextvars(trace_id=span.trace_id)


def end_request(call: HttpExchange, lifecycle: RequestLifecycle | None) -> None:
    span, facts = call.span, call.facts
    if not span.recording:
        return
    reason = facts.reason
    span.set(
        {
            span_attributes.METHOD: call.method,
            span_attributes.ROUTE: call.path,
            span_attributes.PATH: call.path,
            span_attributes.SCHEME: "http",
            span_attributes.STATUS: call.status or None,
            span_attributes.REQUEST_BYTES: call.request_bytes,
            span_attributes.RESPONSE_BYTES: call.response_bytes,
            span_attributes.OPERATION: OPERATIONS.get(call.path),
            span_attributes.MODEL: facts.model,
            span_attributes.STREAM: facts.stream,
            span_attributes.TIME_TO_FIRST_CHUNK: call.first_byte_seconds,
            span_attributes.REQUEST_ID: call.id,
            span_attributes.CLIENT_REQUEST_ID: call.client_request_id or None,
            span_attributes.POOL: facts.pool,
            span_attributes.TENANT: facts.tenant if facts.identity is not None else None,
            span_attributes.INSTANCE: facts.instance,
            span_attributes.RETRIES: lifecycle.retries if lifecycle else facts.retries,
            span_attributes.REASON: reason or None,
        }
    )
    if lifecycle is not None:
        span.set(_outcome(lifecycle))
    if call.status >= 500 or not call.status or (call.status == 200 and reason):
        span.fail(reason or str(call.status))
    span.end()


def _outcome(lifecycle: RequestLifecycle) -> dict[str, object]:
    usage, grant = lifecycle.usage, lifecycle.grant
    found: dict[str, object] = {
        span_attributes.INPUT_TOKENS: known(usage.prompt_tokens),
        span_attributes.OUTPUT_TOKENS: known(usage.completion_tokens),
        span_attributes.CACHED_TOKENS: known(usage.cached_tokens),
    }
    if grant is not None:
        found |= {
            span_attributes.INSTANCE: grant.instance,
            span_attributes.PREFILL_INSTANCE: grant.prefilled_by or None,
            span_attributes.PREDICTED_CACHED_TOKENS: grant.hit_tokens,
        }
    return found


def route_span(call: HttpExchange, command: RouteRequest) -> Span:
    span = call.span.child("route", "client")
    if span.recording:
        span.set({span_attributes.REQUEST_ID: command.request, span_attributes.ATTEMPT: command.attempt})
    return span


def describe_answer(span: Span, answer: RouteGranted | RouteRejected | None) -> None:
    if not span.recording:
        return
    match answer:
        case RouteGranted():
            span.set(
                {
                    span_attributes.INSTANCE: answer.instance,
                    span_attributes.KNOWLEDGE: answer.knowledge,
                    span_attributes.TERM: answer.term,
                    span_attributes.PREDICTED_TTFT_SECONDS: answer.predicted_ttft,
                    span_attributes.PREDICTED_CACHED_TOKENS: answer.hit_tokens,
                }
            )
        case RouteRejected():
            span.set({span_attributes.REASON: answer.reason, span_attributes.TERM: answer.term})
        case None:
            span.fail("no_place")


def engine_span(call: HttpExchange, instance: InstanceId, url: str, *, model: str, resent: int) -> Span:
    """From the connection to the end of the answer. `resent`: attempts before this one."""
    operation = OPERATIONS.get(call.path)
    span = call.span.child(f"{operation} {model}" if operation else f"POST {call.path}", "client")
    if span.recording:
        host, port = _address(url)
        span.set(
            {
                span_attributes.METHOD: "POST",
                span_attributes.RESENT: resent or None,
                span_attributes.PATH: call.path,
                span_attributes.SERVER_ADDRESS: host,
                span_attributes.SERVER_PORT: port,
                span_attributes.OPERATION: operation,
                span_attributes.MODEL: model,
                span_attributes.INSTANCE: instance,
            }
        )
    return span


def describe_grant(span: Span, grant: RouteGranted) -> None:
    if span.recording:
        span.set(
            {
                span_attributes.REQUEST_ID: grant.request,
                span_attributes.ATTEMPT: grant.attempt,
                span_attributes.DP_RANK: None if grant.dp_rank == ANY_RANK else grant.dp_rank,
                span_attributes.PREDICTED_CACHED_TOKENS: grant.hit_tokens,
                span_attributes.PREFILL_INSTANCE: grant.prefilled_by or None,
                span_attributes.DECODE_INSTANCE: grant.decode or None,
            }
        )


@lru_cache(maxsize=URLS_MAX)
def _address(url: str) -> tuple[str | None, int | None]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None, None
    return parts.hostname, port

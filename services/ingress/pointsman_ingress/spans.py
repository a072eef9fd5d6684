"""What the spans of a request say. Names follow OpenTelemetry's conventions for HTTP and generative AI, ours begin with
`pointsman.`. No prompts, no keys; tenants only where credentials prove them, as clients put addresses into `user`."""

from functools import lru_cache
from urllib.parse import urlsplit

import structlog

from pointsman.contracts.commands import RouteGranted, RouteRejected, RouteRequest
from pointsman.contracts.fleet import ANY_RANK
from pointsman.primitives import InstanceId
from pointsman.runtime.tracing import Span, Tracer, trace_headers
from pointsman_ingress.context import RequestFacts
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


def end_request(call: HttpExchange, facts: RequestFacts, lifecycle: RequestLifecycle | None) -> None:
    span = call.span
    if not span.recording:
        return
    reason = facts.reason or call.error_code or (lifecycle.reason if lifecycle else "")
    first_byte = call.first_byte_at_wall
    span.set(
        {
            "http.request.method": call.method,
            "http.route": call.path,
            "url.path": call.path,
            "url.scheme": "http",
            "http.response.status_code": call.status or None,
            "http.request.body.size": call.request_bytes,
            "http.response.body.size": call.response_bytes,
            "gen_ai.operation.name": OPERATIONS.get(call.path),
            "gen_ai.request.model": facts.model,
            "gen_ai.request.stream": facts.stream,
            "gen_ai.response.time_to_first_chunk": (
                None if first_byte is None else float(first_byte - call.received_at_wall)
            ),
            "pointsman.request.id": lifecycle.request if lifecycle else call.id,
            "pointsman.client_request.id": call.client_request_id or None,
            "pointsman.pool": facts.pool,
            "pointsman.tenant": facts.tenant if facts.identity is not None else None,
            "pointsman.instance": facts.instance,
            "pointsman.retries": lifecycle.retries if lifecycle else facts.retries,
            "pointsman.reason": reason or None,
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
        "gen_ai.usage.input_tokens": _known(usage.prompt_tokens),
        "gen_ai.usage.output_tokens": _known(usage.completion_tokens),
        "gen_ai.usage.cache_read.input_tokens": _known(usage.cached_tokens),
    }
    if grant is not None:
        found |= {
            "pointsman.instance": grant.instance,
            "pointsman.prefill_instance": grant.prefilled_by or None,
            "pointsman.cached_tokens.predicted": grant.hit_tokens,
        }
    return found


def route_span(call: HttpExchange, command: RouteRequest) -> Span:
    span = call.span.child("route", "client")
    if span.recording:
        span.set({"pointsman.request.id": command.request, "pointsman.attempt": command.attempt})
    return span


def describe_answer(span: Span, answer: RouteGranted | RouteRejected | None) -> None:
    if not span.recording:
        return
    match answer:
        case RouteGranted():
            span.set(
                {
                    "pointsman.instance": answer.instance,
                    "pointsman.knowledge": answer.knowledge,
                    "pointsman.term": answer.term,
                    "pointsman.ttft.predicted": answer.predicted_ttft,
                    "pointsman.cached_tokens.predicted": answer.hit_tokens,
                }
            )
        case RouteRejected():
            span.set({"pointsman.reason": answer.reason, "pointsman.term": answer.term})
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
                "http.request.method": "POST",
                "http.request.resend_count": resent or None,
                "url.path": call.path,
                "server.address": host,
                "server.port": port,
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": model,
                "pointsman.instance": instance,
            }
        )
    return span


def describe_grant(span: Span, grant: RouteGranted) -> None:
    if span.recording:
        span.set(
            {
                "pointsman.request.id": grant.request,
                "pointsman.attempt": grant.attempt,
                "pointsman.dp_rank": None if grant.dp_rank == ANY_RANK else grant.dp_rank,
                "pointsman.cached_tokens.predicted": grant.hit_tokens,
                "pointsman.prefill_instance": grant.prefilled_by or None,
                "pointsman.decode_instance": grant.decode or None,
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


def _known(tokens: int) -> int | None:
    return tokens if tokens >= 0 else None

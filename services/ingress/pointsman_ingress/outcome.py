"""How a request ended: for the access log and for metrics."""

from pointsman.runtime.telemetry import REQUEST_ERRORS
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.lifecycle import RequestLifecycle
from pointsman_ingress.metrics import http_requests

CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected before an answer


def status_of(call: HttpExchange) -> int:
    return call.status or CLIENT_CLOSED_REQUEST


def reason_of(call: HttpExchange, lifecycle: RequestLifecycle | None) -> str:
    """Empty if it was served."""
    return call.facts.reason or call.error_code or (lifecycle.reason if lifecycle else "") or ""


def count_outcome(call: HttpExchange, lifecycle: RequestLifecycle | None) -> None:
    facts = call.facts
    pool = facts.pool or ""
    model = (facts.model or "") if pool else ""  # a client's own word before a pool is found
    http_requests(pool, model, call.path, status_of(call)).inc()
    reason = reason_of(call, lifecycle)
    if reason:
        REQUEST_ERRORS.labels(pool, model, reason).inc()

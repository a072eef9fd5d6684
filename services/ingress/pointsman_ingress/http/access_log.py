"""The access log: one JSON line on standard output for each request that was for an engine, whatever became of it.

Every line has every field; null is what there is none of. Times are wall milliseconds. Nothing of a prompt, an answer, a key
or any header but `user-agent` is in it: it can be kept and shipped like any web server's.
"""

from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

from pointsman.ports import Clock
from pointsman.primitives import Seconds, Tokens
from pointsman.runtime.telemetry import ACCESS_LOG_LINES_DROPPED
from pointsman_ingress.http.call import Call
from pointsman_ingress.http.request_headers import header_text
from pointsman_ingress.lifecycle import RequestLifecycle

CLIENT_CLOSED_REQUEST = 499
"""nginx's status of a request whose client hung up before it had an answer."""


class AccessLine(msgspec.Struct, frozen=True, kw_only=True):
    """In the order in which they are written."""

    log: str = "access"
    time: datetime
    """Of arrival, UTC."""
    request_id: str
    """In the log, in traces and at the engine."""
    client: str | None
    """Its address, or that of the balancer in front."""
    user_agent: str | None
    tenant: str | None
    method: str
    path: str
    model: str | None
    pool: str | None
    stream: bool
    status: int
    reason: str | None
    """Why it did not end well: the code that the client was told, or `client_gone`, `engine_refused`, `ingress_stopped`."""
    instance: str | None
    """The last that served it."""
    prefill_instance: str | None
    retries: int
    """How many further engines were asked because one failed."""
    duration_ms: float
    queue_ms: float | None
    """Until it was sent to its last engine."""
    first_byte_ms: float | None
    """Until the client was sent the first bytes of its answer's body."""
    predicted_ttft_ms: float | None
    request_bytes: int
    response_bytes: int
    prompt_tokens: Tokens | None
    """As the engine counts them, else as we do."""
    completion_tokens: Tokens | None
    cached_tokens: Tokens | None
    """Of the prompt, that the engine took from its cache, as it reports."""
    predicted_cached_tokens: Tokens | None


class Lines(Protocol):
    """Where lines go. False: this one was left out."""

    def write(self, line: bytes) -> bool: ...


class AccessLog:
    """Tells of requests that are over."""

    def __init__(self, lines: Lines, clock: Clock) -> None:
        self._lines = lines
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode

    def tell(self, call: Call, life: RequestLifecycle | None) -> None:
        """`life`: where the request was understood. Not blocking; raises nothing."""
        seconds = self._clock.wall() - call.received_at_wall
        line = _line(call, life, seconds=seconds, speed=self._clock.speed, now=datetime.now(UTC))
        if not self._lines.write(self._encode(line)):
            ACCESS_LOG_LINES_DROPPED.inc()


def _line(call: Call, life: RequestLifecycle | None, *, seconds: Seconds, speed: float, now: datetime) -> AccessLine:
    grant = None if life is None else life.grant
    usage = None if life is None else life.usage
    reason = call.reason or (life.reason if life else "")
    return AccessLine(
        time=now - timedelta(seconds=seconds),
        request_id=life.request if life else call.id,
        client=call.client,
        user_agent=header_text(call.headers, b"user-agent") or None,
        tenant=call.tenant,
        method=call.method,
        path=call.endpoint.path,
        model=call.model,
        pool=call.pool,
        stream=call.wants_stream,
        status=call.status or CLIENT_CLOSED_REQUEST,
        reason=reason or None,
        instance=(grant.instance if grant else call.instance) or None,
        prefill_instance=(grant.prefilled_by if grant else "") or None,
        retries=life.retries if life else call.retries,
        duration_ms=_milliseconds(seconds),
        queue_ms=_milliseconds((life.sent_at - call.arrived_at) / speed) if life and grant else None,
        first_byte_ms=_milliseconds(call.first_byte_at_wall - call.received_at_wall)
        if call.first_byte_at_wall
        else None,
        predicted_ttft_ms=_milliseconds(grant.predicted_ttft / speed) if grant else None,
        request_bytes=call.request_bytes,
        response_bytes=call.response_bytes,
        prompt_tokens=_known(usage.prompt_tokens if usage else -1) or call.prompt_tokens,
        completion_tokens=_known(usage.completion_tokens if usage else -1),
        cached_tokens=_known(usage.cached_tokens if usage else -1),
        predicted_cached_tokens=grant.hit_tokens if grant else None,
    )


def _known(tokens: Tokens) -> Tokens | None:
    return tokens if tokens >= 0 else None


def _milliseconds(seconds: Seconds) -> float:
    return round(seconds * 1000, 2)

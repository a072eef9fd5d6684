"""Access log: one JSON line per finished request, without prompts, answers and keys. Unknown fields are null."""

from datetime import UTC, datetime, timedelta

import msgspec

from pointsman.ports import Clock
from pointsman.runtime.line_writer import LineWriter
from pointsman.runtime.telemetry import ACCESS_LOG_LINES_DROPPED
from pointsman_ingress.engine.usage import Usage, known
from pointsman_ingress.http.call import HttpExchange
from pointsman_ingress.http.request_headers import header_text
from pointsman_ingress.lifecycle import RequestLifecycle


class AccessLog:
    def __init__(self, lines: LineWriter, clock: Clock) -> None:
        self._lines = lines
        self._clock = clock
        self._encode = msgspec.json.Encoder().encode

    def write(self, call: HttpExchange, lifecycle: RequestLifecycle | None) -> None:
        """Does not block or raise."""
        seconds, speed = self._clock.wall() - call.received_at_wall, self._clock.speed
        facts = call.facts
        grant = None if lifecycle is None else lifecycle.grant
        usage = Usage() if lifecycle is None else lifecycle.usage
        line = {
            "log": "access",
            "time": datetime.now(UTC) - timedelta(seconds=float(seconds)),
            "request_id": call.id,
            "trace_id": call.span.trace_id or None,
            "client_request_id": call.client_request_id or None,
            "client": call.client,
            "user_agent": header_text(call.headers, b"user-agent") or None,
            "tenant": facts.tenant,
            "method": call.method,
            "path": call.path,
            "model": facts.model,
            "pool": facts.pool,
            "stream": facts.stream,
            "status": call.final_status,
            "reason": facts.reason or None,
            "instance": (grant.instance if grant else facts.instance) or None,
            "prefill_instance": (grant.prefilled_by if grant else "") or None,
            "retries": lifecycle.retries if lifecycle else facts.retries,
            "duration_ms": _milliseconds(float(seconds)),
            "queue_ms": _milliseconds((lifecycle.sent_at - call.arrived_at) / speed if lifecycle and grant else None),
            "first_byte_ms": _milliseconds(call.first_byte_seconds),
            "predicted_ttft_ms": _milliseconds(grant.predicted_ttft / speed if grant else None),
            "request_bytes": call.request_bytes,
            "response_bytes": call.response_bytes,
            "prompt_tokens": known(usage.prompt_tokens) or facts.prompt_tokens,
            "completion_tokens": known(usage.completion_tokens),
            "cached_tokens": known(usage.cached_tokens),
            "predicted_cached_tokens": grant.hit_tokens if grant else None,
        }
        if not self._lines.write(self._encode(line)):
            ACCESS_LOG_LINES_DROPPED.inc()


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)

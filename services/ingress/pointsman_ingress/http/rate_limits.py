"""A tenant's rate limits as response headers: `x-ratelimit-*` of OpenAI's API, `anthropic-ratelimit-*` of Anthropic's."""

import math
from collections.abc import Callable
from datetime import datetime, timedelta

from pointsman.contracts.tenants import RateLimit, RateLimits
from pointsman.primitives import EngineSeconds
from pointsman_ingress.http.errors import Header

LimitHeaders = Callable[[RateLimits, float, datetime], list[Header]]
"""Of limits, engine seconds per wall second, and the time (UTC)."""


def openai_limits(limits: RateLimits, speed: float, now: datetime) -> list[Header]:  # noqa: ARG001 - as anthropic_limits
    headers = []
    for name, limit in _named(limits):
        headers += [
            (b"x-ratelimit-limit-" + name, b"%d" % limit.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % limit.remaining),
            (b"x-ratelimit-reset-" + name, duration(limit.reset / speed).encode()),
        ]
    return headers


def anthropic_limits(limits: RateLimits, speed: float, now: datetime) -> list[Header]:
    headers = []
    for name, limit in _named(limits):
        prefix = b"anthropic-ratelimit-" + name
        headers += [
            (prefix + b"-limit", b"%d" % limit.limit),
            (prefix + b"-remaining", b"%d" % limit.remaining),
            (prefix + b"-reset", _moment(now, limit.reset / speed)),
        ]
    return headers


def duration(wall_seconds: EngineSeconds) -> str:
    """As OpenAI writes it: 250ms, 1s, 1.5s, 6m0s, 1h0m0s. Rounded up to milliseconds."""
    milliseconds = max(0, math.ceil(round(wall_seconds * 1000, 3)))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds


def _named(limits: RateLimits) -> list[tuple[bytes, RateLimit]]:
    both = ((b"requests", limits.requests), (b"tokens", limits.tokens))
    return [(name, limit) for name, limit in both if limit is not None]


def _moment(now: datetime, wall_seconds: EngineSeconds) -> bytes:
    """RFC 3339, rounded up to seconds."""
    at = now + timedelta(seconds=max(0.0, wall_seconds), microseconds=999_999)
    return at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()

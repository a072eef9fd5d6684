"""A tenant's rate limits as response headers: `x-ratelimit-*` of OpenAI's API, `anthropic-ratelimit-*` of Anthropic's."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache

from pointsman.contracts.tenants import RateLimit, RateLimits
from pointsman.primitives import Seconds
from pointsman_ingress.http.errors import Header

RESET_SECONDS_MAX = 10 * 365 * 86_400.0
CACHED_MAX = 4_096  # formatted durations and times

LimitHeaders = Callable[[RateLimits, float, datetime], list[Header]]
"""Of limits, engine seconds per wall second, and the time (UTC)."""


def openai_limits(limits: RateLimits, speed: float, now: datetime) -> list[Header]:  # noqa: ARG001 - as anthropic_limits
    headers = []
    for name, limit in _named(limits):
        headers += [
            (b"x-ratelimit-limit-" + name, b"%d" % limit.limit),
            (b"x-ratelimit-remaining-" + name, b"%d" % _remaining(limit)),
            (b"x-ratelimit-reset-" + name, duration(_reset(limit, speed)).encode()),
        ]
    return headers


def anthropic_limits(limits: RateLimits, speed: float, now: datetime) -> list[Header]:
    headers, unix_seconds = [], now.timestamp()
    for name, limit in _named(limits):
        prefix = b"anthropic-ratelimit-" + name
        headers += [
            (prefix + b"-limit", b"%d" % limit.limit),
            (prefix + b"-remaining", b"%d" % _remaining(limit)),
            (prefix + b"-reset", _moment(math.ceil(unix_seconds + _reset(limit, speed)))),
        ]
    return headers


def duration(wall_seconds: Seconds) -> str:
    """As OpenAI writes it: 250ms, 1s, 1.5s, 6m0s, 1h0m0s. Rounded up to milliseconds."""
    return _duration(math.ceil(round(wall_seconds * 1000, 3)))


@lru_cache(maxsize=CACHED_MAX)
def _duration(milliseconds: int) -> str:
    milliseconds = max(0, milliseconds)
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


def _remaining(limit: RateLimit) -> int:
    """A full bucket holds a little more than the limit."""
    return min(limit.remaining, limit.limit)


def _reset(limit: RateLimit, speed: float) -> Seconds:
    return min(max(0.0, limit.reset / speed), RESET_SECONDS_MAX)


@lru_cache(maxsize=CACHED_MAX)
def _moment(unix_seconds: int) -> bytes:
    """RFC 3339."""
    return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()

"""What clients are told of their limits, in the words that their libraries read."""

from datetime import UTC, datetime

import msgspec
import pytest

from pointsman.contracts.commands import RouteRejected
from pointsman.contracts.tenants import RateLimit, RateLimits
from pointsman.primitives import RequestId
from pointsman_ingress.http.errors import ANTHROPIC_ERRORS, OPENAI_ERRORS, rejected
from pointsman_ingress.http.rate_limits import anthropic_limits, duration, openai_limits

NOW = datetime(2026, 11, 22, 18, 0, 0, 250_000, tzinfo=UTC)
REQUESTS = RateLimit(limit=10, remaining=4, reset=2.4)
TOKENS = RateLimit(limit=40_000, remaining=18_000, reset=1440.0)


def rejection(reason: str, *, retry_after: float, limits: RateLimits | None = None) -> RouteRejected:
    return RouteRejected(
        request=RequestId("r"),
        attempt=1,
        status=429,
        reason=reason,
        detail="told",
        retry_after=retry_after,
        limits=limits,
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0s"),
        (0.0, "0s"),
        (0.0001, "1ms"),
        (0.0166, "17ms"),
        (0.2, "200ms"),
        (0.9999, "1s"),
        (1.5, "1.5s"),
        (59.9996, "1m0s"),
        (360.0, "6m0s"),
        (3_723.25, "1h2m3.25s"),
        (86_400.0, "24h0m0s"),
    ],
)
def test_a_duration_is_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_openais_headers_name_both_limits_in_wall_time() -> None:
    headers = dict(openai_limits(RateLimits(requests=REQUESTS, tokens=TOKENS), 4.0, NOW))

    assert headers == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"4",
        b"x-ratelimit-reset-requests": b"600ms",
        b"x-ratelimit-limit-tokens": b"40000",
        b"x-ratelimit-remaining-tokens": b"18000",
        b"x-ratelimit-reset-tokens": b"6m0s",
    }


def test_anthropics_headers_have_moments_in_place_of_durations() -> None:
    headers = dict(anthropic_limits(RateLimits(requests=REQUESTS, tokens=TOKENS), 4.0, NOW))

    assert headers == {
        b"anthropic-ratelimit-requests-limit": b"10",
        b"anthropic-ratelimit-requests-remaining": b"4",
        b"anthropic-ratelimit-requests-reset": b"2026-11-22T18:00:01Z",
        b"anthropic-ratelimit-tokens-limit": b"40000",
        b"anthropic-ratelimit-tokens-remaining": b"18000",
        b"anthropic-ratelimit-tokens-reset": b"2026-11-22T18:06:01Z",
    }


def test_a_limit_that_never_resets_is_told_as_far_away() -> None:
    limits = RateLimits(requests=RateLimit(limit=1, remaining=0, reset=1e30))

    assert (b"anthropic-ratelimit-requests-reset", b"2036-11-19T18:00:01Z") in anthropic_limits(limits, 1.0, NOW)
    assert (b"x-ratelimit-reset-requests", b"87600h0m0s") in openai_limits(limits, 1.0, NOW)


def test_a_tenant_without_a_limit_is_told_of_none() -> None:
    assert openai_limits(RateLimits(), 1.0, NOW) == []
    assert [name for name, _ in openai_limits(RateLimits(tokens=TOKENS), 1.0, NOW) if b"requests" in name] == []


@pytest.mark.parametrize(
    ("reason", "limits", "code", "kind"),
    [
        ("rate_limited", None, "rate_limit_exceeded", "requests"),
        ("rate_limited", RateLimits(requests=RateLimit(limit=1, remaining=0, reset=1.0), tokens=TOKENS),
         "rate_limit_exceeded", "requests"),
        ("rate_limited", RateLimits(requests=REQUESTS, tokens=TOKENS), "rate_limit_exceeded", "tokens"),
        ("rate_limited", RateLimits(tokens=TOKENS), "rate_limit_exceeded", "tokens"),
        ("concurrency_exceeded", RateLimits(tokens=TOKENS), "rate_limit_exceeded", "requests"),
        ("quota_exceeded", RateLimits(tokens=TOKENS), "insufficient_quota", "insufficient_quota"),
        ("queue_full", None, "queue_full", "rate_limit_error"),
    ],
)  # fmt: skip
def test_an_error_has_openais_code_and_type(reason: str, limits: RateLimits | None, code: str, kind: str) -> None:
    error = rejected(rejection(reason, retry_after=0.5, limits=limits), speed=1.0)

    body = msgspec.json.decode(OPENAI_ERRORS.body(error))["error"]
    assert (body["code"], body["type"]) == (code, kind)
    assert dict(error.headers)[b"x-pointsman-reject-reason"] == reason.encode()
    assert msgspec.json.decode(ANTHROPIC_ERRORS.body(error))["error"]["type"] == "rate_limit_error"


def test_a_limited_client_is_told_to_the_millisecond_when_to_ask_again() -> None:
    limited = dict(rejected(rejection("rate_limited", retry_after=0.5004), speed=2.0).headers)
    others = dict(rejected(rejection("queue_full", retry_after=0.5), speed=2.0).headers)

    assert (limited[b"retry-after-ms"], limited[b"retry-after"]) == (b"251", b"1")
    assert b"retry-after-ms" not in others


def test_a_spent_quota_says_when_it_is_renewed_and_that_a_retry_is_in_vain() -> None:
    headers = dict(rejected(rejection("quota_exceeded", retry_after=7200.0), speed=2.0).headers)

    assert (headers[b"retry-after"], headers[b"x-should-retry"]) == (b"3600", b"false")
    assert b"retry-after-ms" not in headers


def test_headers_of_the_limits_are_on_the_error() -> None:
    error = rejected(rejection("rate_limited", retry_after=1.0), speed=1.0, limit_headers=[(b"x-ratelimit-a", b"1")])

    assert (b"x-ratelimit-a", b"1") in error.headers

"""The judge of `pointsman-lab tenants` sees what was admitted, also when it is too much."""

from typing import Any

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected, RequestRejected
from pointsman.contracts.requests import RequestArrived, RequestFinished
from pointsman.primitives import Term
from pointsman_lab.tenants.flood import VARIANTS, round_of
from pointsman_lab.tenants.limits import REQUESTS_PER_SECOND, TOKENS_PER_MINUTE, LogReading, judged, most
from pointsman_lab.tenants.load import Sample
from tests.support import events


def arrived(request: str, at: float, tenant: str = "by-requests") -> RequestArrived:
    return events.arrived(request, at=at, tenant=tenant, prompt_tokens=64, max_output_tokens=2)


def refused(request: str, at: float) -> RequestRejected:
    return events.rejected(request, "rate_limited", at=at)


def finished(request: str, at: float, *, tokens: int = 100, cached: int = 0) -> RequestFinished:
    return events.finished(request, "a", at=at, prompt_tokens=tokens, completion_tokens=0, cached_tokens=cached)


def steady(rate: float, seconds: float, tenant: str = "by-requests") -> list[LogEvent]:
    return [arrived(f"{tenant}-{n}", n / rate, tenant) for n in range(round(rate * seconds))]


@pytest.mark.parametrize("excess", [1.0, 1.05])
def test_admitted_requests_are_a_share_of_the_limit(excess: float) -> None:
    events = steady(REQUESTS_PER_SECOND * excess, 23.0)
    too_many = [event for n in range(50) for event in (arrived(f"x{n}", 10.0), refused(f"x{n}", 10.0))]
    elected = LeaderElected(at=13.0, term=Term(2), scheduler="s", as_of=1)

    report = judged([*events, *too_many, elected], [], seconds=20.0, window_s=10.0)

    assert report.requests == pytest.approx(excess, abs=0.01)
    assert report.requests_most == pytest.approx(excess, abs=0.01)
    assert report.elections_s == [10.0]


def test_tokens_count_when_they_are_known_and_without_cached_ones() -> None:
    events: list[LogEvent] = []
    for n in range(23):
        events += [arrived(f"t{n}", n, "by-tokens"), finished(f"t{n}", n + 0.5, tokens=1_500, cached=500)]

    report = judged(events, [], seconds=20.0, window_s=20.0)

    assert report.tokens == pytest.approx(1_000 * 60 / TOKENS_PER_MINUTE)


def test_requests_at_a_time_are_those_that_have_not_ended() -> None:
    events: list[LogEvent] = [
        arrived("a", 0.0),
        arrived("b", 1.0),
        finished("a", 2.0),
        arrived("c", 2.0),
        arrived("d", 2.5),
        refused("d", 2.5),
    ]

    assert LogReading(events).most_in_flight("by-requests") == 2


def test_the_fullest_stretch_may_begin_anywhere() -> None:
    counted = [(at, 1.0) for at in (0.0, 5.0, 5.1, 5.2, 9.0)]

    assert most(counted, 1.0) == 3.0
    assert most([], 1.0) == 0.0


def test_a_flood_is_compared_with_the_same_tenant_behaving() -> None:
    def samples(wait: float, floods: int) -> list[Sample]:
        well: dict[str, Any] = {"tenant": "tenant-1", "asked_at": 0.0, "status": 200}
        flood = [Sample(tenant="flood", asked_at=0.0, status=429) for _ in range(floods)]
        return [*(Sample(**well, ttft=wait) for _ in range(10)), *flood]

    alone, behaved, limited, *_ = VARIANTS
    done = round_of([(alone, samples(0.2, 0)), (behaved, samples(0.25, 5)), (limited, samples(0.3, 100))])

    assert done.behaved_p90 == 0.25
    assert done.p90_ratios == {"alone": 0.8, "limited": 1.2}
    assert [(run.flood_sent, run.flood_served, run.refused) for run in done.runs] == [(0, 0, 0), (5, 0, 0), (100, 0, 0)]

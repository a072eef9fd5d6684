"""What torture's checker of a bad engine counts, on histories of our own: one engine hangs, or is slow, from 3 s to 43 s."""

from types import SimpleNamespace
from typing import cast

import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import RequestGranted, RequestMigrated
from pointsman.contracts.envelope import Stamp
from pointsman.contracts.fleet import InstanceUnejected
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestAttemptFailed
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman_lab.torture.cluster import Cluster
from pointsman_lab.torture.network import Stored
from pointsman_lab.torture.scenarios import a_bad_engine_is_kept_away
from tests.support.events import route

BAD, OTHER = InstanceId("engine-1"), InstanceId("engine-2")
WELL_AT = 43.0


def judged(*events: LogEvent, mode: str = "hang") -> list[str]:
    bad = SimpleNamespace(instance=BAD, well_since=WELL_AT, last_failure_mode=mode)
    history = [Stored(number, event.at, "s", event) for number, event in enumerate(events, 1)]
    cluster = SimpleNamespace(
        plan=SimpleNamespace(scenario="bad engine", speed=1.0),
        hosts={BAD: bad},
        network=SimpleNamespace(history=history),
    )
    return list(a_bad_engine_is_kept_away(cast(Cluster, cluster)))


def sent(request: str, at: float) -> list[LogEvent]:
    asked = route(request, [1], arrived_at=at)
    arrived = RequestArrived(
        at=at, request=asked.request, arrived_at=at, ingress=asked.ingress, tenant=asked.tenant, keys=asked.keys,
        prompt_tokens=1, max_output_tokens=1, slo_ttft=1.0, slo_tpot=1.0, session=asked.session,
    )  # fmt: skip
    return [arrived, RequestGranted(at=at, request=asked.request, instance=BAD)]


def timed_out(request: str, at: float) -> LogEvent:
    return RequestAttemptFailed(at=at, request=RequestId(request), instance=BAD, failure="first_byte_timeout")


def redispatched(request: str, at: float) -> LogEvent:
    return RequestMigrated(
        at=at, request=RequestId(request), source=BAD, instance=OTHER, hit_blocks=0, uncached_tokens=1,
        prefill_seconds=0.1, predicted_ttft=0.1, reason="", rebound=True, overdue=3.5,
    )  # fmt: skip


def slow(request: str, at: float, *, stamp: Stamp | None = None) -> LogEvent:
    return PrefillFinished(at=at, request=RequestId(request), instance=BAD, ttft=0.5, prefill=0.5, stamp=stamp)


@pytest.mark.parametrize("shows", [timed_out, redispatched])
def test_an_engine_that_hangs_and_is_sent_requests_again_and_again_is_found(shows: object) -> None:
    assert callable(shows)
    events = [e for n in range(20) for e in (*sent(f"r{n}", 4.0 + n), shows(f"r{n}", 4.5 + n))]

    (problem,) = judged(*events)

    assert "5 requests" not in problem
    assert f"{BAD} still got 6 of 6 requests" in problem  # since 15 s of its 40: those before could not be judged


def test_what_was_inside_when_the_evidence_was_complete_could_not_be_kept_away() -> None:
    inside = [e for n in range(12) for e in sent(f"r{n}", 18.0 + 0.1 * n)]
    evidence = [timed_out(f"r{n}", 23.0 + 0.1 * n) for n in range(12)]

    assert judged(*inside, *evidence) == []
    assert judged(*inside, *evidence, *(e for n in range(6) for e in sent(f"s{n}", 25.0 + n))) != []


def test_who_is_sent_there_before_the_leader_looks_again_could_not_be_kept_away() -> None:
    events = [e for n in range(5) for e in (*sent(f"r{n}", 20.0 + n), slow(f"r{n}", 20.5 + n))]
    soon, late = (
        [e for n in range(6) for e in (*sent(f"s{n}", at + 0.01 * n), slow(f"s{n}", 27.0))] for at in (24.6, 25.6)
    )

    assert judged(*events, *soon, mode="slow") == []
    assert "11 of 11 requests" in judged(*events, *late, mode="slow")[0]


def test_how_slow_an_engine_is_only_streams_show() -> None:
    """Of other answers the leader assumes the first token, and the real one teaches it nothing."""
    assumed = Stamp(term=Term(1), number=1, as_of=1)
    whole = [
        e
        for n in range(3)
        for e in (*sent(f"w{n}", 20.0 + n), slow(f"w{n}", 20.1 + n, stamp=assumed), slow(f"w{n}", 20.5 + n))
    ]
    streams = [e for n in range(5) for e in (*sent(f"r{n}", 20.2 + n), slow(f"r{n}", 20.7 + n))]
    history = sorted([*whole, *streams], key=lambda event: event.at)

    assert judged(*history, mode="slow") == []
    assert judged(*(e for e in history if not getattr(e, "stamp", None)), mode="slow") != []


def test_a_return_to_the_whole_does_not_excuse_what_follows_more_than_once() -> None:
    """Else an engine that is always taken back too soon would never be found."""
    events: list[LogEvent] = []
    for turn in range(3):
        at, requests = 18.0 + 8.0 * turn, [f"r{turn}-{n}" for n in range(5)]
        events += [e for request in requests for e in sent(request, at)]
        events += [timed_out(request, at + 5.0) for request in requests]
        events.append(InstanceUnejected(at=at + 6.0, instance=BAD, epoch=Epoch(1), half_open=False))

    assert "15 of 15 requests" in judged(*events)[0]

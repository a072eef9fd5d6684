"""What the console knows of a log, against a slow count of the same log and a plain fold of it."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    LeaderElected,
    MigrationRefused,
    RequestGranted,
    RequestMigrated,
    RequestRejected,
    ScaleApplied,
    ScaleDecided,
)
from pointsman.contracts.envelope import Stamp, is_fenced
from pointsman.contracts.fleet import InstanceLeft
from pointsman.contracts.reasons import CancelCause, FailReason, RejectReason
from pointsman.contracts.requests import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestEvent,
    RequestFailed,
    RequestFinished,
)
from pointsman.policies.policy_set import policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import Epoch, InstanceId, RequestId, Tenant, Term
from pointsman.simulation.replay import fold
from pointsman.state.checkpoint import state_digest
from pointsman.state.state import State
from pointsman_cli.console.log.fleet_views import fleet_view
from pointsman_cli.console.log.log_views import RequestFilter, history_view, requests_view, tenants_view
from pointsman_cli.console.log.observer import Observer
from pointsman_cli.console.log.recent_requests import RecentRequests
from pointsman_cli.console.log.request_counts import Figures
from pointsman_cli.console.log.size_history import Spaced
from pointsman_cli.console.pages.health import Verdict, requests_verdict
from tests.support.events import arrived, finished, first_token, given_up, given_up_before_each_end, joined, no_instance
from tests.support.ingress_clock import with_ingress_clock
from tests.support.recorded_log import SETTINGS, RecordedFleet
from tests.support.served_log import ServedLog

ENDS = {
    RequestFinished: "finished",
    RequestFailed: "failed",
    RequestCancelled: "cancelled",
    RequestRejected: "rejected",
}
SEEDS = [1, 2, 3]


def recorded(seed: int) -> list[LogEntry]:
    fleet = RecordedFleet(policy_set(prefill_window_tokens=900), seed=seed, failing=True, limited=True).live(250)
    fleet.take_over()
    entries = list(fleet.live(250).write_all().entries)
    decisions = [entry for entry in entries if entry.event is not None and entry.event.stamp is not None]
    for repeated in Random(seed).sample(decisions, 40):  # of the deposed leader, and of this one a second time
        entries.append(LogEntry(len(entries) + 1, repeated.subject, repeated.payload, repeated.event))
    return entries


def observed(entries: list[LogEntry]) -> Observer:
    observer = Observer(State(SETTINGS))
    for entry in entries:
        observer.apply(entry)
    return observer


def counting(entries: list[LogEntry]) -> list[LogEntry]:
    """Without entries of deposed leaders and repeats, told by the whole list."""
    term, seen, kept = Term(0), set[tuple[int, int]](), []
    for entry in entries:
        event = entry.event
        if event is None or is_fenced(event.stamp, term):
            continue
        if event.stamp is not None:
            if (event.stamp.term, event.stamp.number) in seen:
                continue
            seen.add((event.stamp.term, event.stamp.number))
        if isinstance(event, LeaderElected):
            term = max(term, event.term)
        kept.append(entry)
    return kept


@pytest.mark.parametrize("seed", SEEDS)
def test_its_state_is_that_of_a_plain_fold(seed: int) -> None:
    entries = recorded(seed)

    assert state_digest(observed(entries).state) == state_digest(fold(entries, settings=SETTINGS))


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_as_its_first_end_says(seed: int) -> None:
    entries = recorded(seed)
    arrived: list[str] = []
    ends: dict[str, str] = {}
    for entry in counting(entries):
        event = entry.event
        if isinstance(event, RequestArrived) and event.request not in arrived:
            arrived.append(event.request)
        if isinstance(event, RequestEvent) and type(event) in ENDS:
            ends.setdefault(event.request, ENDS[type(event)])

    view = requests_view(observed(entries), RequestFilter(limit=10_000))
    shown = {row.request: row.stage for row in view.requests}

    assert {name: stage for name, stage in shown.items() if name in ends and name in arrived} == {
        name: ends[name] for name in ends if name in arrived
    }
    assert [row.request for row in view.requests if row.request in arrived] == list(reversed(arrived))


def test_an_arrival_behind_the_grant_of_its_ingress_is_the_newest_and_tells_what_the_grant_did_not() -> None:
    def announced(name: str, at: float) -> RequestArrived:
        told = {"prompt_tokens": 300, "slo_ttft": 2.0, "client_request_id": "theirs"}
        return arrived(name, at=at + 1.0, tenant="acme", arrived_at=at, **told)

    requests = RecentRequests(SETTINGS.block_tokens)
    granted = RequestGranted(at=5.0, request=RequestId("late"), instance=InstanceId("engine-1"))
    events: list[LogEvent] = [granted, announced("between", 4.5), announced("late", 4.0), announced("late", 9.0)]
    for sequence, event in enumerate(events, 1):
        requests.apply(event, sequence)

    late, between = requests.newest_first()

    assert (late.id, between.id) == ("late", "between")
    assert (late.instance, late.granted_at, late.sequence) == ("engine-1", 5.0, 1)
    assert (late.arrived_at, late.prompt_tokens, late.slo_ttft) == (4.0, 300, 2.0)
    assert (late.tenant, late.client_request_id) == ("acme", "theirs")


def test_of_an_ingress_with_a_wrong_clock_requests_waited_and_took_as_long() -> None:
    def shown(ahead: float) -> list[tuple[float, ...]]:
        requests = RecentRequests(SETTINGS.block_tokens)
        entries = with_ingress_clock(ServedLog(requests=30).entries, ahead)
        ended = (
            RequestCancelled(at=entry.event.at, request=entry.event.request, reason="gone")
            if isinstance(entry.event, RequestFinished)
            else entry.event
            for entry in entries
        )
        for sequence, event in enumerate(ended, 1):
            assert event is not None
            requests.apply(event, sequence)
        return [(r.arrived_at, r.granted_at - r.arrived_at, r.e2e or 0.0) for r in requests.newest_first()]

    assert shown(0.0) == shown(4096.0) == shown(-4096.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_tenants_are_counted_as_their_requests_end(seed: int) -> None:
    observer = observed(recorded(seed))
    rows = requests_view(observer, RequestFilter(limit=10_000)).requests
    by_stage = Counter((row.tenant, row.stage) for row in rows)

    for tenant in tenants_view(observer).tenants:
        assert tenant.finished == by_stage[tenant.tenant, "finished"]
        assert tenant.rejected == by_stage[tenant.tenant, "rejected"]
        assert tenant.in_time + tenant.late == tenant.finished


def test_a_request_that_its_leader_gave_up_and_its_ingress_ended_counts_once() -> None:
    entries = ServedLog().entries
    plain, told = observed(entries), observed(given_up_before_each_end(entries))
    figures = [observer.minute.figures(plain.at) for observer in (plain, told)]

    assert tenants_view(told).tenants == tenants_view(plain).tenants
    assert figures[0] == figures[1]


def test_a_grant_that_an_ingress_tells_a_new_leader_puts_no_request_back() -> None:
    entries = [entry for entry in ServedLog().entries if not isinstance(entry.event, RequestFinished)]
    ends = {entry.event.request: entry.event.instance for entry in entries if isinstance(entry.event, PrefillFinished)}
    told = [RequestGranted(at=99.0, request=name, instance=at) for name, at in ends.items()]
    again = [*entries, *(LogEntry(len(entries) + n, "pm.default.request.r", b"", e) for n, e in enumerate(told, 1))]
    plain, seen = (requests_view(observed(log), RequestFilter(limit=10_000)).requests for log in (entries, again))

    assert len(told) > 50
    assert seen == plain


@pytest.mark.parametrize("end", [given_up("r", at=2.0), no_instance("r", at=2.0)])
def test_a_request_that_comes_again_under_another_id_counts_once(end: LogEvent) -> None:
    def seen(*events: LogEvent) -> tuple[object, ...]:
        observer = Observer(State(SETTINGS))
        for sequence, event in enumerate(events, 1):
            observer.apply(LogEntry(sequence, "pm.default.request.r", b"", event))
        return tenants_view(observer).tenants, observer.minute.figures(9.0), len(observer.minute.arrivals)

    def came(name: str, at: float, **fields: Any) -> RequestArrived:
        return arrived(name, at=at, arrived_at=1.0, slo_ttft=2.0, **fields)

    first, again = came("r", 1.0), came("s", 3.0, instead_of=RequestId("r"))
    answered = finished("s", "engine-1", at=5.0)

    assert seen(first, end, again, answered) == seen(came("s", 1.0), answered)
    assert seen(first, end, again) == seen(came("s", 1.0))
    assert seen(first, end, replace(again, tenant=Tenant("other")), answered)[2] == 2
    assert seen(again, answered) == seen(came("s", 3.0), answered), "the console began to read later"


def seen(*events: LogEvent) -> Observer:
    observer = Observer(State(SETTINGS))
    for sequence, event in enumerate(events, 1):
        observer.apply(LogEntry(sequence, "pm.default.any", b"", event))
    return observer


REFUSED = no_instance("r", at=2.0)
FAILED = RequestFailed(at=2.0, request=RequestId("r"), reason="engine_failed", status=502)


def cancelled(cause: CancelCause) -> RequestCancelled:
    return RequestCancelled(at=2.0, request=RequestId("r"), reason=cause, cause=cause)


@pytest.mark.parametrize(
    ("end", "judged"),
    [
        (REFUSED, True),
        (replace(REFUSED, reason=RejectReason.RATE_LIMITED), False),
        (FAILED, True),
        (replace(FAILED, reason=FailReason.ENGINE_REFUSED, status=400), False),
        (given_up("r", at=2.0), True),
        (cancelled(CancelCause.INGRESS_STOPPED), True),
        (cancelled(CancelCause.TIMEOUT), True),
        (cancelled(CancelCause.CLIENT_GONE), False),
    ],
)
def test_what_a_client_or_its_limits_caused_says_nothing_about_the_service(end: LogEvent, judged: bool) -> None:
    observer = seen(arrived("r", at=1.0), end)

    expected = 0.0 if judged else None
    assert fleet_view(observer).totals.goodput == expected
    assert [tenant.goodput for tenant in tenants_view(observer).tenants] == [expected]
    assert fleet_view(observer).totals.failed == (judged and end is not REFUSED)
    assert [row.lateness for row in requests_view(observer, RequestFilter()).requests] == [
        "unserved" if judged else "left out"
    ]


def test_requests_that_their_ingress_placed_alone_are_counted_for_a_minute() -> None:
    def granted(name: str, at: float, stamp: Stamp | None = None) -> RequestGranted:
        return RequestGranted(at=at, request=RequestId(name), instance=InstanceId("engine-1"), stamp=stamp)

    leaders = granted("r-1", 5.0, Stamp(term=Term(0), number=1, as_of=0))
    alone = seen(joined("engine-1"), leaders, granted("r-2", 6.0), granted("r-3", 40.0))
    later = seen(joined("engine-1"), leaders, granted("r-2", 6.0), granted("r-3", 67.0))

    assert fleet_view(alone).totals.placed_alone == 2
    assert fleet_view(later).totals.placed_alone == 1


def test_an_engine_that_its_leader_gave_up_is_lost_until_it_joins_again_or_for_ten_minutes() -> None:
    def left(name: str, at: float, number: int | None) -> InstanceLeft:
        stamp = None if number is None else Stamp(term=Term(0), number=number, as_of=0)
        return InstanceLeft(at=at, instance=InstanceId(name), epoch=Epoch(1), reason="why", stamp=stamp)

    names = ["engine-1", "engine-2", "engine-3"]
    events: list[LogEvent] = [
        *(joined(name) for name in names),
        left(names[0], 5.0, 1),
        left(names[1], 6.0, 2),
        left(names[2], 7.0, None),
    ]

    assert fleet_view(seen(*events)).lost == names[:2]
    assert fleet_view(seen(*events, joined(names[1], at=8.0, epoch=2))).lost == names[:1]
    assert fleet_view(seen(*events, joined("engine-4", at=605.5))).lost == [names[1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_moves_and_scaling_are_those_of_the_log(seed: int) -> None:
    entries = recorded(seed)
    kept = [entry.event for entry in counting(entries)]

    view = history_view(observed(entries))

    assert view.moved == sum(isinstance(event, RequestMigrated) for event in kept)
    assert view.refused == sum(isinstance(event, MigrationRefused) for event in kept)
    assert [move.sequence for move in view.moves] == sorted((move.sequence for move in view.moves), reverse=True)


def test_a_decision_about_the_size_is_shown_once_and_with_its_end() -> None:
    observer = Observer(State(SETTINGS))
    decided = ScaleDecided(at=5.0, policy="p", settings={}, current=2, wanted=4, reason="late", number=1)
    applied = ScaleApplied(at=9.0, current=4, wanted=4, detail="all answer", number=1)
    events: list[LogEvent] = [decided, decided, applied]
    for sequence, event in enumerate(events, 1):
        observer.apply(LogEntry(sequence, "pm.p.scale", b"", event))

    (shown,) = history_view(observer).scaling

    assert (shown.wanted, shown.applied_detail) == (4, "all answer")
    assert shown.applied_at > shown.at


def test_a_filter_shows_what_it_names_and_counts_the_rest() -> None:
    observer = observed(recorded(1))
    every = requests_view(observer, RequestFilter(limit=10_000))
    tenant = every.requests[0].tenant

    some = requests_view(observer, RequestFilter(tenant=tenant, limit=2))
    late = requests_view(observer, RequestFilter(late=True, limit=10_000))

    assert {row.tenant for row in some.requests} == {tenant}
    assert len(some.requests) == 2
    assert some.matching == sum(row.tenant == tenant for row in every.requests)
    assert {row.lateness for row in late.requests} <= {"late", "unserved"}


def test_the_slowest_are_those_of_all_that_are_remembered() -> None:
    observer = observed(recorded(1))
    every = requests_view(observer, RequestFilter(limit=10_000))
    waits = [row.e2e if row.ttft is None else row.ttft for row in every.requests]
    slowest = sorted([wait for wait in waits if wait is not None], reverse=True)

    shown = requests_view(observer, RequestFilter(slowest=True, limit=3))

    assert [row.e2e if row.ttft is None else row.ttft for row in shown.requests] == slowest[:3]
    assert shown.matching == len(slowest)


def test_the_slowest_are_also_those_that_had_no_first_token() -> None:
    """Nor what a leader assumed as the first token of an answer that is not streamed."""
    stamp = Stamp(term=Term(0), number=1, as_of=0)
    events: list[LogEvent] = [
        *(arrived(name, at=0.0, arrived_at=0.0) for name in ("open", "quick", "held", "whole", "cut")),
        arrived("early", at=0.0, arrived_at=3600.0, sent_at=3600.0),  # of a clock that is ahead
        finished("quick", "engine-1", at=0.5),
        replace(first_token("whole", "engine-1", at=0.1, prefill=0.1), ttft=0.1, stamp=stamp),
        replace(first_token("cut", "engine-1", at=0.2, prefill=0.2), ttft=0.2),
        *(RequestFailed(at=50.0, request=RequestId(name), reason="r", status=502) for name in ("whole", "cut")),
        RequestFailed(at=3640.0, request=RequestId("early"), reason="r", status=502),
        no_instance("held", at=60.0),
    ]
    observer = Observer(State(SETTINGS))
    for sequence, event in enumerate(events, 1):
        observer.apply(LogEntry(sequence, "pm.p.request", b"", event))

    view = requests_view(observer, RequestFilter(slowest=True))

    assert [row.request for row in view.requests] == ["held", "whole", "early", "quick", "cut"]
    assert requests_verdict(view, slowest=True) == Verdict(
        "serious", "Rejected after 60.00 s: the slowest of 5 requests, its SLO is 5.00 s.", [], "Unserved"
    )


def test_the_fleet_counts_the_requests_in_flight() -> None:
    observer = observed(recorded(2))
    queues = [observer.state.workload.queue(one.id) for one in observer.state.fleet.instances]

    totals = fleet_view(observer).totals

    assert totals.pending == sum(len(queue.pending) for queue in queues)
    assert totals.decoding == sum(len(queue.decoding) for queue in queues)
    assert totals.instances == len(observer.state.fleet.instances)


def test_the_requests_of_a_tenant_in_flight_are_counted() -> None:
    observer = Observer(State(SETTINGS))
    events: list[LogEvent] = [
        arrived(f"{tenant}{number}", at=1.0, tenant=tenant) for tenant in "ab" for number in range(3)
    ]
    for sequence, event in enumerate([*events, no_instance("b0", at=2.0)], 1):
        observer.apply(LogEntry(sequence, "pm.default.request.r", b"", event))

    assert {tenant.tenant: tenant.in_flight for tenant in tenants_view(observer).tenants} == {"a": 3, "b": 2}


def test_no_more_requests_are_kept_than_the_bound() -> None:
    entries = recorded(3)
    few = RecentRequests(SETTINGS.block_tokens, requests_max=5)
    for entry in entries:
        if entry.event is not None:
            few.apply(entry.event, entry.sequence)

    assert len(few) == 5


def test_moments_are_spread_over_the_whole_time_in_bounded_number() -> None:
    spaced: Spaced[int] = Spaced(1.0, 8)
    for at in range(1000):
        if spaced.due(at):
            spaced.add(at, at)

    assert len(spaced.kept) <= 8
    assert spaced.kept[0] == 0
    gaps = {later - earlier for earlier, later in zip(spaced.kept[:-1], spaced.kept[1:], strict=True)}
    assert max(gaps) <= 2 * min(gaps)


def test_a_percentile_lies_between_the_two_nearest_ranks() -> None:
    figures = Figures(ttfts=[4.0, 1.0, 3.0, 2.0])

    assert (figures.ttft(50), figures.ttft(95)) == (2.5, 3.85)
    assert Figures().ttft(50) is None

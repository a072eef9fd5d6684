"""What a leader's turn grants, to whom, and what it makes room for."""

from random import Random
from typing import Any

import msgspec
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import SentRequest
from pointsman.contracts.decisions import RequestGranted, RequestPlaced, RequestRejected
from pointsman.contracts.fleet import InstanceLeft, InstanceSuspected, LivenessTimeouts
from pointsman.contracts.reasons import CancelCause
from pointsman.contracts.requests import PrefillFinished, RequestArrived, RequestCancelled
from pointsman.policies.dispatch import Dispatcher, granting
from pointsman.policies.ordering.base import OrderingPolicy
from pointsman.policies.policy_set import policy_set
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.base import Choice
from pointsman.policies.routing.least_loaded import LeastLoaded
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.fleet import Fleet
from pointsman.state.fold_versions import CLOCKS_DIFFER, UNHEARD_SERVE
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import InstanceQueue, Request
from tests.support.events import BLOCK, finished, first_token, joined, reported, route
from tests.support.leading import leader_of

WINDOW_TOKENS = 200
SMALL, MIDDLE, LARGE = 1, 2, 3
"""Blocks of a prompt: 65, 129 and 193 tokens. The window holds one and a small one."""
SILENCE = LivenessTimeouts(heard_since=0.0, suspect_after=3.0, leave_after=30.0)


def leader(*instances: str, **bounds: Any) -> Dispatcher:
    told = {"admission": "none", "ordering": "fcfs", "prefill_window_tokens": WINDOW_TOKENS, **bounds}
    return leader_of(instances or ("a",), policy_set(routing="least_loaded", **told))


def arrives(dispatcher: Dispatcher, name: str, blocks: int, now: float = 0.0, **fields: Any) -> list[LogEvent]:
    first = 1000 * sum(map(ord, name))
    return dispatcher.route(route(name, list(range(first, first + blocks)), arrived_at=now, **fields), now)


def granted(events: list[LogEvent]) -> list[str]:
    return [event.request for event in events if isinstance(event, RequestGranted)]


def test_who_comes_first_and_does_not_fit_holds_back_who_would() -> None:
    dispatcher = leader()

    assert granted(arrives(dispatcher, "first", MIDDLE)) == ["first"]
    assert granted(arrives(dispatcher, "large", LARGE)) == []
    assert granted(arrives(dispatcher, "small", SMALL)) == []


def test_what_a_cancelled_request_held_back_is_granted_in_the_same_turn() -> None:
    dispatcher = leader()
    for name, blocks in (("first", MIDDLE), ("large", LARGE), ("small", SMALL)):
        arrives(dispatcher, name, blocks)

    events = dispatcher.cancel_ungranted(RequestId("large"), CancelCause.CLIENT_GONE, 1.0)

    assert [type(event) for event in events] == [RequestCancelled, RequestGranted]
    assert granted(events) == ["small"]


def test_what_an_abandoned_request_kept_from_others_is_granted_in_the_same_turn() -> None:
    dispatcher = leader()
    arrives(dispatcher, "first", MIDDLE)
    arrives(dispatcher, "large", LARGE)

    events = dispatcher.cancel_any(RequestId("first"), CancelCause.GRANT_UNHEARD, 1.0)

    assert granted(events) == ["large"]
    assert isinstance(events[0], RequestCancelled)
    assert events[0].instance == "a"


def test_a_window_is_full_with_its_last_token_and_one_request_always_may() -> None:
    exactly = MIDDLE * BLOCK + 1 + SMALL * BLOCK + 1

    assert granted(arrives(leader(prefill_window_tokens=1), "only", LARGE)) == ["only"]
    for window, room in ((exactly, True), (exactly - 1, False)):
        dispatcher = leader(prefill_window_tokens=window)
        arrives(dispatcher, "first", MIDDLE)

        assert bool(granted(arrives(dispatcher, "small", SMALL))) is room


@pytest.mark.parametrize("ordering", ["fcfs", "fair_edf", "lpm"])
def test_where_there_is_no_room_nobody_is_asked_for_an_order_and_the_same_is_granted(
    ordering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twin: a leader that looks for room only once it has chosen."""
    asked, decided = [], []
    for looks_first in (True, False):
        with monkeypatch.context() as patched:
            if not looks_first:
                patched.setattr(granting, "_has_no_room", lambda turn, queue: False)
            dispatcher = leader(ordering=ordering, prefill_window_tokens=2 * WINDOW_TOKENS)
            orders: list[float] = []
            events = _busy_hour(dispatcher, orders, patched)
        asked.append(len(orders))
        decided.append(events)

    assert decided[0] == decided[1]
    assert asked[0] < asked[1]


def _busy_hour(dispatcher: Dispatcher, orders: list[float], patched: pytest.MonkeyPatch) -> list[LogEvent]:
    """Requests of two classes come at random; the engine computes them in the order of their grants."""
    ordering, chance = type(dispatcher.policies.ordering), Random(1)
    first = ordering.first

    def counting(policy: OrderingPolicy, queue: InstanceQueue, now: float, state: State) -> Request:
        orders.append(now)
        return first(policy, queue, now, state)

    patched.setattr(ordering, "first", counting)
    events: list[LogEvent] = []
    inside: list[str] = []
    for number in range(200):
        now = 0.01 * number
        priority = chance.choice(("standard", "standard", "batch"))
        made = arrives(dispatcher, f"r{number}", chance.choice((SMALL, MIDDLE, LARGE)), now, priority=priority)
        if inside and chance.random() < 0.7:
            dispatcher.state.apply(first_token(inside.pop(0), "a", at=now))
            made += dispatcher.grant_waiting(InstanceId("a"), now)
        inside += granted(made)
        events += made
    return events


def test_an_engine_whose_first_tokens_no_log_tells_refuses_nobody_for_work_that_is_done() -> None:
    """With a full disk under the log, small requests filled no window, so none was pending: after 17 s at 20/s an idle pool
    refused all, for a predicted TTFT of 5.00 s."""
    dispatcher = leader(admission="predicted_ttft", prefill_window_tokens=16_384)
    decided: list[LogEvent] = []
    for number in range(300):
        now, name = 0.1 * number, f"r{number}"
        decided += dispatcher.route(route(name, [10_000 + number], arrived_at=now, streaming=True), now)
        sent = SentRequest(request=RequestId(name), attempt=1, instance=InstanceId("a"))
        decided += dispatcher.note_first_token(sent, now + 0.05)
        if number < 100:
            dispatcher.state.apply(finished(name, "a", at=now + 0.06))

    assert not [event for event in decided if isinstance(event, RequestRejected)]
    assert not [e for e in decided if isinstance(e, PrefillFinished) and int(e.request[1:]) < 100], (
        "the log tells of those"
    )


def test_who_decodes_counts_in_running_max_until_it_ends() -> None:
    dispatcher = leader(running_max=2)
    for name in ("one", "two"):
        assert granted(arrives(dispatcher, name, SMALL))
        dispatcher.state.apply(first_token(name, "a", at=0.1))

    assert not granted(arrives(dispatcher, "three", SMALL, 0.2))
    dispatcher.state.apply(finished("one", "a", at=1.0))
    assert granted(dispatcher.grant_waiting(InstanceId("a"), 1.0)) == ["three"]


def test_an_instance_that_failed_a_request_is_not_tried_again_and_where_none_is_left_it_is_refused() -> None:
    dispatcher = leader("a", "b")
    tried = [event.instance for event in arrives(dispatcher, "one", SMALL) if isinstance(event, RequestPlaced)]
    events: list[LogEvent] = []
    for attempt in (2, 3):
        events = arrives(dispatcher, "one", SMALL, attempt=attempt, excluded=list(tried))
        tried += [event.instance for event in events if isinstance(event, RequestPlaced)]

    assert sorted(tried) == ["a", "b"]
    assert [event.reason for event in events if isinstance(event, RequestRejected)] == ["no_instance"]


def test_a_request_that_is_tried_elsewhere_makes_room_where_it_was_in_the_same_turn() -> None:
    dispatcher = leader("a", "b")
    arrives(dispatcher, "one", MIDDLE)
    arrives(dispatcher, "two", MIDDLE)
    waits = next(event for event in arrives(dispatcher, "three", LARGE) if isinstance(event, RequestPlaced))
    inside = next(r.id for r in dispatcher.state.workload.queues[waits.instance].prefill.values())

    events = arrives(dispatcher, inside, MIDDLE, 1.0, attempt=2, excluded=[waits.instance])

    assert "three" in granted(events)


def test_a_first_token_that_nobody_sees_is_assumed_when_it_is_due_and_frees_the_window() -> None:
    dispatcher = leader()
    arrives(dispatcher, "whole", MIDDLE, streaming=False)
    arrives(dispatcher, "next", MIDDLE)
    due = (MIDDLE * BLOCK + 1) * 0.001

    assert dispatcher.grant_waiting(InstanceId("a"), due - 0.001) == []
    events = dispatcher.grant_waiting(InstanceId("a"), due)
    assert [type(event) for event in events] == [PrefillFinished, RequestGranted]


def test_a_first_token_that_will_be_seen_is_waited_for() -> None:
    dispatcher = leader()
    arrives(dispatcher, "streamed", MIDDLE, streaming=True)
    arrives(dispatcher, "next", MIDDLE)

    assert dispatcher.grant_waiting(InstanceId("a"), 100.0) == []


def test_of_those_who_wait_pending_max_is_the_most() -> None:
    dispatcher = leader(pending_max=2)
    arrives(dispatcher, "inside", LARGE)
    outcomes = [type(arrives(dispatcher, name, LARGE)[-1]) for name in ("one", "two", "three")]

    assert outcomes == [RequestPlaced, RequestPlaced, RequestRejected]


def test_a_cancel_that_comes_before_its_request_is_remembered_and_a_second_one_changes_nothing() -> None:
    dispatcher = leader()
    first = dispatcher.cancel_ungranted(RequestId("early"), CancelCause.CLIENT_GONE, 0.0)

    assert [type(event) for event in first] == [RequestCancelled]
    assert dispatcher.cancel_ungranted(RequestId("early"), CancelCause.CLIENT_GONE, 0.1) == []
    assert arrives(dispatcher, "early", SMALL, 0.2) == []


def test_a_request_inside_an_engine_is_not_cancelled_by_the_leader() -> None:
    dispatcher = leader()
    arrives(dispatcher, "inside", SMALL)

    assert dispatcher.cancel_ungranted(RequestId("inside"), CancelCause.CLIENT_GONE, 1.0) == []


def test_who_is_silent_is_suspected_once_and_let_go_of_when_it_lasts() -> None:
    dispatcher = leader("a", "b")

    def look(now: float, heard_since: float = 0.0) -> list[LogEvent]:
        dispatcher.state.apply(reported("b", 0, [], at=now))
        return dispatcher.check_liveness(
            LivenessTimeouts(heard_since=heard_since, suspect_after=3.0, leave_after=30.0), now
        )

    assert look(3.0) == []
    assert look(29.0, heard_since=28.0) == []  # nobody was there to hear before
    (suspected,) = look(29.5)
    assert isinstance(suspected, InstanceSuspected)
    assert (suspected.instance, suspected.silent_seconds) == ("a", 29.5)
    assert look(29.7) == []
    (left,) = look(30.5)
    assert isinstance(left, InstanceLeft)
    assert left.instance == "a"
    assert look(40.0) == []


def test_where_every_worker_is_silent_their_engines_serve_and_stay_ten_times_as_long() -> None:
    """A worker's host is lost, and with it the worker of engines on other hosts."""
    dispatcher = leader("a", "b")
    silent = dispatcher.check_liveness(SILENCE, 3.5)

    assert [type(event) for event in silent] == [InstanceSuspected] * 2
    assert granted(arrives(dispatcher, "one", SMALL, 4.0)) == ["one"]
    assert granted(arrives(dispatcher, "two", SMALL, 4.0)) == ["two"]
    assert {dispatcher.state.workload.requests[RequestId(name)].instance for name in ("one", "two")} == {"a", "b"}
    assert dispatcher.check_liveness(SILENCE, 299.0) == []
    assert [type(event) for event in dispatcher.check_liveness(SILENCE, 301.0)] == [InstanceLeft] * 2


def test_a_silent_worker_s_engine_gets_nothing_once_another_is_heard() -> None:
    dispatcher = leader("a", "b")
    dispatcher.check_liveness(SILENCE, 3.5)
    dispatcher.state.apply(reported("b", 0, [], at=40.0))

    assert [
        event.instance for event in arrives(dispatcher, "one", SMALL, 40.0) if isinstance(event, RequestPlaced)
    ] == ["b"]
    (left,) = dispatcher.check_liveness(SILENCE, 40.5)
    assert isinstance(left, InstanceLeft)
    assert left.instance == "a"


def test_of_a_thousand_silent_instances_a_turn_removes_some_and_lists_who_is_ready_a_bounded_number_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each list takes as long as there are instances: a leader that removes them all at once loses its lease."""
    names = [f"i{number}" for number in range(1_000)]
    dispatcher = leader(*names)
    assert len(dispatcher.check_liveness(SILENCE, 3.5)) == 1_000
    dispatcher.state.apply(reported("i0", 0, [], at=40.0))
    made, listed = Fleet._made_roster, 0

    def counted(fleet: Fleet) -> Any:
        nonlocal listed
        listed += 1
        return made(fleet)

    monkeypatch.setattr(Fleet, "_made_roster", counted)
    turns, most = 0, 0
    while len(dispatcher.state.fleet.instances) > 1 and turns < 100:
        before, turns = listed, turns + 1
        events = dispatcher.check_liveness(SILENCE, 41.0)
        assert events
        assert all(isinstance(event, InstanceLeft) for event in events)
        most = max(most, listed - before)

    assert [instance.id for instance in dispatcher.state.fleet.instances] == ["i0"]
    assert most <= 40


def test_what_waits_at_an_engine_when_all_workers_fall_silent_goes_on() -> None:
    dispatcher = leader()
    arrives(dispatcher, "first", MIDDLE)
    arrives(dispatcher, "large", LARGE)
    dispatcher.check_liveness(SILENCE, 3.5)
    dispatcher.state.apply(first_token("first", "a", at=4.0))

    assert granted(dispatcher.grant_waiting(InstanceId("a"), 4.0)) == ["large"]


def test_a_request_that_the_only_heard_engine_failed_goes_to_the_silent_one() -> None:
    dispatcher = leader("a", "b")
    dispatcher.check_liveness(SILENCE, 3.5)
    dispatcher.state.apply(reported("b", 0, [], at=4.0))

    events = arrives(dispatcher, "one", SMALL, 4.0, excluded=[InstanceId("b")])

    assert [event.instance for event in events if isinstance(event, RequestPlaced | RequestGranted)] == ["a", "a"]


def test_engines_that_took_nothing_before_their_worker_fell_silent_take_nothing() -> None:
    dispatcher = leader("down", "drained")
    dispatcher.state.apply(reported("down", 0, [], at=0.0, serving=False))
    dispatcher.drain(InstanceId("drained"), "maintenance", 0.0, leaving=False, by="me")
    dispatcher.check_liveness(SILENCE, 3.5)

    assert [type(event) for event in arrives(dispatcher, "one", SMALL, 4.0)] == [RequestArrived, RequestRejected]
    assert [type(event) for event in dispatcher.check_liveness(SILENCE, 30.5)] == [InstanceLeft] * 2


def test_earlier_versions_refuse_where_every_worker_is_silent() -> None:
    dispatcher = leader_of(
        ("a",), policy_set(routing="least_loaded"), settings=PoolSettings(fold_version=UNHEARD_SERVE - 1)
    )
    dispatcher.check_liveness(SILENCE, 3.5)

    assert [type(event) for event in arrives(dispatcher, "one", SMALL, 4.0)] == [RequestArrived, RequestRejected]
    assert [type(event) for event in dispatcher.check_liveness(SILENCE, 30.5)] == [InstanceLeft]


def test_a_worker_that_dated_its_report_ahead_is_missed_as_any_other() -> None:
    dispatcher = leader("a", "b")
    dispatcher.state.apply(reported("a", 0, [], at=3600.0))
    assert dispatcher.check_liveness(SILENCE, 9.0, {InstanceId("a"): 8.0, InstanceId("b"): 8.0}) == []
    (left,) = dispatcher.check_liveness(SILENCE, 39.0, {InstanceId("a"): 8.0, InstanceId("b"): 38.0})
    assert isinstance(left, InstanceLeft)
    assert left.instance == "a"


def test_earlier_versions_suspect_who_is_restarted_after_the_date_that_it_named() -> None:
    """Of now, the leader's evidence says from when its silence counts (`HeardReports`)."""

    def restarted(version: int) -> Dispatcher:
        policies, settings = policy_set(routing="least_loaded"), PoolSettings(fold_version=version)
        dispatcher = leader_of(("a",), policies, settings=settings)
        dispatcher.state.apply(msgspec.structs.replace(reported("a", 0, [], at=1.0), back_within=10.0))
        return dispatcher

    def look(now: float) -> list[type[LogEvent]]:
        return [type(event) for event in dispatcher.check_liveness(SILENCE, now)]

    dispatcher = restarted(CLOCKS_DIFFER - 1)
    assert look(11.0) == []
    assert look(11.5) == [InstanceSuspected]
    assert look(31.5) == [InstanceLeft]
    dispatcher = restarted(CLOCKS_DIFFER - 1)
    dispatcher.state.apply(reported("a", 0, [], at=2.0))  # it is back
    assert look(5.5) == [InstanceSuspected]
    dispatcher = restarted(CLOCKS_DIFFER)
    assert look(11.0) == [InstanceSuspected]


def test_nothing_is_placed_where_the_worker_is_silent_until_it_reports_again() -> None:
    dispatcher = leader("a", "b")
    dispatcher.state.apply(reported("b", 0, [], at=10.0))
    dispatcher.check_liveness(SILENCE, 10.0)

    def placed(name: str) -> str:
        return next(e.instance for e in arrives(dispatcher, name, SMALL, 10.0) if isinstance(e, RequestPlaced))

    assert {placed("one"), placed("two")} == {"b"}
    dispatcher.state.apply(reported("a", 0, [], at=11.0))
    assert placed("three") == "a"


@pytest.mark.parametrize("instances", [2, 40])
def test_an_objective_next_to_nothing_is_placed_as_any(instances: int) -> None:
    dispatcher = leader_of([f"e-{number}" for number in range(instances)], policy_set())

    events = arrives(dispatcher, "r", SMALL, slo_tpot=1e-313)

    assert [type(event) for event in events] == [RequestArrived, RequestPlaced, RequestGranted]


def test_a_request_that_no_policy_can_take_is_refused_and_those_held_behind_it_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dispatcher = leader_of([], policy_set(routing="least_loaded", hold_seconds=60.0))
    for name in ("bad", "good-1", "good-2"):
        assert [type(event) for event in arrives(dispatcher, name, SMALL)] == [RequestArrived]
    choose = LeastLoaded.choose

    def fails(policy: LeastLoaded, view: PoolView) -> Choice:
        if view.request.id == "bad":
            raise ZeroDivisionError
        return choose(policy, view)

    monkeypatch.setattr(LeastLoaded, "choose", fails)
    dispatcher.state.apply(joined("a", at=1.0))
    events = dispatcher.place_held(1.0)

    (refused,) = [event for event in events if isinstance(event, RequestRejected)]
    assert (refused.request, refused.reason, "ZeroDivisionError" in refused.detail) == ("bad", "no_instance", True)
    assert granted(events) == ["good-1", "good-2"]


def test_an_instance_that_has_left_leaves_no_queue_once_its_requests_are_over() -> None:
    dispatcher = leader("a", "b")
    state = dispatcher.state
    arrives(dispatcher, "r", SMALL)
    served_by = state.workload.requests[RequestId("r")].instance
    state.apply(first_token("r", served_by, at=0.1))

    for instance in ("a", "b"):
        state.apply(
            InstanceLeft(
                at=0.2, instance=InstanceId(instance), epoch=state.newest_epoch(InstanceId(instance)), reason="x"
            )
        )
    assert set(state.workload.queues) == {served_by}
    state.apply(finished("r", served_by, at=0.3))

    assert state.workload.queues == {}
    assert not state.workload.changed
    assert not state.latency.changed

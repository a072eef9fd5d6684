"""An instance that drains gets nothing more and loses nothing; a pool without a ready instance holds what arrives."""

import msgspec
import pytest

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import (
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
    ScaleDecided,
)
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, InstanceUndrained
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.policy_set import PolicySet, policy_set
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.simulation.replay import verify
from pointsman.state.state import FOLD_VERSION, PoolSettings, State
from tests.support.events import finished, first_token, joined, reported, route
from tests.support.logged_leader import LoggedLeader

A, B = InstanceId("a"), InstanceId("b")
HOLD_SECONDS = 30.0


class Candidacy(LoggedLeader):
    """Of these instances, which serve one prompt after the other."""

    def __init__(self, *instances: str, policies: PolicySet | None = None) -> None:
        self.policies = policies or policy_set(
            routing="round_robin", admission="none", ordering="fcfs", prefill_window_tokens=1
        )
        self.lead(self.policies, at=0.0)
        for instance in instances:
            self.happens(joined(instance))

    def arrives(self, request: str, at: float, *, adapter: str = "") -> list[LogEvent]:
        command = route(request, [len(self.log)], arrived_at=at, adapter=adapter)
        return self.decides(self.dispatcher.route(command, at))

    def offers(self, instance: str, adapter: str, at: float) -> None:
        """An instance joins, and reports a LoRA adapter."""
        self.happens(joined(instance, at=at))
        self.happens(msgspec.structs.replace(reported(instance, 0, [], at=at), adapters=[adapter]))


def of(kind: type[Event], events: list[LogEvent]) -> list[LogEvent]:
    return [event for event in events if isinstance(event, kind)]


def test_what_waits_for_an_instance_that_drains_moves_in_the_same_turn_and_what_it_has_stays() -> None:
    leader = Candidacy("a", "b")
    for number in range(6):  # in turn: a and b have one each inside, and two each that wait
        leader.arrives(f"r{number}", 0.1)

    events = leader.decides(leader.dispatcher.drain(A, "asked", 0.2, leaving=True))
    leader.arrives("late", 0.3)

    assert type(events[0]) is InstanceDraining
    assert len(of(RequestMigrated, events)) == 2
    assert leader.state.fleet.ready == (B,)
    assert [r.id for r in leader.state.workload.queue(A).prefill.values()] == ["r0"]
    assert not leader.state.workload.queue(A).pending
    assert leader.state.workload.requests[RequestId("late")].instance == B
    assert verify(leader.log).ok


def test_draining_twice_is_one_decision_and_undraining_ends_it() -> None:
    leader = Candidacy("a", "b")

    first = leader.decides(leader.dispatcher.drain(A, "asked", 0.1, leaving=False))
    again = leader.decides(leader.dispatcher.drain(A, "asked", 0.2, leaving=False))
    for_good = leader.decides(leader.dispatcher.drain(A, "the pool shrinks", 0.3, leaving=True))
    back = leader.decides(leader.dispatcher.undrain(A, 0.4))

    assert [len(first), len(again), len(for_good)] == [1, 0, 1]
    assert of(InstanceUndrained, back)
    assert leader.state.fleet.ready == (A, B)
    assert not leader.state.fleet[A].leaving
    assert leader.dispatcher.drain(InstanceId("nobody"), "asked", 0.5, leaving=False) == []
    assert verify(leader.log).ok


def test_the_last_instance_may_drain_and_still_gets_what_waits_for_it() -> None:
    leader = Candidacy("a")
    for number in range(3):
        leader.arrives(f"r{number}", 0.1)

    leader.decides(leader.dispatcher.drain(A, "asked", 0.2, leaving=True))
    refused = leader.arrives("late", 0.3)
    leader.happens(first_token("r0", "a", at=0.4))
    leader.happens(finished("r0", "a", at=0.4))
    granted = leader.decides(leader.dispatcher.grant_waiting(A, 0.4))

    assert of(RequestRejected, refused)
    assert of(RequestGranted, granted)
    assert verify(leader.log).ok


def holding(*, hold_max: int = 1000) -> Candidacy:
    return Candidacy(
        policies=policy_set(
            routing="round_robin", admission="none", ordering="fcfs",
            hold_seconds=HOLD_SECONDS, hold_max=hold_max,
        )
    )  # fmt: skip


def test_arrivals_wait_for_a_first_instance_and_are_placed_when_it_comes() -> None:
    leader = holding()
    held = leader.arrives("r1", 1.0) + leader.arrives("r2", 2.0)
    asked_again = leader.decides(leader.dispatcher.route(route("r1", [1], arrived_at=1.0), 3.0))
    leader.happens(joined("a", at=4.0))

    placed = leader.decides(leader.dispatcher.place_held(4.0))

    assert not of(RequestPlaced, held)
    assert not of(RequestRejected, held)
    assert asked_again == []
    assert [event.request for event in placed if isinstance(event, RequestGranted)] == ["r1", "r2"]
    assert verify(leader.log).ok


@pytest.mark.parametrize("fold_version", [6, FOLD_VERSION])
def test_without_holding_nobody_is_held_not_even_who_comes_from_a_clock_that_is_ahead(fold_version: int) -> None:
    """Logs of before held such a request; they are replayed so."""
    policies = policy_set(routing="round_robin", admission="none", ordering="fcfs", hold_seconds=0.0)
    state = State(PoolSettings(fold_version=fold_version), policies.trackers())
    dispatcher = Dispatcher(state, policies, term=Term(1))

    decided = dispatcher.route(route("r", [1], arrived_at=7.0), now=1.0)

    assert bool(of(RequestRejected, decided)) == (fold_version == FOLD_VERSION)


def test_a_held_request_waits_on_for_an_instance_with_its_adapter_whoever_comes_before() -> None:
    leader = holding()
    leader.arrives("r1", 1.0, adapter="poet")
    leader.arrives("r2", 1.0)
    leader.happens(joined("a", at=2.0))

    without = leader.decides(leader.dispatcher.place_held(2.0))
    leader.offers("b", "poet", 3.0)
    with_it = leader.decides(leader.dispatcher.place_held(3.0))

    assert [(e.request, e.instance) for e in without if isinstance(e, RequestPlaced)] == [("r2", "a")]
    assert [(e.request, e.instance) for e in with_it if isinstance(e, RequestPlaced)] == [("r1", "b")]
    assert verify(leader.log).ok


def test_a_held_request_whose_adapter_nobody_brings_is_told_so() -> None:
    leader = holding()
    leader.arrives("r1", 1.0, adapter="poet")
    leader.happens(joined("a", at=2.0))

    (refused,) = leader.decides(leader.dispatcher.place_held(1.0 + HOLD_SECONDS))

    assert isinstance(refused, RequestRejected)
    assert (refused.reason, refused.detail) == ("no_instance", "no instance with the adapter poet is ready")


def test_what_waits_for_an_instance_that_drains_moves_only_to_one_with_its_adapter() -> None:
    leader = Candidacy()
    leader.offers("a", "poet", 0.0)
    for number in range(3):
        leader.arrives(f"r{number}", 0.1, adapter="poet")
    leader.happens(joined("b", at=0.2))

    nowhere = leader.decides(leader.dispatcher.drain(A, "asked", 0.3, leaving=True))
    leader.offers("c", "poet", 0.4)
    moved = leader.decides(leader.dispatcher.relocate_pending(0.4))

    assert not of(RequestMigrated, nowhere)
    assert [(e.request, e.instance) for e in moved if isinstance(e, RequestMigrated)] == [("r1", "c"), ("r2", "c")]
    assert verify(leader.log).ok


def test_who_has_waited_for_as_long_as_may_be_and_who_is_one_too_many_are_told_so() -> None:
    leader = holding(hold_max=2)
    for number in range(3):
        leader.arrives(f"r{number}", float(number))

    leader.decides(leader.dispatcher.place_held(HOLD_SECONDS - 0.1))
    kept = set(leader.state.workload.requests)
    leader.decides(leader.dispatcher.place_held(HOLD_SECONDS))

    assert kept == {"r0", "r1"}
    assert set(leader.state.workload.requests) == {"r1"}
    assert verify(leader.log).ok


def test_without_holding_a_pool_without_instances_answers_at_once() -> None:
    assert of(RequestRejected, Candidacy().arrives("r1", 1.0))


@pytest.mark.parametrize("why", ["down", "draining", "gone"])
def test_arrivals_wait_whatever_the_reason_why_nobody_is_ready_and_are_placed_when_somebody_is(why: str) -> None:
    leader = holding()
    leader.happens(joined("a", at=0.0))
    match why:
        case "down":
            leader.happens(reported("a", 0, [], at=1.0, serving=False))
        case "draining":
            leader.decides(leader.dispatcher.drain(A, "asked", 1.0, leaving=False))
        case _:
            leader.happens(InstanceLeft(at=1.0, instance=A, epoch=Epoch(1), reason="asked"))
    held = leader.arrives("r1", 10.0)
    leader.happens(joined("b", at=20.0))
    placed = leader.decides(leader.dispatcher.place_held(20.0))

    assert not of(RequestRejected, held)
    assert [(e.request, e.instance) for e in placed if isinstance(e, RequestPlaced)] == [("r1", B)]
    assert verify(leader.log).ok


def test_what_a_split_pool_without_a_decoder_gets_waits_for_one() -> None:
    leader = holding()
    leader.happens(joined("a", at=0.0, role="prefill"))
    held = leader.arrives("r1", 1.0)
    leader.happens(joined("b", at=2.0, role="decode"))
    placed = leader.decides(leader.dispatcher.place_held(2.0))

    assert not of(RequestRejected, held)
    assert [(e.request, e.instance, e.decode) for e in placed if isinstance(e, RequestPlaced)] == [("r1", A, B)]
    assert verify(leader.log).ok


SLO = 5.0


def strict(*instances: str) -> Candidacy:
    """Refuses what cannot meet its objective of 5 s."""
    return Candidacy(
        *instances, policies=policy_set(routing="round_robin", admission="predicted_ttft", hold_seconds=HOLD_SECONDS)
    )


def test_a_request_that_was_held_for_longer_than_its_objective_is_not_refused_for_that() -> None:
    leader = strict()
    leader.arrives("r1", 1.0)
    leader.happens(joined("a", at=1.0 + 3 * SLO))
    placed = leader.decides(leader.dispatcher.place_held(1.0 + 3 * SLO))
    late = leader.decides(leader.dispatcher.route(route("r2", [9], arrived_at=1.0, slo_ttft=SLO), 1.0 + 3 * SLO))

    (told,) = [event for event in placed if isinstance(event, RequestPlaced)]
    assert told.lost_seconds == 3 * SLO
    assert leader.state.workload.requests[RequestId("r1")].deadline == 1.0 + 4 * SLO
    assert [e.reason for e in late if isinstance(e, RequestRejected)] == ["slo_ttft"], "nobody held that one"
    assert verify(leader.log).ok


def test_what_a_request_lost_at_an_engine_that_failed_it_is_not_held_against_it() -> None:
    leader = strict("a", "b")
    (first,) = [e for e in leader.arrives("r1", 1.0) if isinstance(e, RequestGranted)]
    again = route("r1", [1], arrived_at=1.0, slo_ttft=SLO, attempt=2, excluded=[first.instance])
    placed = leader.decides(leader.dispatcher.route(again, 1.0 + 2 * SLO))

    (told,) = [event for event in placed if isinstance(event, RequestPlaced)]
    assert told.instance != first.instance
    assert told.lost_seconds == 2 * SLO
    assert verify(leader.log).ok


def test_who_is_told_to_ask_again_is_told_when_that_makes_sense() -> None:
    idle, scaled = holding(hold_max=0), holding(hold_max=0)
    scaled.happens(ScaleDecided(at=1.0, policy="p", settings={}, current=0, wanted=2, reason="demand", number=1))
    nobody_knows = idle.arrives("r1", 13.0)
    one_is_coming = scaled.arrives("r1", 13.0)

    assert [e.retry_after for e in nobody_knows if isinstance(e, RequestRejected)] == [5.0]
    assert [e.retry_after for e in one_is_coming if isinstance(e, RequestRejected)] == [12.0]
    assert verify(idle.log).ok
    assert verify(scaled.log).ok


def test_a_log_of_an_older_version_is_judged_by_the_rules_of_its_time() -> None:
    settings = PoolSettings(fold_version=2)
    policies = policy_set(routing="round_robin", admission="predicted_ttft", hold_seconds=HOLD_SECONDS)
    dispatcher = Dispatcher(State(settings, policies.trackers()), policies, term=Term(1))
    held = dispatcher.route(route("r1", [1], arrived_at=0.0, slo_ttft=SLO), 0.0)
    dispatcher.state.apply(joined("a", at=3 * SLO), 1)
    late = dispatcher.place_held(3 * SLO)
    dispatcher.state.apply(InstanceLeft(at=20.0, instance=A, epoch=Epoch(1), reason="asked"), 2)
    refused = dispatcher.route(route("r2", [1], arrived_at=20.0), 20.0 + HOLD_SECONDS)

    assert not of(RequestRejected, held)
    assert [e.reason for e in late if isinstance(e, RequestRejected)] == ["slo_ttft"]
    assert [e.retry_after for e in refused if isinstance(e, RequestRejected)] == [1.0]

"""An instance that drains gets nothing more and loses nothing; a pool without a ready instance holds what arrives."""

from dataclasses import asdict

import msgspec

from pointsman.contracts.codec import LogEvent, decode_event, encode
from pointsman.contracts.decisions import (
    LeaderElected,
    RequestGranted,
    RequestMigrated,
    RequestPlaced,
    RequestRejected,
)
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import InstanceDraining, InstanceUndrained
from pointsman.contracts.subjects import subject_of
from pointsman.policies.dispatch import Dispatcher, PolicySet, policy_set
from pointsman.ports import LogEntry
from pointsman.primitives import InstanceId, PoolName, RequestId, Term
from pointsman.simulation.replay import verify
from pointsman.state.state import PoolSettings, State
from tests.support.events import finished, first_token, joined, reported, route

A, B = InstanceId("a"), InstanceId("b")
HOLD_SECONDS = 30.0


class Leader:
    """A dispatcher whose decisions and surroundings become a log in the order in which they happened."""

    def __init__(self, *instances: str, policies: PolicySet | None = None) -> None:
        self.policies = policies or policy_set(
            routing="round_robin", admission="none", ordering="fcfs", prefill_window_tokens=1
        )
        settings = PoolSettings()
        self.state = State(settings, self.policies.memories())
        self.log: list[LogEntry] = []
        self.happens(
            LeaderElected(
                at=0.0, term=Term(1), scheduler="s", as_of=0, pool=asdict(settings),
                policy=self.policies.routing.name, settings=self.policies.settings,
            )
        )  # fmt: skip
        self.dispatcher = Dispatcher(self.state, self.policies, term=Term(1))
        for instance in instances:
            self.happens(joined(instance))

    def happens(self, event: LogEvent) -> None:
        self.state.apply(event, self._write(event))

    def decides(self, events: list[LogEvent]) -> list[LogEvent]:
        for event in events:
            self.state.skip(self._write(event))
        return events

    def _write(self, event: LogEvent) -> int:
        payload = encode(event)
        self.log.append(LogEntry(len(self.log) + 1, subject_of(PoolName("p"), event), payload, decode_event(payload)))
        return len(self.log)

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
    leader = Leader("a", "b")
    for number in range(6):  # in turn: a and b have one each inside, and two each that wait
        leader.arrives(f"r{number}", 0.1)

    events = leader.decides(leader.dispatcher.drain(A, "asked", 0.2, leaving=True))
    leader.arrives("late", 0.3)

    assert type(events[0]) is InstanceDraining
    assert len(of(RequestMigrated, events)) == 2
    assert leader.state.fleet.ready == (B,)
    assert [r.id for r in leader.state.workload.line(A).prefill.values()] == ["r0"]
    assert not leader.state.workload.line(A).pending
    assert leader.state.workload.requests[RequestId("late")].instance == B
    assert verify(leader.log).ok


def test_draining_twice_is_one_decision_and_undraining_ends_it() -> None:
    leader = Leader("a", "b")

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
    leader = Leader("a")
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


def holding(*, hold_max: int = 1000) -> Leader:
    return Leader(
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
    leader = Leader()
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
    assert of(RequestRejected, Leader().arrives("r1", 1.0))

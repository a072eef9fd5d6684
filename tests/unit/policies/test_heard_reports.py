"""What the leader lets workers keep out of the log is what the fold would not have learned from."""

from copy import deepcopy
from dataclasses import fields
from random import Random
from typing import Any

import msgspec
import pytest

from pointsman.contracts.fleet import InstanceLeft, InstanceReported, InstanceSuspected, LivenessTimeouts
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.heard_reports import (
    EXCUSED_WALL_SECONDS_MAX,
    KV_USAGE_STEP,
    LOAD_WALL_SECONDS,
    PULSE_WALL_SECONDS,
    HeardReports,
    pulse_seconds,
)
from pointsman.policies.lost_requests import LostRequests
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import InstanceId
from pointsman.simulation.replay.folding import copy_state
from pointsman.state.fleet import Instance
from pointsman.state.state import PoolSettings, State
from tests.support.events import joined, removed, reported, route, stored
from tests.support.leading import leader_of

LOAD = {"heard_at", "waiting", "running", "kv_usage"}
"""What a report out of the log leaves as it was for a bounded time."""
IDLE_AFTER = 3.0


def state_with(*events: Any) -> State:
    state = State(PoolSettings())
    for event in (joined("a"), reported("a", 0, [], at=0.5), *events):
        state.apply(event)
    return state


def told(state: State, heard: HeardReports, report: InstanceReported) -> bool:
    """Tells it, and logs it if that is wanted."""
    wanted = heard.note(state, report, report.at)
    if wanted:
        state.apply(report)
    return wanted


def report(at: float, **fields: Any) -> InstanceReported:
    return msgspec.structs.replace(reported("a", 0, [], at=at), **fields)


@pytest.mark.parametrize("clock", [-3600.0, 3600.0])
def test_who_joins_or_reports_in_the_log_was_heard_then_whatever_its_clock_says_and_an_old_copy_says_nothing(
    clock: float,
) -> None:
    state, heard = state_with(), HeardReports()
    again, told_once = joined("a", at=100.0 + clock, epoch=2), reported("a", 0, [], at=105.0 + clock, epoch=2)
    for event, now in ((again, 100.0), (told_once, 105.0)):
        state.apply(event)
        heard.read(state, event, now)
        assert heard.silent_since(state, 110.0, 0.0) == {"a": now}
    for copy in (again, msgspec.structs.replace(told_once, at=104.0 + clock)):
        state.apply(copy)
        heard.read(state, copy, 109.0)
    assert heard.silent_since(state, 110.0, 0.0) == {"a": 105.0}


def test_an_instance_that_does_nothing_is_logged_at_its_pulse_only_and_pulses_spread() -> None:
    names = [InstanceId(f"engine-{number}") for number in range(200)]
    periods = [float(pulse_seconds(name)) for name in names]
    assert min(periods) >= 2 / 3 * float(PULSE_WALL_SECONDS)
    assert max(periods) <= float(PULSE_WALL_SECONDS)
    assert len({round(period) for period in periods}) > 8

    state, heard = state_with(), HeardReports()
    logged = [at for at in range(1, 121) if told(state, heard, report(float(at)))]
    assert 4 <= len(logged) <= 6


def test_times_are_of_the_wall_whatever_the_speed() -> None:
    state, heard = State(PoolSettings(speed=10.0)), HeardReports()
    state.apply(joined("a"))
    state.apply(report(1.0))

    logged = [at for at in range(10, 1201, 10) if told(state, heard, report(float(at)))]

    assert 4 <= len(logged) <= 6


@pytest.mark.parametrize(
    "change",
    [
        {"serving": False}, {"adapters": ["poet"]}, {"aliases": ["m-latest"]}, {"certain": False}, {"running": 1},
        {"back_within": 5.0}, {"blocks": 1}, {"digest": 7}, {"epoch": 2}, {"instance": InstanceId("b")},
    ],
    ids=str,
)  # fmt: skip
def test_what_the_fold_would_learn_from_is_logged_at_once(change: dict[str, Any]) -> None:
    state, heard = state_with(), HeardReports()
    assert not told(state, heard, report(1.0))

    assert told(state, heard, report(2.0, **change))


def test_a_suspected_instance_and_one_that_is_excused_are_heard_through_the_log() -> None:
    leader = leader_of(("a",), policy_set(routing="least_loaded"))
    leader.state.apply(report(0.5))
    leader.check_liveness(LivenessTimeouts(heard_since=0.0, suspect_after=3.0, leave_after=10.0), 4.0)
    assert leader.state.fleet[InstanceId("a")].suspected
    assert told(leader.state, HeardReports(), report(4.1))
    assert not leader.state.fleet[InstanceId("a")].suspected

    leader.state.apply(report(4.2, back_within=10.0))
    assert told(leader.state, HeardReports(), report(5.0))
    assert leader.state.fleet[InstanceId("a")].excused_until == 0.0


def test_a_worker_whose_clock_went_back_is_logged() -> None:
    state, heard = state_with(report(100.0)), HeardReports()

    assert told(state, heard, report(40.0))


def test_cache_events_and_heartbeats_may_overtake_each_other_but_not_for_a_second_heartbeat() -> None:
    state, heard = state_with(stored("a", 1, [1])), HeardReports()
    first = msgspec.structs.replace(reported("a", 2, [1, 2], at=1.0))
    assert not heard.note(state, first, 1.0)
    state.apply(stored("a", 2, [2], parent=1))
    assert not heard.note(state, msgspec.structs.replace(first, at=2.0), 2.0)

    assert not heard.note(state, reported("a", 3, [1, 2, 3], at=3.0), 3.0)
    assert heard.note(state, reported("a", 3, [1, 2, 3], at=4.0), 4.0), "event 3 never came"

    behind, late = state_with(stored("a", 1, [1])), HeardReports()
    assert not late.note(behind, reported("a", 0, [], at=1.0), 1.0)
    assert late.note(behind, reported("a", 0, [], at=2.0), 2.0), "the log has more than its worker wrote"


def test_loads_that_differ_in_numbers_are_logged_now_and_then() -> None:
    state, heard = state_with(report(1.0, running=1)), HeardReports()

    seconds = [s for s in range(2, 62) if told(state, heard, report(float(s), running=1 + s % 3, kv_usage=s / 100))]
    assert len(seconds) == 60 // float(LOAD_WALL_SECONDS)
    assert not told(state, heard, report(62.0, running=state.fleet[InstanceId("a")].running, kv_usage=0.6))
    assert not told(state, heard, report(69.0, running=1 + 61 % 3, kv_usage=0.61 + KV_USAGE_STEP / 2))


def test_a_draining_instance_that_has_become_idle_is_known_at_once() -> None:
    leader = leader_of(("a",), policy_set(routing="least_loaded"))
    leader.state.apply(report(1.0, running=1))
    heard = HeardReports()
    assert not told(leader.state, heard, report(1.5))

    leader.drain(InstanceId("a"), "", 2.0, leaving=True, by="x")

    assert told(leader.state, heard, report(2.5))


def test_what_instances_were_heard_of_is_forgotten_with_them() -> None:
    state, heard = state_with(), HeardReports()
    heard.note(state, report(1.0), 7.0)
    assert heard.silent_since(state, 7.0, 0.0) == {"a": 7.0}

    heard.forget_absent(State(PoolSettings()))

    assert not heard.silent_since(state, 7.0, 0.0)


class Follower:
    """An engine, its worker and the leader; the same reports all go into the log of a twin."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        policies = policy_set(routing="least_loaded", admission="none", ordering="fcfs")
        self.leader = leader_of(("a", "b"), policies)
        self.heard = HeardReports()
        self.lost = LostRequests()
        self.keys: list[int] = []
        self.sequence = 0
        self.at = 1.0
        self.running: dict[str, float] = {}
        self.numbers = 0
        self.names: list[str] = []
        self.serving = True
        self.logged = self.said = 0
        for name in ("a", "b"):
            self.leader.state.apply(reported(name, 0, [], at=1.0))

    @property
    def state(self) -> State:
        return self.leader.state

    def lost_in(self, state: State, lost: LostRequests) -> set[str]:
        found = lost.find(state, self.heard, self.at, steady_since=0.0, idle_after=IDLE_AFTER)
        return {request.id for request in found}

    def second(self) -> InstanceReported:
        """What happens within it, and its report."""
        chance = self.chance
        self.at += 1.0
        if chance.random() < 0.3:
            self.sequence, key = self.sequence + 1, chance.getrandbits(60)
            self.keys.append(key)
            self.state.apply(stored("a", self.sequence, [key], at=self.at))
        if self.keys and chance.random() < 0.1:
            self.sequence += 1
            self.state.apply(removed("a", self.sequence, [self.keys.pop()], at=self.at))
        if chance.random() < 0.2:
            self.numbers += 1
            self.leader.route(route(f"r{self.numbers}", [], arrived_at=self.at), self.at)
            self.running[f"r{self.numbers}"] = self.at
        if chance.random() < 0.05:
            self.running.clear()  # the engine lost them, and nobody says so
        self.serving = chance.random() > 0.05 if self.serving else chance.random() > 0.5
        if chance.random() < 0.05:
            self.names = [] if self.names else ["poet"]
        lies = {"digest": 5} if chance.random() < 0.02 else {}
        return msgspec.structs.replace(
            reported("a", self.sequence, self.keys, at=self.at, serving=self.serving),
            running=len(self.running) if self.serving else 0,
            adapters=self.names,
            **lies,
        )


def known(instance: Instance) -> dict[str, Any]:
    return {f.name: getattr(instance, f.name) for f in fields(instance) if f.name not in LOAD | {"idle_since"}}


@pytest.mark.parametrize("seed", range(10))
def test_a_report_out_of_the_log_would_have_changed_no_decision(seed: int) -> None:
    world = Follower(seed)
    for _ in range(200):
        said = world.second()
        twin = copy_state(world.state)
        twin.apply(said)
        world.said += 1
        if told(world.state, world.heard, said):
            world.logged += 1
            world.lost_in(world.state, world.lost)
            continue
        ours, theirs = world.state.fleet[InstanceId("a")], twin.fleet[InstanceId("a")]
        assert known(ours) == known(theirs), (seed, said)
        assert world.state.fleet.ready == twin.fleet.ready
        assert not theirs.idle_since or theirs.idle_since >= ours.idle_since >= 0.0
        assert not (said.running and ours.idle_since), "it works, and State takes it for idle"
        assert world.lost_in(twin, deepcopy(world.lost)) == world.lost_in(world.state, world.lost)
    assert 0 < world.logged < world.said


def test_a_suspicion_carries_the_heartbeat_that_it_rests_on() -> None:
    leader: Dispatcher = leader_of(("a", "b", "c"), policy_set(routing="least_loaded"))
    heard = {InstanceId("a"): 7.25, InstanceId("b"): 11.5}
    timeouts = LivenessTimeouts(heard_since=5.0, suspect_after=3.0, leave_after=6.5)

    events = leader.check_liveness(timeouts, 11.75, heard)

    assert [(type(e).__name__, e.instance, e.patience.heard_since) for e in events] == [  # type: ignore[union-attr]
        ("InstanceSuspected", "a", 7.25),
        ("InstanceLeft", "c", 5.0),
    ]
    assert events[0].silent_seconds == 4.5  # type: ignore[union-attr]


@pytest.mark.parametrize("elected_at", [0.0, 3.0])
@pytest.mark.parametrize("clock", [0.0, -3600.0, 3600.0])
def test_who_is_to_be_back_is_not_removed_before_whatever_its_clock_says_and_the_decision_carries_why(
    clock: float, elected_at: float
) -> None:
    """A worker of 60 engines needs longer than --leave-seconds to restart. A successor counts from its election on."""
    heard, begins = HeardReports(), max(1.0, elected_at)
    leader, twin = (leader_of(("a", "other"), policy_set(routing="least_loaded")) for _ in range(2))
    farewell = report(1.0 + clock, back_within=70.0)
    for each in (leader, twin):
        each.state.apply(reported("a", 0, [], at=0.5 + clock))
        each.state.apply(farewell)
    if elected_at < 1.0:
        heard.read(leader.state, farewell, 1.0)
    timeouts = LivenessTimeouts(heard_since=elected_at, suspect_after=3.0, leave_after=30.0)
    decided = []
    for after in (39.0, 68.0, 72.5, 73.5, 99.5, 100.5):
        now = begins + after
        for each in (leader, twin):
            each.state.apply(reported("other", 0, [], at=now))
        for event in leader.check_liveness(timeouts, now, heard.silent_since(leader.state, now, elected_at)):
            assert isinstance(event, InstanceSuspected | InstanceLeft)
            assert event.patience is not None
            decided.append((type(event), after))
            assert twin.check_liveness(event.patience, now) == [event]

    assert decided == [(InstanceSuspected, 73.5), (InstanceLeft, 100.5)]


@pytest.mark.parametrize("clock", [0.0, 3600.0])
def test_no_worker_is_excused_without_end_nor_by_an_old_copy(clock: float) -> None:
    leader = leader_of(("a",), policy_set(routing="least_loaded"))
    leader.state.apply(report(1.0 + clock, back_within=1e12))
    longest = float(EXCUSED_WALL_SECONDS_MAX)
    assert HeardReports().silent_since(leader.state, 2.0, 1.5) == {InstanceId("a"): 1.5 + longest}

    heard = HeardReports()
    heard.note(leader.state, report(30.0 + clock), 30.0)
    leader.state.apply(report(30.0 + clock))
    leader.state.apply(report(1.0 + clock, back_within=10.0))
    assert heard.silent_since(leader.state, 31.0, 1.5) == {InstanceId("a"): 30.0}


def test_a_heartbeat_from_before_the_clock_was_set_back_does_not_excuse_what_is_silent_since() -> None:
    leader, heard = leader_of(("a", "b"), policy_set(routing="least_loaded")), HeardReports()
    for name, at in (("a", 700.0), ("b", 105.0)):
        heard.note(leader.state, reported(name, 0, [], at=at), at)
    timeouts = LivenessTimeouts(heard_since=100.0, suspect_after=3.0, leave_after=60.0)

    events = leader.check_liveness(timeouts, 105.0, heard.silent_since(leader.state, 105.0, 0.0))

    assert [(e.instance, e.silent_seconds) for e in events if isinstance(e, InstanceSuspected)] == [("a", 5.0)]

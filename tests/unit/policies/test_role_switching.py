"""An instance changes its role without a restart: drained first, its cache stays known, and whoever reads the log knows the
same role, in whatever order a leader's decision and a worker's announcement cross."""

from dataclasses import asdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.commands import HandOverRequest
from pointsman.contracts.decisions import LeaderElected, RequestHandedOver, RequestMigrated, RequestPlaced
from pointsman.contracts.envelope import Event
from pointsman.contracts.fleet import InstanceDraining, InstanceJoined, InstanceLeft, InstanceRoleChanged
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.dispatch.fleet_care import SWITCH_SECONDS_MAX
from pointsman.policies.policy_set import policy_set
from pointsman.policies.scaling.roles import switch_refusal
from pointsman.primitives import Epoch, InstanceId, RequestId, Term
from pointsman.simulation.replay import verify
from pointsman.state.state import PoolSettings, State
from tests.support.events import finished, first_token, joined, reported, route, stored
from tests.support.logged_leader import LoggedLeader

P1, P2, D1, D2 = map(InstanceId, ("p1", "p2", "d1", "d2"))
ROLES = {P1: "prefill", P2: "prefill", D1: "decode", D2: "decode"}
POLICIES = policy_set(routing="round_robin", admission="none", ordering="fcfs", prefill_window_tokens=1)


class Pool(LoggedLeader):
    """Two instances of each role, all of which can change it."""

    def __init__(self) -> None:
        self.lead(POLICIES, at=0.0)
        for instance, role in ROLES.items():
            self.happens(joined(instance, role=role, role_switching=True))
            self.happens(reported(instance, 0, []))

    def arrives(self, request: str, at: float) -> list[LogEvent]:
        return self.decides(self.dispatcher.route(route(request, [len(self.log)], arrived_at=at), at))

    def drains(self, instance: InstanceId, at: float, becomes: str) -> list[LogEvent]:
        return self.decides(self.dispatcher.drain(instance, "asked", at, becomes=becomes))  # type: ignore[arg-type]

    def changes(self, at: float) -> list[LogEvent]:
        return self.decides(self.dispatcher.change_roles(at))

    def hands_over(self, request: str, source: str, at: float) -> list[LogEvent]:
        command = HandOverRequest(request=RequestId(request), attempt=1, instance=InstanceId(source), prefill=0.1)
        return self.decides(self.dispatcher.hand_over(command, at))


def of(kind: type[Event], events: list[LogEvent]) -> list[LogEvent]:
    return [event for event in events if isinstance(event, kind)]


def test_an_idle_instance_changes_at_once_and_keeps_its_epoch_and_its_cache() -> None:
    pool = Pool()
    pool.happens(stored("p1", 1, [11, 12]))

    pool.drains(P1, 1.0, "decode")
    changed = pool.changes(1.1)

    [event] = of(InstanceRoleChanged, changed)
    assert isinstance(event, InstanceRoleChanged)
    assert (event.instance, event.role, event.left) == (P1, "decode", 0)
    assert pool.state.fleet.ready == (P2,)
    assert pool.state.fleet.decoders == (D1, D2, P1)
    assert pool.state.fleet[P1].epoch == 1
    assert pool.state.index.blocks(P1) == 2
    assert pool.changes(1.2) == []
    assert verify(pool.log).ok


def test_where_nobody_is_left_who_prefills_an_instance_takes_back_the_role_that_its_worker_announces() -> None:
    pool = Pool()
    pool.drains(P2, 1.0, "decode")
    pool.changes(1.1)
    before = pool.changes(1.2)
    pool.happens(InstanceLeft(at=1.5, instance=P1, epoch=Epoch(1), reason="stopped"))

    [back] = of(InstanceRoleChanged, pool.changes(2.0))
    later = of(RequestPlaced, pool.arrives("later", 2.1))

    assert before == [], "p1 prefills"
    assert isinstance(back, InstanceRoleChanged)
    assert (back.instance, back.role) == (P2, "prefill")
    assert pool.changes(2.2) == []
    assert [event.instance for event in later if isinstance(event, RequestPlaced)] == [P2]
    assert verify(pool.log).ok


def test_nobody_takes_back_a_role_for_which_the_other_would_be_missing() -> None:
    pool = Pool()
    pool.drains(P2, 1.0, "decode")
    pool.changes(1.1)
    for instance in (P1, D1, D2):
        pool.happens(InstanceLeft(at=1.5, instance=instance, epoch=Epoch(1), reason="stopped"))

    assert pool.state.fleet[P2].role == "decode"
    assert pool.changes(2.0) == [], "it decodes alone, and would prefill alone"


def test_a_prefill_that_runs_is_handed_over_and_what_waits_moves_before_the_role_changes() -> None:
    pool = Pool()
    for number in range(4):  # in turn: each of p1 and p2 has one inside and one that waits
        pool.arrives(f"r{number}", 0.5)
    inside = next(iter(pool.state.workload.queue(P1).prefill))

    moved = of(RequestMigrated, pool.drains(P1, 1.0, "decode"))
    too_early = pool.changes(1.5)
    handed = of(RequestHandedOver, pool.hands_over(inside, "p1", 2.0))
    changed = pool.changes(2.1)
    later = of(RequestPlaced, pool.arrives("later", 2.2))

    assert [event.instance for event in moved if isinstance(event, RequestMigrated)] == [P2]
    assert too_early == []
    assert [event.instance in (D1, D2) for event in handed if isinstance(event, RequestHandedOver)] == [True]
    assert len(of(InstanceRoleChanged, changed)) == 1
    assert [event.instance for event in later if isinstance(event, RequestPlaced)] == [P2]
    assert verify(pool.log).ok


def test_answers_end_where_they_are_and_an_instance_does_not_wait_for_long_ones_for_ever() -> None:
    pool = Pool()
    pool.arrives("long", 0.5)
    pool.hands_over("long", "p1", 0.6)
    at = pool.state.workload.requests[RequestId("long")].instance
    pool.happens(first_token("long", at, at=0.7))

    pool.drains(at, 1.0, "prefill")
    waiting = pool.changes(1.0 + SWITCH_SECONDS_MAX - 0.1)
    changed = pool.changes(1.0 + SWITCH_SECONDS_MAX)
    pool.happens(finished("long", at, at=60.0))

    assert waiting == []
    assert [event.left for event in changed if isinstance(event, InstanceRoleChanged)] == [1]
    assert pool.state.fleet[at].role == "prefill"
    assert not pool.state.workload.requests
    assert verify(pool.log).ok


def test_another_leader_finishes_what_the_first_one_began() -> None:
    pool = Pool()
    pool.drains(P1, 1.0, "decode")
    pool.happens(
        LeaderElected(
            at=1.1, term=Term(2), scheduler="t", as_of=len(pool.log), pool=asdict(PoolSettings()),
            policy=POLICIES.routing.name, settings=POLICIES.settings,
        )
    )  # fmt: skip
    heir = State(PoolSettings(), POLICIES.trackers())
    for entry in pool.log:
        heir.apply_entry(entry)

    [changed] = Dispatcher(heir, POLICIES, term=Term(2)).change_roles(1.2)

    assert isinstance(changed, InstanceRoleChanged)
    assert heir.fleet[P1].role == "decode"
    assert not heir.fleet[P1].draining


@pytest.mark.parametrize("undone_by", ["undrain", "drain"])
def test_a_change_is_called_off_by_a_later_command(undone_by: str) -> None:
    pool = Pool()
    pool.drains(P1, 1.0, "decode")
    if undone_by == "undrain":
        pool.decides(pool.dispatcher.undrain(P1, 1.1))
    else:
        pool.drains(P1, 1.1, "")

    assert pool.changes(20.0) == []
    assert pool.state.fleet[P1].role == "prefill"
    assert verify(pool.log).ok


def test_what_cannot_change_or_would_leave_a_role_empty_is_refused_in_words() -> None:
    pool = Pool()
    fleet = pool.state.fleet
    pool.happens(joined("fixed", role="prefill"))

    assert switch_refusal(fleet, P1, "decode") == ""
    assert switch_refusal(fleet, P1, "") == ""
    assert "--role-switching" in switch_refusal(fleet, InstanceId("fixed"), "decode")
    assert "has the role" in switch_refusal(fleet, P1, "prefill")
    pool.drains(D2, 1.0, "prefill")
    assert "no other instance with the role decode" in switch_refusal(fleet, D1, "prefill")


def join_again(instance: InstanceId, role: str, epoch: int, *, switching: bool = True) -> InstanceJoined:
    return joined(instance, role=role, role_switching=switching, epoch=epoch, at=5.0)


def test_the_same_announcement_does_not_undo_a_change_and_another_one_wins() -> None:
    pool = Pool()
    pool.drains(P1, 1.0, "decode")
    pool.changes(1.1)

    pool.happens(join_again(P1, "prefill", 2))
    restarted = pool.state.fleet[P1].role
    pool.happens(join_again(P1, "both", 3))
    told_otherwise = pool.state.fleet[P1].role
    pool.happens(InstanceLeft(at=6.0, instance=P1, epoch=Epoch(3), reason="stopped"))
    pool.happens(join_again(P1, "prefill", 4))

    assert (restarted, told_otherwise, pool.state.fleet[P1].role) == ("decode", "both", "prefill")
    assert verify(pool.log).ok


def test_a_reader_that_begins_with_a_later_join_is_told_the_role_again() -> None:
    """The log may have dropped the change."""
    pool = Pool()
    pool.drains(P1, 1.0, "decode")
    pool.changes(1.1)
    pool.happens(join_again(P1, "prefill", 2))
    read_from = len(pool.log) - 1

    [told] = pool.decides(pool.dispatcher.repeat_roles_and_drains([P1], 5.1))
    untold = pool.decides(pool.dispatcher.repeat_roles_and_drains([P2, D1, InstanceId("absent")], 5.1))
    pool.drains(P1, 5.2, "prefill")
    for_a_role = pool.dispatcher.repeat_roles_and_drains([P1], 5.3)
    later = State(PoolSettings())
    for entry in pool.log[read_from : read_from + 2]:
        later.apply_entry(entry)

    assert isinstance(told, InstanceRoleChanged)
    assert (told.instance, told.epoch, told.role, told.left) == (P1, 2, "decode", 0)
    assert untold == []
    assert for_a_role == [], "it would end the drain"
    assert later.fleet[P1].role == pool.state.fleet[P1].role == "decode"
    assert pool.proven


@pytest.mark.parametrize("leaving", [False, True])
def test_a_reader_that_begins_with_a_later_join_is_told_of_the_drain_again(leaving: bool) -> None:
    pool = Pool()
    pool.decides(pool.dispatcher.drain(P1, "asked", 1.0, leaving=leaving, by="alice"))
    pool.happens(join_again(P1, "prefill", 2))
    read_from = len(pool.log) - 1

    [told] = pool.decides(pool.dispatcher.repeat_roles_and_drains([P1, P2], 5.1))
    later = State(PoolSettings())
    for entry in pool.log[read_from:]:
        later.apply_entry(entry)

    assert isinstance(told, InstanceDraining)
    assert told.by == "", "nobody asked for it now"
    for state in (pool.state, later):
        assert (state.fleet[P1].draining, state.fleet[P1].leaving) == (True, leaving)
    assert pool.proven


@pytest.mark.parametrize("leaving", [False, True])
def test_a_reader_is_told_of_a_changed_role_and_of_the_drain_behind_it(leaving: bool) -> None:
    pool = Pool()
    pool.drains(P1, 1.0, "decode")
    pool.changes(1.1)
    pool.decides(pool.dispatcher.drain(P1, "asked", 2.0, leaving=leaving, by="alice"))
    pool.happens(join_again(P1, "prefill", 2))
    read_from = len(pool.log) - 1

    told = pool.decides(pool.dispatcher.repeat_roles_and_drains([P1, P2], 5.1))
    later = State(PoolSettings())
    for entry in pool.log[read_from:]:
        later.apply_entry(entry)

    assert [type(event) for event in told] == [InstanceRoleChanged, InstanceDraining]
    for state in (pool.state, later):
        known = state.fleet[P1]
        assert (known.role, known.draining, known.leaving) == ("decode", True, leaving)
    assert pool.proven


@given(
    announced=st.sampled_from(["prefill", "decode", "both"]),
    switching=st.booleans(),
    told=st.lists(st.sampled_from(["begin", "change", "undrain", "leave"]), min_size=1, max_size=4),
    seen=st.integers(0, 4),
)
def test_all_readers_know_the_same_role_when_decisions_and_a_restart_cross(
    announced: str, switching: bool, told: list[str], seen: int
) -> None:
    """The leader learns of a restart after it has decided `told[:seen]` and more; the log has the restart before."""
    pool = Pool()
    first = len(pool.log)
    decisions: list[LogEvent] = []
    restart = join_again(P1, announced, 2, switching=switching)
    for number, what in enumerate(told):
        at = 1.0 + number
        if number == seen:
            pool.state.apply(restart)
        if what == "begin":
            decisions += pool.dispatcher.drain(P1, "asked", at, becomes="decode") if _may(pool) else []
        elif what == "change":
            decisions += pool.dispatcher.change_roles(at + 20.0)
        elif what == "undrain":
            decisions += pool.dispatcher.undrain(P1, at)
        else:
            decisions += pool.dispatcher.drain(P1, "asked", at, leaving=True)
    if seen >= len(told):
        pool.state.apply(restart)
    as_of = [event.stamp.as_of for event in decisions if event.stamp is not None]

    reader = State(PoolSettings(), POLICIES.trackers())
    for entry in pool.log[:first]:
        reader.apply_entry(entry)
    for number, event in enumerate([restart, *decisions], first + 1):
        reader.apply(event, number)

    mine, theirs = reader.fleet[P1], pool.state.fleet[P1]
    assert as_of == [first] * len(as_of)
    assert (mine.role, mine.becomes, mine.draining, mine.leaving) == (
        theirs.role,
        theirs.becomes,
        theirs.draining,
        theirs.leaving,
    )


def _may(pool: Pool) -> bool:
    return not switch_refusal(pool.state.fleet, P1, "decode")


def test_the_log_of_old_workers_is_read_as_before() -> None:
    event = joined("a", role="decode")

    assert not event.role_switching
    assert b"role_switching" not in msgspec.json.encode(event)
    assert not InstanceDraining(at=0.0, instance=P1, epoch=Epoch(1)).becomes

"""What a plan of migrations may do, what it gains, and what is left of it when the state has moved on."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typing_extensions import override

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import MigrationRefused, RequestMigrated
from pointsman.contracts.fleet import InstanceDraining, InstanceSuspected
from pointsman.contracts.reasons import CancelCause
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.pool_view import PoolView
from pointsman.policies.rebalancing.base import Migration, MigrationPlan, RebalancingPolicy
from pointsman.policies.rebalancing.dualmap_pair import DualMapPair
from pointsman.policies.rebalancing.global_benefit import GlobalBenefit
from pointsman.policies.rebalancing.migration_planner import LOOK_UPS_PER_MIGRATION
from pointsman.policies.rebalancing.off import Off
from pointsman.policies.rebalancing.work_stealing import WorkStealing
from pointsman.policies.routing.base import Choice, RoutingPolicy
from pointsman.policies.stall_detection import stalled_seconds
from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId, RequestId
from pointsman.state.state import State
from tests.support.events import finished, first_token, route, stored
from tests.support.examples import examples
from tests.support.leading import leader_of

FLEET = ("a", "b", "c", "d")
EPSILON = 1e-6


@dataclass(frozen=True)
class WhereTheSessionSays(RoutingPolicy):
    """Places badly on purpose."""

    name: ClassVar[str] = "where_the_session_says"

    @override
    def choose(self, view: PoolView) -> Choice:
        candidate = view.candidate(InstanceId(view.request.session))
        return Choice(candidate, "told so", [candidate])


def pool(instances: tuple[str, ...] = FLEET, *, window_tokens: int = 1) -> Dispatcher:
    """With a window of one token, one request is in each engine and the rest wait."""
    policies = PolicySet(
        routing=WhereTheSessionSays(),
        admission=AdmitAll(),
        ordering=FirstComeFirstServed(),
        prefill_window_tokens=window_tokens,
    )
    return leader_of(instances, policies)


def place(
    dispatcher: Dispatcher, request: str, instance: str, keys: list[int], *, now: float = 0.0, **fields: Any
) -> None:
    command = route(request, keys, session=instance, arrived_at=now, **fields)
    dispatcher.route(command, now)


def prompt(number: int, blocks: int = 10) -> list[int]:
    """A prompt that shares no block with another number's."""
    return list(range(number * 1000 + 1, number * 1000 + 1 + blocks))


def crowd(dispatcher: Dispatcher, instance: str, count: int, *, blocks: int = 10, **fields: Any) -> None:
    """`count` requests of their own on one instance: the first is in the engine, the rest wait."""
    for number in range(count):
        place(dispatcher, f"{instance}{number}", instance, prompt(ord(instance) * 100 + number, blocks), **fields)


def predicted(state: State, now: EngineSeconds) -> dict[RequestId, EngineSeconds]:
    """The slow twin of a prediction: first tokens one after the other, in seconds from now."""
    ends = {}
    for instance, line in state.workload.queues.items():
        seconds = state.latency.expected_seconds(instance, *line.engine_left(now))
        seconds -= sum(request.prefill_seconds for request in line.prefill.values())
        seconds += stalled_seconds(line, now)
        for request in (*line.prefill.values(), *line.pending.values()):
            seconds += request.prefill_seconds
            ends[request.id] = seconds
    return ends


def on_time(state: State, now: EngineSeconds) -> set[RequestId]:
    requests = state.workload.requests
    return {name for name, end in predicted(state, now).items() if end <= requests[name].deadline - now + EPSILON}


def moved(plan: MigrationPlan) -> set[str]:
    return {migration.request for migration in plan.migrations}


POLICIES: list[RebalancingPolicy] = [DualMapPair(), GlobalBenefit(), GlobalBenefit(waste_weight=0.0)]
placements = st.lists(
    st.tuples(
        st.integers(0, 5),  # which of a few shared prefixes
        st.integers(1, 6),  # blocks of it
        st.integers(0, 25),  # blocks of its own
        st.sampled_from("aaabbcd"),
        st.sampled_from([0.5, 1.0, 3.0, 8.0]),
    ),
    min_size=20,  # with fewer, hardly anything is late and most plans are empty
    max_size=50,
)


def build(history: list[tuple[int, int, int, str, float]], *, warm: str = "") -> Dispatcher:
    dispatcher = pool()
    for sequence, prefix in enumerate(range(6) if warm else (), start=1):
        dispatcher.state.apply(stored(warm, sequence, prompt(prefix, 6)))
    for number, (prefix, shared, own, instance, slo) in enumerate(history):
        keys = [*prompt(prefix, shared), *prompt(100 + number, own)]
        place(dispatcher, f"r{number}", instance, keys, now=number * 0.01, slo_ttft=slo)
    return dispatcher


@pytest.mark.parametrize("policy", POLICIES)
@given(placements, st.sampled_from(["", "d"]), st.floats(0.0, 6.0))
@example([], "", 0.0)
@examples(80)
def test_a_plan_makes_nobody_late_and_loses_no_work(
    policy: RebalancingPolicy, history: list[tuple[int, int, int, str, float]], warm: str, later: float
) -> None:
    dispatcher = build(history, warm=warm)
    state, now = dispatcher.state, len(history) * 0.01 + later
    before, under_way = on_time(state, now), set(state.workload.requests)

    plan = policy.plan(state, now)
    dispatcher.migrate(plan, now)

    assert before <= on_time(state, now)
    assert set(state.workload.requests) == under_way
    assert {m.source for m in plan.migrations}.isdisjoint(m.target for m in plan.migrations)
    assert all(m.benefit > 0 for m in plan.migrations)
    for migration in plan.migrations:
        assert state.workload.requests[migration.request].instance == migration.target
    for instance, line in state.workload.queues.items():
        here = [request for request in state.workload.requests.values() if request.instance == instance]
        assert {r.id for r in here} == {*line.pending, *line.prefill, *line.decoding}
        assert line.pending_seconds + line.prefill_seconds == pytest.approx(sum(r.prefill_seconds for r in here))
        assert line.queued_tokens == sum(r.uncached_tokens for r in here)


@pytest.mark.parametrize("policy", POLICIES)
@given(placements)
@examples(40)
def test_planning_changes_nothing_and_the_same_state_gives_the_same_plan(
    policy: RebalancingPolicy, history: list[tuple[int, int, int, str, float]]
) -> None:
    first, second = (build(history).state for _ in range(2))

    assert policy.plan(first, 1.0) == policy.plan(first, 1.0) == policy.plan(second, 1.0)


@given(placements)
@examples(100)
def test_within_the_pair_a_request_moves_only_to_an_instance_of_its_prefix(
    history: list[tuple[int, int, int, str, float]],
) -> None:
    state = build(history).state

    for migration in DualMapPair().plan(state, 1.0).migrations:
        request = state.workload.requests[migration.request]
        assert migration.target in candidate_pair(state.fleet.ready, PoolView(state, request, 1.0).ring_key)


def test_a_queue_that_meets_its_objectives_stays_as_it_is() -> None:
    dispatcher = pool()
    crowd(dispatcher, "a", 7)

    assert GlobalBenefit().plan(dispatcher.state, 0.0).migrations == ()


def test_requests_move_until_the_rest_is_on_time_and_no_further() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 12)
    late = {"a7", "a8", "a9", "a10", "a11"}
    assert {f"a{n}" for n in range(12)} - on_time(dispatcher.state, 0.0) == late

    plan = GlobalBenefit().plan(dispatcher.state, 0.0)
    dispatcher.migrate(plan, 0.0)

    assert moved(plan) == late
    assert [m.benefit for m in plan.migrations] == sorted((m.benefit for m in plan.migrations), reverse=True)
    assert len(on_time(dispatcher.state, 0.0)) == 12


def test_who_holds_the_prefix_is_preferred_to_who_is_idle() -> None:
    dispatcher = pool(("a", "b", "c"))
    crowd(dispatcher, "a", 7)
    dispatcher.state.apply(stored("c", 1, prompt(5, 30)))
    place(dispatcher, "warm", "a", prompt(5, 30))
    place(dispatcher, "busy", "c", prompt(6, 4))

    (migration,) = GlobalBenefit(waste_weight=0.0).plan(dispatcher.state, 0.0).migrations

    assert (migration.request, migration.target) == ("warm", "c")
    assert migration.reason.startswith("the queue of a would miss objectives")


def test_lost_affinity_is_charged_for() -> None:
    dispatcher = pool(("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(5, 30)))
    crowd(dispatcher, "a", 7, excluded=[InstanceId("b")])
    place(dispatcher, "warm", "a", prompt(5, 30), slo_ttft=3.0)

    free = GlobalBenefit(waste_weight=0.0).plan(dispatcher.state, 0.0)
    charged = GlobalBenefit(waste_weight=2.0).plan(dispatcher.state, 0.0)

    assert moved(free) == {"warm"}
    assert moved(charged) == set()


def test_work_stealing_computes_a_prefix_again_only_where_the_queue_is_short() -> None:
    idle, busy = pool(("a", "b")), pool(("a", "b"))
    place(busy, "before", "b", prompt(900, 10))
    for dispatcher in (idle, busy):
        dispatcher.state.apply(stored("a", 1, prompt(5, 30)))
        crowd(dispatcher, "a", 7, excluded=[InstanceId("b")])
        place(dispatcher, "warm", "a", prompt(5, 30), slo_ttft=3.5)

    assert moved(WorkStealing().plan(idle.state, 0.0)) == {"warm"}
    assert moved(WorkStealing().plan(busy.state, 0.0)) == set()
    assert moved(GlobalBenefit(waste_weight=0.0).plan(busy.state, 0.0)) == {"warm"}


def test_work_stealing_moves_what_costs_no_more_there_behind_any_queue_that_is_in_time() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 8, excluded=[InstanceId("b")])
    dispatcher.state.apply(stored("b", 1, prompt(5, 30)))
    place(dispatcher, "warm", "a", prompt(5, 30))
    place(dispatcher, "before", "b", prompt(900, 20))

    assert moved(WorkStealing().plan(dispatcher.state, 0.0)) == {"warm"}


def test_what_is_late_whatever_happens_moves_nobody() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 3, slo_ttft=60.0)
    place(dispatcher, "hopeless", "a", prompt(1, 50), slo_ttft=1.0)

    assert GlobalBenefit().plan(dispatcher.state, 0.5).migrations == ()


@pytest.mark.parametrize(("slo", "moves"), [(2.5, set()), (2.8, {"long"})])
def test_who_would_be_late_at_the_target_too_stays(slo: float, moves: set[str]) -> None:
    dispatcher = pool(("a", "b"))
    place(dispatcher, "before", "b", prompt(2, 10))
    crowd(dispatcher, "a", 7, slo_ttft=60.0, excluded=[InstanceId("b")])
    place(dispatcher, "long", "a", prompt(1, 32), slo_ttft=slo)

    assert moved(GlobalBenefit().plan(dispatcher.state, 0.0)) == moves


def test_who_gives_takes_nothing_in_the_same_round() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 12)
    crowd(dispatcher, "b", 2, slo_ttft=1.0)

    assert GlobalBenefit().plan(dispatcher.state, 0.0).migrations == ()


def test_a_round_moves_and_looks_up_no_more_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = pool()
    crowd(dispatcher, "a", 200, slo_ttft=6.0)
    look_ups = []
    real = State.hits

    def counted(state: State, keys: list[BlockKey]) -> dict[InstanceId, int]:
        look_ups.append(keys)
        return real(state, keys)

    monkeypatch.setattr(State, "hits", counted)
    plan = GlobalBenefit(migrations_max=5).plan(dispatcher.state, 0.0)

    assert len(plan.migrations) == 5
    assert len(look_ups) <= 5 * LOOK_UPS_PER_MIGRATION


def test_a_failed_target_is_not_tried_again() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 8, slo_ttft=2.0, excluded=[InstanceId("b")])

    assert GlobalBenefit().plan(dispatcher.state, 0.0).migrations == ()


def test_an_instance_that_finishes_no_prefill_gives_its_queue_away() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 4, slo_ttft=60.0)

    assert GlobalBenefit().plan(dispatcher.state, 2.9).migrations == ()
    plan = GlobalBenefit().plan(dispatcher.state, 3.5)

    assert moved(plan) == {"a1", "a2", "a3"}
    assert plan.migrations[0].reason.startswith("a has finished no prefill for 3.5 s")
    assert GlobalBenefit(stall_seconds=0.0).plan(dispatcher.state, 3.5).migrations == ()


def test_a_stalled_instance_takes_nothing() -> None:
    dispatcher = pool(("a", "b"))
    place(dispatcher, "stuck", "b", prompt(1))
    crowd(dispatcher, "a", 12, now=3.5)

    assert GlobalBenefit().plan(dispatcher.state, 3.5).migrations == ()


@pytest.mark.parametrize(
    ("leaves", "now", "gain"),
    [
        (InstanceDraining(at=0.0, instance=InstanceId("a"), epoch=Epoch(1)), 0.0, {"a2", "a3", "a4"}),
        (
            InstanceSuspected(at=2.5, instance=InstanceId("a"), epoch=Epoch(1), silent_seconds=2.5),
            2.5,
            {"a1", "a2", "a3", "a4"},
        ),
    ],
    ids=["drained", "suspected"],
)
def test_an_instance_that_takes_no_requests_gives_away_who_gains(
    leaves: LogEvent, now: EngineSeconds, gain: set[str]
) -> None:
    dispatcher = pool(("a", "b", "c"))
    crowd(dispatcher, "a", 5, slo_ttft=60.0)
    assert GlobalBenefit().plan(dispatcher.state, now).migrations == ()
    dispatcher.state.apply(leaves)

    plan = GlobalBenefit().plan(dispatcher.state, now)
    events = dispatcher.migrate(plan, now)

    assert moved(plan) == gain
    assert all(m.target in ("b", "c") and m.reason.startswith("a takes no requests;") for m in plan.migrations)
    assert not any(isinstance(event, MigrationRefused) for event in events)


def test_every_move_of_a_plan_is_made_or_refused_in_its_order() -> None:
    dispatcher = pool(("a", "b", "c"))
    crowd(dispatcher, "a", 12)
    plan = replace(GlobalBenefit().plan(dispatcher.state, 0.0), id="r.1", policy="global")
    late = Migration(RequestId("a1"), InstanceId("a"), InstanceId("b"), 1.0, "")

    events = dispatcher.migrate(replace(plan, migrations=(*plan.migrations, late)), 0.0)

    answers = [event for event in events if isinstance(event, RequestMigrated | MigrationRefused)]
    assert [event.request for event in answers] == [*(m.request for m in plan.migrations), "a1"]
    assert {(event.plan, event.policy) for event in answers} == {("r.1", "global")}
    last = answers[-1]
    assert isinstance(last, MigrationRefused)
    assert last.reason in {"no_gain", "target_late"}


def test_stale_items_of_a_plan_are_passed_over() -> None:
    dispatcher = pool(("a", "b", "c"))
    crowd(dispatcher, "a", 12)
    plan = GlobalBenefit().plan(dispatcher.state, 0.0)
    ended, drained = plan.migrations[0], next(m for m in plan.migrations if m.target != plan.migrations[0].target)
    dispatcher.cancel_ungranted(ended.request, CancelCause.CLIENT_GONE, 0.1)
    dispatcher.state.apply(InstanceDraining(at=0.1, instance=drained.target, epoch=Epoch(1)))
    unknown = Migration(RequestId("nobody"), InstanceId("a"), InstanceId("b"), 1.0, "")
    elsewhere = replace(plan.migrations[-1], source=InstanceId("c"))

    events = dispatcher.migrate(replace(plan, migrations=(*plan.migrations[:-1], unknown, elsewhere)), 0.1)

    done = {event.request for event in events if isinstance(event, RequestMigrated)}
    assert done == {m.request for m in plan.migrations[1:-1] if m.target != drained.target}
    assert all(dispatcher.state.workload.requests[r].instance in dispatcher.state.fleet.ready for r in done)


def test_a_prefill_that_is_expected_to_take_long_is_no_stall_before_it_is_overdue() -> None:
    dispatcher = pool(("a",))
    place(dispatcher, "long", "a", prompt(1, 100))
    line = dispatcher.state.workload.queue(InstanceId("a"))

    assert stalled_seconds(line, 6.0) == 0.0
    assert stalled_seconds(line, 7.0) == 7.0


def test_a_first_token_ends_a_stall_and_a_full_engine_is_one() -> None:
    dispatcher = pool(("a",))
    dispatcher.policies = replace(dispatcher.policies, running_max=1)
    place(dispatcher, "decoding", "a", prompt(1))
    place(dispatcher, "waiting", "a", prompt(2))
    line = dispatcher.state.workload.queue(InstanceId("a"))

    assert stalled_seconds(line, 3.5) == 3.5
    dispatcher.state.apply(first_token("decoding", "a", at=3.5))
    assert stalled_seconds(line, 6.0) == 0.0
    assert stalled_seconds(line, 7.0) == 3.5
    dispatcher.state.apply(finished("decoding", "a", at=7.0))
    dispatcher.grant_waiting(InstanceId("a"), 7.0)
    assert stalled_seconds(line, 8.0) == 0.0


def test_answers_that_are_not_streamed_say_nothing_about_a_stall() -> None:
    dispatcher = pool(("a",))
    place(dispatcher, "whole", "a", prompt(1), streaming=False)

    assert stalled_seconds(dispatcher.state.workload.queue(InstanceId("a")), 30.0) == 0.0


def test_off_never_plans() -> None:
    dispatcher = pool(("a", "b"))
    crowd(dispatcher, "a", 30)

    assert Off().plan(dispatcher.state, 4.0).migrations == ()

"""How large a pool should be: what each policy asks for and why, what the limits make of it, and the steps that follow."""

from collections.abc import Mapping
from datetime import UTC, datetime

import pytest

from pointsman.contracts.decisions import ScaleApplied, ScaleDecided, Settings
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft, Role
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet, UnknownPolicyError, policy_set, scaling_policy
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.policies.scaling import Limits, PoolSize, ScaleTarget, ScalingPolicy, limited
from pointsman.policies.scaling.decider import Decider
from pointsman.policies.scaling.roles import NOT_SIZED, RoleSizes, Switch
from pointsman.policies.scaling.schedule import parse_cron
from pointsman.policies.scaling.slo_attainment import SloAttainment
from pointsman.policies.scaling.target_utilisation import TargetUtilisation
from pointsman.ports import ProvidedInstance
from pointsman.primitives import EngineSeconds, Epoch, InstanceId, RequestId, Term, WallSeconds
from pointsman.state.fleet import Instance
from pointsman.state.scaling import Scaling
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.service_window import ServiceWindow
from pointsman_scaler.reconciler import (
    HUNG,
    NOT_JOINED,
    NOT_NEEDED,
    Drain,
    Grow,
    Report,
    Stop,
    Undrain,
    next_steps,
    pool_status,
)
from tests.support.events import finished, first_token, joined, rejected, reported, route
from tests.support.leading import leader_of

pytestmark = pytest.mark.usefixtures("plain_sums")


class Pool:
    """A pool whose engines prefill as they are expected to, under a steady load."""

    def __init__(self, policy: ScalingPolicy, *, engines: int) -> None:
        policies = PolicySet(
            routing=RoundRobin(), admission=AdmitAll(), ordering=FirstComeFirstServed(), prefill_window_tokens=1
        )
        self.policy = policy
        self.state = State(PoolSettings(), (*policies.trackers(), *policy.trackers()))
        self.dispatcher = Dispatcher(self.state, policies, term=Term(1))
        self.now: EngineSeconds = 0.0
        for number in range(1, engines + 1):
            self.state.apply(joined(f"e{number}"))
            self.state.apply(reported(f"e{number}", 0, []))
        self._requests = 0

    def serve(self, seconds: EngineSeconds, *, every: EngineSeconds, late: EngineSeconds = 0.0) -> None:
        """A request of a second's work now and then, each with a prompt of its own, answered as expected. `late`: how
        long it was under way before it was heard of."""
        until = self.now + seconds
        while self.now < until:
            self._requests += 1
            name = f"r{self._requests}"
            self.dispatcher.route(
                route(name, [self._requests * 100 + block for block in range(15)], arrived_at=self.now - late), self.now
            )
            instance = self.state.workload.requests[RequestId(name)].instance
            self.state.apply(first_token(name, instance, at=self.now + 0.96))
            self.state.apply(finished(name, instance, at=self.now + 0.96))
            self.now += every

    def target(self, wanted: int | None = None) -> ScaleTarget:
        ready = len(self.state.fleet.ready)
        return self.policy.scale_target(self.state, PoolSize(ready=ready, wanted=wanted or ready), self.now)


def test_a_pool_that_is_late_grows_by_what_its_work_needs() -> None:
    pool = Pool(SloAttainment(), engines=2)

    pool.serve(40, every=0.25, late=9.0)
    target = pool.target()

    assert target.wanted == 6  # 4 s of work a second, engines prefilling 70% of their time
    assert "0.0% of" in target.reason


@pytest.mark.parametrize("wrong", [-86_400.0, -30.0, 30.0, 86_400.0])
@pytest.mark.parametrize("every", [1, 4])
def test_an_ingress_with_a_wrong_clock_hides_no_outcomes_and_keeps_none_too_long(wrong: float, every: int) -> None:
    """`every` so manieth request is its."""
    pool = Pool(SloAttainment(), engines=2)
    pool.now += 100_000.0
    ended: list[EngineSeconds] = []
    for number in range(200):
        pool.now += 1.0
        came = pool.now + (wrong if number % every == 0 else 0.0)
        pool.dispatcher.route(route(f"r{number}", [number], arrived_at=came, sent_at=came), pool.now)
        instance = pool.state.workload.requests[RequestId(f"r{number}")].instance
        dated = came + 0.5
        pool.state.apply(first_token(f"r{number}", instance, at=dated))
        pool.state.apply(finished(f"r{number}", instance, at=dated))
        ended.append(pool.now + 0.5)
    window = pool.state.tracker(ServiceWindow)

    for seconds in (10, 30, 59):
        since = pool.now - seconds
        assert abs(window.outcomes(since).total - sum(at >= since for at in ended)) <= 1


def test_a_pool_whose_new_instances_have_not_come_yet_waits_for_them() -> None:
    pool = Pool(SloAttainment(), engines=4)
    pool.serve(40, every=0.5, late=9.0)

    assert pool.target(wanted=6).wanted == 6
    assert "2 of 6 are to come" in pool.target(wanted=6).reason


def test_refusals_make_a_pool_grow_however_quick_the_others_are() -> None:
    pool = Pool(SloAttainment(), engines=2)
    pool.serve(40, every=1.0)
    for name in ("x", "y", "z"):
        pool.dispatcher.route(route(name, [1], arrived_at=pool.now), pool.now)
        pool.state.apply(rejected(name, "slo_ttft", at=pool.now))

    assert pool.target().wanted == 3
    assert "refused" in pool.target().reason


@pytest.mark.parametrize("best_effort", [True, False])
def test_prompts_that_are_late_even_alone_do_not_make_a_pool_grow(best_effort: bool) -> None:
    pool = Pool(SloAttainment(), engines=2)
    pool.serve(40, every=1.0)
    for number in range(30):
        pool.dispatcher.route(
            route(f"long-{number}", [], arrived_at=pool.now, prompt_tokens=20_000, priority="interactive"), pool.now
        )
    waiting = list(pool.state.workload.requests.values())
    for request in waiting:
        request.best_effort = best_effort

    assert (pool.target().wanted > 2) is not best_effort
    assert len(waiting) == 30


def test_the_queue_of_a_request_is_the_work_of_its_class_and_of_those_above() -> None:
    """Batch work that a standard request overtakes makes nobody late."""
    pool = Pool(SloAttainment(), engines=1)
    pool.serve(40, every=1.2)
    for number in range(8):
        command = route(
            f"batch-{number}", [], arrived_at=pool.now, prompt_tokens=1_000, priority="batch", slo_ttft=60.0
        )
        pool.dispatcher.route(command, pool.now)
    batch_is_last = pool.target()
    pool.dispatcher.route(route("last", [1], arrived_at=pool.now), pool.now)

    assert (batch_is_last.wanted, pool.target().wanted) == (1, 1)


@pytest.mark.parametrize("settings", [{"busy_max": 0}, {"window_s": 0}])
def test_settings_that_would_divide_by_zero_are_refused(settings: Settings) -> None:
    with pytest.raises(UnknownPolicyError, match=f"slo_attainment: {next(iter(settings))}"):
        scaling_policy("slo_attainment", settings)


def test_a_pool_shrinks_where_the_last_while_would_have_been_on_time_without_one() -> None:
    idle, busy = Pool(SloAttainment(), engines=3), Pool(SloAttainment(), engines=3)

    idle.serve(90, every=1.5)
    busy.serve(90, every=0.36)  # 2.7 s of work a second: two cannot do it, and three just can

    assert idle.target().wanted == 2
    assert "without one instance 100.0% would have been" in idle.target().reason
    assert busy.target().wanted == 3


def test_a_pool_whose_requests_have_no_outcome_does_not_shrink() -> None:
    pool = Pool(SloAttainment(), engines=3)
    pool.serve(90, every=30.0)

    assert pool.target().wanted == 3
    assert "too few" in pool.target().reason


def test_a_pool_without_requests_sleeps_after_a_while_and_wakes_for_the_first_that_waits() -> None:
    pool = Pool(SloAttainment(idle_s=100.0), engines=1)
    pool.serve(10, every=5.0)
    early = pool.target()
    pool.now += 200

    assert (early.wanted, pool.target().wanted) == (1, 0)

    empty = Pool(SloAttainment(), engines=0)
    policies = PolicySet(routing=RoundRobin(), admission=AdmitAll(), ordering=FirstComeFirstServed(), hold_seconds=60.0)
    Dispatcher(empty.state, policies, term=Term(1)).route(route("first", [1]), 0.0)

    assert empty.policy.scale_target(empty.state, PoolSize(ready=0, wanted=0), 1.0).wanted == 1


def test_utilisation_follows_the_busier_of_prefill_and_memory_within_a_tolerance() -> None:
    pool = Pool(TargetUtilisation(), engines=2)
    pool.serve(60, every=0.5)  # 2 s of work a second for two engines: 96%, 60% are wanted

    assert pool.target().wanted == 4
    assert pool.target(wanted=4).wanted == 4  # two are to come

    calm = Pool(TargetUtilisation(), engines=2)
    calm.serve(60, every=0.8)  # 60%

    assert calm.target().wanted == 2


def test_utilisation_does_not_shrink_a_pool_whose_new_instances_have_not_come_yet() -> None:
    pool = Pool(TargetUtilisation(), engines=2)
    pool.serve(60, every=2.0)  # 24%

    assert pool.target(wanted=4).wanted == 4
    assert pool.target().wanted == 1


def test_a_pool_with_no_instance_that_prefills_keeps_its_size() -> None:
    policy = SloAttainment()
    state = State(PoolSettings(), policy.trackers())
    for name in "ab":
        state.apply(joined(name, role="decode"))
        state.apply(reported(name, 0, []))

    assert policy.scale_target(state, PoolSize(ready=2, wanted=2), 1000.0).wanted == 2


@pytest.mark.parametrize(
    ("text", "now", "fired"),
    [
        ("0 8 * * 1-5", "2026-11-21T07:00", "2026-11-20T08:00"),  # a Saturday: Friday counts
        ("*/15 * * * *", "2026-11-21T07:44", "2026-11-21T07:30"),
        ("30 6,18 * * *", "2026-11-21T06:29", "2026-11-20T18:30"),
        ("0 0 1 * 0", "2026-11-23T12:00", "2026-11-22T00:00"),  # the first of the month, or a Sunday
        ("0 0 29 2 *", "2027-01-01T00:00", "2024-02-29T00:00"),
        ("5/20 * * * 7", "2026-11-22T00:30", "2026-11-22T00:25"),
    ],
)
def test_a_cron_time_knows_when_it_fired_last(text: str, now: str, fired: str) -> None:
    moment = datetime.fromisoformat(now).replace(tzinfo=UTC).timestamp()

    assert parse_cron(text).last_firing(moment) == datetime.fromisoformat(fired).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize("times", ["8 = 3", "0 8 * * *", "0 24 * * * = 2", "x 8 * * * = 2", "0 8 * * 8 = 2"])
def test_a_schedule_that_is_none_is_refused_when_it_is_read(times: str) -> None:
    with pytest.raises(UnknownPolicyError, match="schedule"):
        scaling_policy("schedule", {"times": times})


def test_a_schedule_counts_once_and_a_person_counts_until_the_next_entry() -> None:
    policy = scaling_policy("schedule", {"times": "0 8 * * * = 8; 0 20 * * * = 2"})
    state = State(PoolSettings())
    nine = datetime(2026, 11, 21, 9, tzinfo=UTC).timestamp()

    assert policy.scale_target(state, PoolSize(ready=3, wanted=3), nine).wanted == 8

    state.apply(decided(1, wanted=1, at=nine))  # the first decision of a pool is nobody's

    assert policy.scale_target(state, PoolSize(ready=1, wanted=1), nine + 60).wanted == 8

    state.apply(decided(2, wanted=5, at=nine, by="alice"))

    assert policy.scale_target(state, PoolSize(ready=5, wanted=5), nine + 60).wanted == 5
    assert policy.scale_target(state, PoolSize(ready=5, wanted=5), nine + 12 * 3600).wanted == 2


def decided(number: int, *, wanted: int, at: EngineSeconds = 0.0, current: int = 0, by: str = "") -> ScaleDecided:
    return ScaleDecided(at=at, policy="p", settings={}, current=current, wanted=wanted, reason="", number=number, by=by)


def test_limits_let_a_pool_grow_fast_and_shrink_slowly() -> None:
    limits = Limits(lowest=2, highest=8, step_up=2, step_down=1, pause_up_s=30, pause_down_s=60)
    scaling = Scaling()
    scaling.decide(decided(1, wanted=4, at=0.0, current=2))

    def allowed(wanted: int, now: EngineSeconds, *, deliberate: bool = False) -> int | None:
        target = limited(ScaleTarget(wanted, "", deliberate), scaling, now, limits)
        return target.wanted if target else None

    assert [allowed(9, 29), allowed(9, 30), allowed(5, 30)] == [None, 6, 5]
    assert [allowed(1, 59), allowed(1, 60)] == [None, 3]
    assert allowed(4, 100) is None
    assert [allowed(20, 1, deliberate=True), allowed(0, 1, deliberate=True)] == [8, 2]


def test_of_two_decisions_with_one_number_the_first_in_the_log_counts_for_everyone() -> None:
    state = State(PoolSettings())
    state.apply(decided(1, wanted=4), 1)
    state.apply(decided(1, wanted=7), 2)

    assert (state.scaling.number, state.scaling.wanted) == (1, 4)


def test_a_decision_that_was_lost_is_numbered_over_all_the_same() -> None:
    state = State(PoolSettings())
    state.apply(ScaleApplied(at=1.0, current=3, wanted=3, detail="", number=2, scaler="s"), 1)
    state.apply(decided(state.scaling.highest_number + 1, wanted=3), 2)
    state.apply(ScaleApplied(at=2.0, current=3, wanted=3, detail="", number=state.scaling.number, scaler="s"), 3)

    assert state.scaling.is_applied


@pytest.mark.parametrize("ahead", [86_400.0, 10.0])
def test_a_decision_that_a_wrong_clock_dated_ahead_holds_nobody_back(ahead: float) -> None:
    limits, scaling = Limits(pause_up_s=30.0, pause_down_s=60.0), Scaling()
    scaling.decide(decided(1, wanted=2, at=ahead, current=1))

    assert limited(ScaleTarget(4, ""), scaling, 0.0, limits) == ScaleTarget(4, "")


def test_a_first_decision_keeps_those_that_run_and_have_not_joined_again() -> None:
    """The log was lost: their workers look at it every few seconds."""
    decider = Decider(policy=scaling_policy("manual"), limits=Limits(highest=6), scaler="s")
    state = fleet(a="ready")

    assert [first.wanted for absent in (0, 3, 9) if (first := decider.decide(state, 0.0, absent=absent))] == [1, 4, 6]


@pytest.mark.parametrize("policy", [SloAttainment(), TargetUtilisation(prefill=0.1)])
def test_a_hung_instance_that_nobody_replaces_does_not_keep_a_pool_from_growing(policy: ScalingPolicy) -> None:
    pool = Pool(policy, engines=4)
    pool.state.apply(decided(1, wanted=4, at=-100.0, current=4))
    pool.state.apply(reported("e4", 0, [], serving=False))
    decider = Decider(policy=policy, limits=Limits(highest=20, step_up=20), scaler="s")
    pool.serve(40, every=0.5, late=9.0)

    assert decider.decide(pool.state, pool.now) is None, "it may come back"
    grown = decider.decide(pool.state, pool.now, unreplaced=1)
    assert grown is not None
    assert grown.wanted > 4
    assert grown.reason.endswith("; 1 more take no requests")

    pool.state.apply(joined("e5"))
    pool.state.apply(reported("e5", 0, []))
    assert decider.decide(pool.state, pool.now, unreplaced=1) == decider.decide(pool.state, pool.now), "4 serve"


@pytest.mark.parametrize("policy", [SloAttainment(calm_s=60.0), scaling_policy("manual")])
def test_a_hung_instance_that_nobody_replaces_counts_beside_those_that_are_wanted(policy: ScalingPolicy) -> None:
    pool = Pool(policy, engines=4)
    pool.state.apply(decided(1, wanted=4, at=-100.0, current=4))
    pool.state.apply(reported("e4", 0, [], serving=False))
    decider = Decider(policy=policy, limits=Limits(highest=20, pause_down_s=0.0), scaler="s")
    pool.serve(10, every=2.0)
    soon = decider.decide(pool.state, pool.now, unreplaced=1)
    pool.serve(70, every=2.0)
    calm = decider.decide(pool.state, pool.now, unreplaced=1)
    pool.state.apply(joined("e5"))
    pool.state.apply(reported("e5", 0, []))
    replaced = decider.decide(pool.state, pool.now, unreplaced=1)

    fewer = [3, 3] if isinstance(policy, SloAttainment) else [None, None]
    assert soon is None
    assert [d and d.wanted for d in (calm, replaced)] == fewer, "as without it, and as if somebody had started another"


# The steps


def fleet(roles: Mapping[str, Role] = {}, **status: str) -> State:
    """Instances by name: ready, new (joined, not heard of), leaving, drained by a person, down, suspected, or misfit (of
    another model)."""
    state = State(PoolSettings())
    for name, how in status.items():
        state.apply(joined(name, role=roles.get(name, "both"), model="other" if how == "misfit" else "m"))
        if how != "new":
            state.apply(reported(name, 0, [], serving=how != "down"))
        if how == "suspected":
            state.fleet.suspect(InstanceId(name))
        if how in ("leaving", "drained"):
            state.apply(InstanceDraining(at=0.0, instance=InstanceId(name), epoch=Epoch(1), leaving=how == "leaving"))
    return state


def steps(
    state: State,
    wanted: int,
    provided: str,
    *,
    idle: bool = True,
    old: str = "",
    absent: float = 1000.0,
    start_seconds_max: float = 600.0,
    only_last: bool = False,
    unix_now: float = 0.0,
    highest: int = 8,
    roles: RoleSizes = NOT_SIZED,
) -> list[object]:
    """`only_last`: can be stopped, as of a StatefulSet."""
    running = [ProvidedInstance(InstanceId(name), 1000.0 if name in old.split() else 1.0) for name in provided.split()]
    count = pool_status(
        state,
        running,
        start_seconds_max=WallSeconds(start_seconds_max),
        out_seconds=lambda _: WallSeconds(absent),
        unix_now=unix_now,
    )

    def may_stop(_instance: Instance) -> str:
        return "it is idle" if idle else ""

    def stoppable(names: list[InstanceId]) -> list[InstanceId]:
        return names[-1:] if only_last else names

    return list(
        next_steps(state, count, wanted=wanted, stoppable=stoppable, may_stop=may_stop, highest=highest, roles=roles)
    )


def test_what_is_missing_is_started_once_however_often_it_is_looked_at() -> None:
    assert steps(fleet(a="ready"), 3, "a") == [Grow(total=3, missing=2)]
    assert steps(fleet(a="ready"), 3, "a b c") == []  # two are coming
    assert steps(fleet(a="ready", b="new"), 2, "a b") == []


def test_one_leaves_at_a_time_and_is_stopped_when_it_is_idle() -> None:
    assert steps(fleet(a="ready", b="ready", c="ready"), 1, "a b c") == [Drain(InstanceId("a"))]
    assert steps(fleet(a="leaving", b="ready", c="ready"), 1, "a b c", idle=False) == []
    assert steps(fleet(a="leaving", b="ready", c="ready"), 1, "a b c") == [Stop(InstanceId("a"), "it is idle")]


def test_those_that_start_are_stopped_before_one_that_serves() -> None:
    two = fleet(a="ready", b="ready")

    assert steps(two, 2, "a b c d") == [Stop(InstanceId(name), NOT_NEEDED) for name in "cd"]
    assert steps(two, 1, "a b c") == [Stop(InstanceId("c"), NOT_NEEDED)]
    assert steps(two, 2, "a b c d", only_last=True) == [Stop(InstanceId("d"), NOT_NEEDED)]
    assert steps(fleet(a="ready", c="ready"), 2, "a b c", only_last=True) == [], "b cannot be stopped"
    assert steps(fleet(), 0, "a", old="") == [Stop(InstanceId("a"), NOT_NEEDED)]


def test_those_that_come_again_are_not_stopped_and_nobody_drains_for_them() -> None:
    """Their worker is away for a while, or the log has lost their join: they may serve."""
    left = fleet(a="ready", b="ready", c="ready")
    left.apply(InstanceLeft(at=1.0, instance=InstanceId("c"), epoch=Epoch(1), reason="not heard of"))

    assert steps(left, 2, "a b c") == []
    assert steps(left, 1, "a b c") == [Drain(InstanceId("a"))]
    assert steps(fleet(a="ready", b="ready"), 2, "a b c", old="a b c", absent=50.0) == []


def test_a_suspected_instance_leaves_before_one_that_answers() -> None:
    assert steps(fleet(a="ready", b="ready", c="suspected"), 2, "a b c") == [Drain(InstanceId("c"))]


def test_who_leaves_is_taken_back_before_another_is_started() -> None:
    assert steps(fleet(a="leaving", b="ready"), 2, "a b") == [Undrain(InstanceId("a"))]
    assert steps(fleet(a="leaving", b="ready"), 3, "a b") == [Undrain(InstanceId("a")), Grow(total=3, missing=1)]


def test_who_alone_prefills_or_decodes_stays_unless_the_pool_is_to_be_empty() -> None:
    roles: dict[str, Role] = {"a": "prefill", "b": "prefill", "c": "decode"}
    pair = fleet({"a": "prefill", "c": "decode"}, a="ready", c="ready")

    assert steps(fleet(roles, a="ready", b="ready", c="ready"), 2, "a b c") == [Drain(InstanceId("a"))]
    assert steps(fleet(roles, a="new", b="ready", c="ready"), 1, "b c") == []
    assert steps(pair, 1, "a c") == []
    assert steps(pair, 0, "a c") == [Drain(InstanceId("a"))]
    assert steps(fleet({"a": "prefill"}, a="ready", c="ready"), 1, "a c") == [Drain(InstanceId("a"))]


@pytest.mark.parametrize("how", ["new", "suspected", "down"])
def test_who_alone_prefills_stays_while_it_takes_no_requests(how: str) -> None:
    """It left as a useless one, and the pool had instances that decode alone (torture seed 6000139)."""
    roles: dict[str, Role] = {"a": "prefill", "b": "decode", "c": "decode"}

    assert steps(fleet(roles, a=how, b="ready", c="ready"), 2, "a b c") == [Drain(InstanceId("b"))]
    assert steps(fleet(roles, a=how, b="ready", c="ready"), 2, "a") == []
    assert steps(fleet({"a": "prefill"}, a=how, b="ready", c="ready"), 2, "a b c") == [Drain(InstanceId("a"))]


def test_what_a_person_drained_is_replaced_and_never_stopped() -> None:
    assert steps(fleet(a="drained", b="ready"), 2, "a b") == [Grow(total=3, missing=1)]
    assert steps(fleet(a="drained", b="ready"), 1, "a b") == []


def test_an_engine_that_never_answers_is_stopped_and_started_again() -> None:
    assert steps(fleet(a="ready"), 2, "a b", old="b") == [
        Stop(InstanceId("b"), "it has not joined in time"),
        Grow(total=2, missing=1),
    ]


@pytest.mark.parametrize("how", ["down", "misfit"])
def test_an_instance_that_takes_no_requests_for_as_long_as_a_start_may_take_is_replaced(how: str) -> None:
    state = fleet(a="ready", b="ready", c=how)

    assert steps(state, 3, "a b c", old="a b c") == [Stop(InstanceId("c"), HUNG), Grow(total=3, missing=1)]
    assert steps(state, 2, "a b c", old="a b c") == [Stop(InstanceId("c"), HUNG)]
    assert steps(state, 3, "a c b", old="a b c", only_last=True) == [Grow(total=4, missing=1)]
    assert steps(state, 3, "a b c", old="a b c", absent=599.0) == []


def test_a_hung_instance_that_cannot_be_stopped_has_no_role() -> None:
    """Its replacement came with the role that a split pool has enough of."""
    state = State(PoolSettings())
    for name, role in {"a": "prefill", "b": "decode", "c": "decode", "d": "prefill"}.items():
        state.apply(joined(name, role=role, role_switching=True))
        state.apply(reported(name, 0, [], serving=name != "b"))

    found = steps(state, 3, "a b c d", old="a b c d", only_last=True, roles=RoleSizes(1, 2))

    assert found == [Switch(InstanceId("a"), "decode")]


def test_an_instance_that_is_silent_or_drained_by_a_person_or_has_requests_does_not_hang() -> None:
    drained = fleet(a="ready", b="down")
    drained.apply(InstanceDraining(at=0.0, instance=InstanceId("b"), epoch=Epoch(1)))
    leader = leader_of(("b",), policy_set(routing="least_loaded"))
    leader.route(route("r1", [1]), 0.0)
    for event in (reported("b", 0, [], serving=False), joined("a"), reported("a", 0, [])):
        leader.state.apply(event)

    assert steps(fleet(a="ready", b="suspected"), 2, "a b", old="a b") == []
    assert steps(drained, 1, "a b", old="a b") == []
    assert steps(leader.state, 2, "a b", old="a b") == []


def test_a_start_that_hangs_under_a_name_that_was_used_before_is_replaced() -> None:
    state = fleet(a="ready")
    state.apply(InstanceLeft(at=1.0, instance=InstanceId("a"), epoch=Epoch(1), reason="stopped"))

    assert steps(state, 1, "a", old="a", unix_now=1e9) == [Stop(InstanceId("a"), NOT_JOINED), Grow(total=1, missing=1)]
    assert steps(state, 0, "a", unix_now=1e9) == [Stop(InstanceId("a"), NOT_NEEDED)]


def test_engines_that_do_not_join_and_cannot_be_stopped_are_replaced_up_to_a_bound() -> None:
    running, found = ["n0"], list[object]()
    for _ in range(10):
        found = steps(fleet(), 4, " ".join(running), old=" ".join(running), only_last=True, highest=4)
        for step in found:
            if isinstance(step, Stop):
                running.remove(step.instance)
            elif isinstance(step, Grow):
                running += [f"n{len(running) + number}" for number in range(step.total - len(running))]

    assert len(running) == 6
    assert (
        Report(
            "6 engines run and have not joined, or hang (n0, n1, n2, ...), so no more than 6 are started: see their logs"
        )
        in found
    )
    drained = fleet(a="drained", b="drained", c="drained", d="drained")
    assert steps(drained, 4, "a b c d", highest=4) == [Grow(total=8, missing=4)]


def test_an_engine_whose_worker_is_away_for_a_while_is_neither_stopped_nor_replaced() -> None:
    """Its worker restarts, or has to join again since the log was lost."""
    assert steps(fleet(a="ready"), 2, "a b", old="a b", absent=50.0) == []
    assert steps(fleet(), 2, "a b", old="a b", absent=50.0) == []


def test_engines_whose_only_worker_is_away_are_not_stopped_however_long_it_is() -> None:
    state = fleet(a="ready", b="ready")
    for name in "ab":
        state.apply(InstanceLeft(at=1.0, instance=InstanceId(name), epoch=Epoch(1), reason="not heard of"))

    assert steps(state, 2, "a b", old="a b", absent=1e9) == []
    assert steps(fleet(), 2, "a b", old="a b") == [
        *(Stop(InstanceId(name), "it has not joined in time") for name in "ab"),
        Grow(total=2, missing=2),
    ], "none ever joined"


def test_an_engine_that_serves_requests_is_not_stopped_because_its_worker_is_away() -> None:
    leader = leader_of(("b",), policy_set(routing="least_loaded"))
    leader.route(route("r1", [1]), 0.0)
    state = leader.state
    for event in (joined("a"), reported("a", 0, [])):
        state.apply(event)
    state.apply(InstanceLeft(at=1.0, instance=InstanceId("b"), epoch=Epoch(1), reason="not heard of"))
    busy = steps(state, 2, "a b", old="b")
    state.apply(finished("r1", "b", at=2.0))

    assert busy == []
    assert Stop(InstanceId("b"), "it has not joined in time") in steps(state, 2, "a b", old="b"), "its stream has ended"


def test_an_absent_engine_has_as_long_as_one_that_starts() -> None:
    assert steps(fleet(a="ready"), 2, "a b", old="b", absent=599.0) == []
    assert steps(fleet(a="ready"), 2, "a b", old="b", absent=59.0, start_seconds_max=5.0) == []
    assert steps(fleet(a="ready"), 2, "a b", old="b", absent=61.0, start_seconds_max=5.0) != []


def test_an_engine_that_cannot_be_stopped_now_is_replaced_beside_it() -> None:
    """A StatefulSet gives up its last pod only."""
    assert steps(fleet(b="ready"), 2, "a b", old="a", only_last=True) == [Grow(total=3, missing=1)]
    assert steps(fleet(b="ready", c="ready"), 2, "a b c", old="a", only_last=True) == []
    assert steps(fleet(b="ready", c="ready"), 1, "a b c", old="a", only_last=True) == [Drain(InstanceId("c"))]
    assert steps(fleet(b="ready"), 1, "b x y", old="x y", only_last=True) == [
        Stop(InstanceId("y"), "it has not joined in time")
    ]


def test_what_others_run_is_left_alone() -> None:
    assert steps(fleet(a="ready", b="ready"), 1, "") == []

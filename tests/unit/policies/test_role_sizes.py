"""How many instances of a split pool prefill and decode: the split, when it changes, and which instances it takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.decisions import RequestHandedOver
from pointsman.contracts.fleet import DecodeCost
from pointsman.contracts.requests import PrefillFinished
from pointsman.policies.policy_set import scaling_policy
from pointsman.policies.scaling import Limits, ScaleTarget
from pointsman.policies.scaling.decider import Decider
from pointsman.policies.scaling.roles import (
    NOT_SIZED,
    RoleDemand,
    RoleSizes,
    answers_within,
    best_split,
    better_split,
    in_proportion,
    parse_split,
    role_switches,
)
from pointsman.primitives import InstanceId, RequestId
from pointsman.state.state import PoolSettings, State
from tests.support.events import arrived, finished, joined, reported

COST = DecodeCost(step_s=0.02, per_request_s=0.001)
demands = st.builds(RoleDemand, st.floats(0, 20), st.floats(0, 20))


@given(demands, st.integers(2, 12), st.integers(0, 2), st.integers(0, 2))
def test_no_other_split_keeps_the_busier_role_less_busy(
    demand: RoleDemand, total: int, fixed_prefill: int, fixed_decode: int
) -> None:
    fixed = RoleSizes(min(fixed_prefill, total - 1), min(fixed_decode, total - 1))
    found = best_split(demand, total, fixed)
    possible = [
        (prefill, total - prefill)
        for prefill in range(1, total)
        if prefill >= fixed.prefill and total - prefill >= fixed.decode
    ]

    assert ((found.prefill, found.decode) in possible) or (not possible and found == NOT_SIZED)
    if possible:
        busiest = max(demand.prefill / found.prefill, demand.decode / found.decode)
        assert all(max(demand.prefill / p, demand.decode / d) >= busiest - 1e-9 for p, d in possible)


@given(demands, st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
def test_a_split_changes_only_when_too_busy_and_then_not_back(
    demand: RoleDemand, prefill: int, decode: int, step: int
) -> None:
    now = RoleSizes(prefill, decode)
    found = better_split(demand, now, NOT_SIZED, step=step)
    busy = max(demand.prefill / prefill, demand.decode / decode)

    assert found.total == now.total
    assert abs(found.prefill - prefill) <= step
    assert found == now or busy > 1
    if found != now:  # the same load does not turn it back, however often it is judged
        for _ in range(8):
            following = better_split(demand, found, NOT_SIZED, step=step)
            assert (following.prefill - found.prefill) * (found.prefill - prefill) >= 0
            found = following


def test_a_little_better_is_not_enough() -> None:
    assert better_split(RoleDemand(4.4, 3.0), RoleSizes(4, 4), NOT_SIZED, step=2) == RoleSizes(4, 4)
    assert better_split(RoleDemand(6.0, 2.0), RoleSizes(4, 4), NOT_SIZED, step=2) == RoleSizes(6, 2)
    assert better_split(RoleDemand(3.9, 0.1), RoleSizes(4, 4), NOT_SIZED, step=2) == RoleSizes(4, 4)


@pytest.mark.parametrize(
    ("slo", "context", "expected"), [(0.1, 0, 80.0), (0.021, 0, 1.0), (0.01, 0, -10.0), (10.0, 0, 256.0)]
)
def test_answers_at_once_fill_the_objective_and_no_more_than_an_engine_runs(
    slo: float, context: int, expected: float
) -> None:
    assert answers_within(COST, slo, context) == pytest.approx(expected)


def test_a_size_alone_keeps_the_proportion_and_both_roles() -> None:
    assert in_proportion(RoleSizes(2, 6), 4) == RoleSizes(1, 3)
    assert in_proportion(RoleSizes(1, 7), 3) == RoleSizes(1, 2)
    assert in_proportion(RoleSizes(7, 1), 2) == RoleSizes(1, 1)
    assert in_proportion(RoleSizes(7, 1), 1) == NOT_SIZED
    assert in_proportion(NOT_SIZED, 4) == NOT_SIZED


@pytest.mark.parametrize("text", ["2", "2+", "+2", "0+2", "2+0", "a+b", "2+2+2", "-1+2"])
def test_what_is_no_split_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"P\+D"):
        parse_split(text)


# --- Which instances ---


def pool(roles: str, *, switching: bool = True, policy: str = "manual", **settings: float) -> tuple[State, Decider]:
    """`roles`: a letter for each instance: p, d, or b for both."""
    chosen = scaling_policy(policy, dict(settings))
    state = State(PoolSettings(), chosen.trackers())
    names = {"p": "prefill", "d": "decode", "b": "both"}
    for number, letter in enumerate(roles):
        name = f"e{number}"
        state.apply(joined(name, role=names[letter], role_switching=switching, decode=COST, kv_capacity_tokens=100_000))
        state.apply(reported(name, 0, []))
    limits = Limits(lowest=2, highest=len(roles), pause_down_s=0.0)
    return state, Decider(policy=chosen, limits=limits, scaler="s")


def test_as_many_switch_as_are_missing_and_one_keeps_the_role() -> None:
    state, _ = pool("pppd")

    assert [(s.instance, s.role) for s in role_switches(state, RoleSizes(2, 2))] == [("e0", "decode")]
    assert len(role_switches(state, RoleSizes(1, 3))) == 2
    assert role_switches(state, RoleSizes(3, 1)) == []
    assert role_switches(state, NOT_SIZED) == []
    assert role_switches(pool("pd")[0], RoleSizes(2, 0)) == []


def test_instances_of_both_roles_get_the_one_that_lacks_most() -> None:
    state, _ = pool("bbbb")

    switches = role_switches(state, RoleSizes(1, 3))

    assert sorted(switch.role for switch in switches) == ["decode", "decode", "decode", "prefill"]


def test_a_switch_that_is_no_longer_wanted_is_undone_first() -> None:
    state, _ = pool("ppdd")
    state.fleet.drain(InstanceId("e1"), draining=True, becomes="decode")

    [back] = role_switches(state, RoleSizes(2, 2))

    assert (back.instance, back.undo) == ("e1", True)


def test_those_that_cannot_switch_are_left_alone() -> None:
    state, decider = pool("ppd", switching=False)

    assert role_switches(state, RoleSizes(1, 2)) == []
    first = decider.decide(state, 1.0)
    assert first is not None
    assert (first.prefill, first.decode) == (0, 0)


# --- The policies ---


def decoding(state: State, answers: int, at: float) -> None:
    """So many answers are generated, spread over e2 and e3, all prefilled by e0."""
    for number in range(answers):
        request, to = RequestId(f"r{at:g}-{number}"), InstanceId(f"e{2 + number % 2}")
        state.apply(arrived(request, at=at, max_output_tokens=100, slo_tpot=0.1))
        state.apply(RequestHandedOver(at=at, request=request, source=InstanceId("e0"), instance=to, prefill=0.1))
        state.apply(PrefillFinished(at=at + 0.1, request=request, instance=to, ttft=0.1, prefill=0.1))


def answered(state: State, at: float, *, tbt: float) -> None:
    for request in list(state.workload.requests.values()):
        times = {"e2e": 5.0, "ttft": 0.1, "tpot": tbt / 2, "tbt_p90": tbt}
        state.apply(finished(request.id, request.instance, at=at, prompt_tokens=100, completion_tokens=50, **times))


def decided(state: State, decider: Decider, at: float) -> tuple[int, int, int] | None:
    found = decider.decide(state, at)
    if found is None:
        return None
    state.apply(found, state.sequence + 1)
    return found.wanted, found.prefill, found.decode


@pytest.mark.usefixtures("plain_sums")
@pytest.mark.parametrize("policy", ["slo_attainment", "target_utilisation"])
def test_more_answers_than_those_that_decode_can_serve_in_time_take_an_instance_from_prefill(policy: str) -> None:
    state, decider = pool("ppdd", policy=policy)
    assert decided(state, decider, 1.0) == (4, 2, 2)

    decoding(state, 200, 60.0)  # 80 an instance are within the objective

    assert decided(state, decider, 61.0) == (4, 1, 3)
    assert decided(state, decider, 62.0) is None


def test_few_answers_leave_the_roles_alone() -> None:
    state, decider = pool("ppdd", policy="slo_attainment")
    decider = replace(decider, limits=Limits(lowest=4, highest=4))
    decided(state, decider, 1.0)

    decoding(state, 40, 60.0)

    assert decided(state, decider, 61.0) is None


def test_answers_that_miss_their_objective_grow_the_pool_if_no_other_split_would_help() -> None:
    state, decider = pool("ppdd", policy="slo_attainment")
    decider = replace(decider, limits=Limits(lowest=2, highest=6))
    decided(state, decider, 1.0)
    decoding(state, 40, 60.0)
    answered(state, 62.0, tbt=0.15)  # although the mean gap is 0.075 s

    assert decided(state, decider, 63.0) == (5, 1, 4)


def test_a_pool_with_room_in_both_roles_shrinks_by_one_and_keeps_both() -> None:
    state, decider = pool("ppdd", policy="slo_attainment")
    decider = replace(decider, limits=Limits(lowest=2, highest=4, pause_down_s=0.0))
    decided(state, decider, 1.0)
    sizes = []
    for at in (100.0, 200.0, 300.0, 400.0):
        decoding(state, 30, at)
        answered(state, at + 1, tbt=0.05)
        if (size := decided(state, decider, at + 2)) is not None:
            sizes.append(size)
            name = {4: "e1", 3: "e3"}[size[0] + 1]
            state.fleet.leave(InstanceId(name))

    assert [size[0] for size in sizes] == [3, 2]
    assert sizes[-1] == (2, 1, 1)


def test_the_first_decision_takes_the_roles_as_they_are() -> None:
    state, decider = pool("ppdd")

    first = decider.decide(state, 1.0)

    assert first is not None
    assert (first.wanted, first.prefill, first.decode) == (4, 2, 2)


def test_an_operator_sizes_roles_and_a_size_alone_keeps_the_proportion() -> None:
    state, decider = pool("ppdd")
    first = decider.decide(state, 1.0)
    assert first is not None
    state.apply(first, 1)

    roles = decider.operator_decision(state, 4, asker="", actor="a", now=2.0, roles=RoleSizes(1, 3))
    state.apply(roles, 2)
    fewer = decider.operator_decision(state, 3, asker="", actor="a", now=3.0)

    assert (roles.prefill, roles.decode, roles.by) == (1, 3, "a")
    assert (fewer.wanted, fewer.prefill, fewer.decode) == (3, 1, 2)
    assert decider.decide(state, 100.0) is None  # manual: nothing changes by itself


@pytest.mark.parametrize("lowest", [0, 1])
def test_a_pool_without_requests_sleeps_or_keeps_an_instance_of_each_role(lowest: int) -> None:
    state, decider = pool("ppd", policy="slo_attainment", idle_s=100.0)
    decider = replace(decider, limits=Limits(lowest=lowest, highest=4, pause_down_s=0.0))
    decided(state, decider, 1.0)
    first = decided(state, decider, 200.0)
    state.fleet.leave(InstanceId("e1"))
    sizes = [decided(state, decider, at) for at in (400.0, 600.0)]

    assert first == (2, 1, 1)
    assert sizes == [(0, 1, 1) if lowest == 0 else None, None], "the roles for when it wakes"


def test_a_split_pool_that_an_earlier_release_made_too_small_gets_both_roles_again() -> None:
    state, decider = pool("pd", policy="slo_attainment")
    state.apply(decider.decision(state, ScaleTarget(1, "idle"), 1.0), 1)

    assert decided(state, decider, 2.0) == (2, 1, 1)
    assert decided(state, decider, 3.0) is None


def test_a_pool_that_sleeps_wakes_with_both_of_its_roles() -> None:
    state, decider = pool("", policy="slo_attainment")
    decider = replace(decider, limits=Limits(lowest=0, highest=4), first_roles=RoleSizes(1, 3))
    state.apply(decider.decision(state, ScaleTarget(0, "idle"), 1.0), 1)
    assert decided(state, decider, 50.0) is None

    decoding(state, 1, 60.0)

    assert decided(state, decider, 61.0) == (2, 1, 1)


@pytest.mark.parametrize("first_roles", [NOT_SIZED, RoleSizes(1, 1)])
def test_a_pool_that_slept_has_its_proportion_of_roles_again(first_roles: RoleSizes) -> None:
    state, decider = pool("bbbb")
    decider = replace(decider, limits=Limits(lowest=0, highest=8), first_roles=first_roles)

    def asked(wanted: int, now: float, roles: RoleSizes = NOT_SIZED) -> tuple[int, int, int]:
        decision = decider.operator_decision(state, wanted, asker="", actor="a", now=now, roles=roles)
        state.apply(decision, int(now))
        return decision.wanted, decision.prefill, decision.decode

    asked(4, 1.0, RoleSizes(3, 1))
    asleep = asked(0, 2.0)
    again = decider.repeated(state, 3.0)
    for instance in state.fleet.instances:
        state.fleet.leave(instance.id)
    stays, refused = decider.decide(state, 100.0), decider.size_refusal(state, 1)

    assert asleep == (0, 3, 1)
    assert again is not None
    assert (again.wanted, again.prefill, again.decode) == asleep, "also where the log has dropped the first"
    assert stays is None
    assert "ask for 2 or more" in refused
    assert asked(8, 101.0) == (8, 6, 2)


def test_a_size_without_roles_is_split_as_the_pool_began() -> None:
    state, decider = pool("bbbb")
    state.apply(decider.decision(state, ScaleTarget(4, "by an earlier scaler"), 1.0), 1)

    assert decided(state, decider, 2.0) is None
    assert decided(state, replace(decider, first_roles=RoleSizes(1, 3)), 3.0) == (4, 1, 3)


def test_an_operator_cannot_ask_for_one_instance_of_a_split_pool() -> None:
    state, decider = pool("ppdd")
    decider = replace(decider, limits=Limits(lowest=0, highest=4))
    decided(state, decider, 1.0)
    unsplit, _ = pool("bb")

    refusals = [decider.size_refusal(state, wanted) for wanted in (0, 1, 2, 5)]

    assert [bool(refusal) for refusal in refusals] == [False, True, False, True]
    assert "ask for 2 or more" in refusals[1]
    assert decider.size_refusal(unsplit, 1) == ""


def test_a_split_pool_whose_new_instances_have_not_come_yet_does_not_shrink() -> None:
    state, decider = pool("ppdd", policy="target_utilisation")
    decided(state, decider, 1.0)
    state.fleet.leave(InstanceId("e1"))

    assert decided(state, decider, 100.0) is None


def test_the_decision_is_repeated_with_its_roles() -> None:
    state, decider = pool("pddd")
    first = decider.decide(state, 1.0)
    assert first is not None
    state.apply(first, 1)

    again = decider.repeated(state, 2.0)

    assert again is not None
    assert (again.prefill, again.decode, again.number) == (1, 3, 2)
    assert replace(decider, first_roles=RoleSizes(3, 1)).decide(State(PoolSettings()), 1.0) is not None

"""What each routing policy prefers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.decisions import RequestRejected
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.hash_ring import candidate_pair
from pointsman.policies.policy_set import UnknownPolicyError, policy_set
from pointsman.policies.routing import ROUTING_POLICIES
from pointsman.primitives import BlockKey, InstanceId
from tests.support.events import finished, first_token, route, stored
from tests.support.examples import examples
from tests.support.leading import leader_of, place, prompt

POLICIES = sorted(ROUTING_POLICIES)
FLEET = ("a", "b", "c", "d")


def pool(policy: str = "dualmap", *, instances: tuple[str, ...] = FLEET, admission: str = "none") -> Dispatcher:
    return leader_of(instances, policy_set(routing=policy, admission=admission))


@pytest.mark.parametrize("policy", ["dualmap", "min_ttft", "sticky_least_loaded"])
def test_a_prompt_goes_to_where_its_prefix_is_held(policy: str) -> None:
    dispatcher = pool(policy)
    home = place(dispatcher, "first", prompt(1)).instance
    dispatcher.state.apply(stored(home, 1, prompt(1)))
    dispatcher.state.apply(first_token("first", home, at=1.0))
    dispatcher.state.apply(finished("first", home, at=1.1))

    placed = place(dispatcher, "second", [*prompt(1), 1000, 1001], now=10.0)

    assert placed.instance == home
    assert placed.hit_blocks == 16


@pytest.mark.parametrize("policy", ["dualmap", "sticky_least_loaded"])
def test_a_burst_of_equal_prompts_stays_together_before_any_cache_event(policy: str) -> None:
    dispatcher = pool(policy)

    homes = {place(dispatcher, f"r{n}", prompt(1)).instance for n in range(10)}

    assert len(homes) == 1


def test_round_robin_takes_turns() -> None:
    dispatcher = pool("round_robin")

    assert [place(dispatcher, f"r{n}", prompt(1)).instance for n in range(5)] == ["a", "b", "c", "d", "a"]


def test_least_loaded_goes_where_the_fewest_tokens_wait() -> None:
    dispatcher = pool("least_loaded", instances=("a", "b"))
    place(dispatcher, "long", prompt(1, 40))

    assert [place(dispatcher, f"r{n}", prompt(100 * n, 10)).instance for n in range(1, 4)] == ["b", "b", "b"]


def test_sticky_least_loaded_leaves_a_holder_that_is_much_busier() -> None:
    dispatcher = pool("sticky_least_loaded", instances=("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(1)))
    stays = place(dispatcher, "stays", prompt(1))
    for n in range(5):
        place(dispatcher, f"load{n}", [*prompt(1), *prompt(10_000 * (n + 1), 60)])

    assert stays.instance == "a"
    assert place(dispatcher, "leaves", prompt(1)).instance == "b"


def test_min_ttft_takes_an_idle_instance_once_waiting_costs_more_than_computing() -> None:
    dispatcher = pool("min_ttft", instances=("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(1)))
    place(dispatcher, "busy", [*prompt(1), *prompt(500, 40)])

    placed = place(dispatcher, "r", prompt(1))

    assert placed.instance == "b"
    assert [candidate.instance for candidate in placed.candidates] == ["a", "b"]


def test_dualmap_leaves_the_longer_hit_only_when_it_would_miss_the_objective() -> None:
    dispatcher = pool("dualmap")
    home = place(dispatcher, "first", prompt(1)).instance
    near = place(dispatcher, "near", prompt(1), slo_ttft=5.0)
    late = place(dispatcher, "late", prompt(1), slo_ttft=1.0265)

    assert near.instance == home
    assert late.instance != home
    assert late.reason == f"{home} holds more but would miss the SLO"
    assert {candidate.instance for candidate in late.candidates} == {home, late.instance}


def test_dualmap_spreads_a_prefix_that_draws_more_than_its_share() -> None:
    dispatcher = pool("dualmap")

    homes = [place(dispatcher, f"r{n}", [*prompt(1, 8), *prompt(1000 * (n + 1), 8)]).instance for n in range(200)]

    assert len(set(homes[:10])) <= 2
    assert set(homes[100:]) == set(FLEET)


def test_equal_choices_go_to_who_served_the_session_last() -> None:
    dispatcher = pool("least_loaded")
    place(dispatcher, "other", prompt(900, 1))
    served = place(dispatcher, "first", prompt(1, 1), session="s").instance
    for request, instance in (("other", "a"), ("first", served)):
        dispatcher.state.apply(finished(request, instance, at=1.0))

    assert served == "b"
    assert place(dispatcher, "second", prompt(50, 1), session="s").instance == served


def test_a_hard_limit_refuses_what_cannot_meet_its_objective_with_a_reason() -> None:
    limited = policy_set(routing="dualmap", admission="predicted_ttft", settings={"admission.hard_limit": True})
    dispatcher = leader_of(FLEET, limited)

    events = dispatcher.route(route("long", prompt(1, 200)), now=0.0)
    rejected = events[-1]

    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "slo_unreachable"
    assert "12.80 s" in rejected.detail
    assert dispatcher.state.workload.requests == {}


def test_an_empty_fleet_refuses() -> None:
    events = pool("dualmap", instances=()).route(route("r", prompt(1)), now=0.0)

    assert isinstance(events[-1], RequestRejected)
    assert events[-1].reason == "no_instance"


@pytest.mark.parametrize("name", sorted({*POLICIES} - {"pointsman"}))  # which says why for each decision
def test_a_policy_tells_explain_how_it_chooses(name: str) -> None:
    assert ROUTING_POLICIES[name].rule


def test_an_unknown_policy_or_setting_is_named_with_those_there_are() -> None:
    with pytest.raises(UnknownPolicyError, match=f"there is no routing policy best; there are: {', '.join(POLICIES)}$"):
        policy_set(routing="best")
    with pytest.raises(UnknownPolicyError, match="no setting of dualmap speed; there are: ablation, both_over"):
        policy_set(routing="dualmap", settings={"speed": 1})
    with pytest.raises(UnknownPolicyError, match="both_over must be affine or least_loaded"):
        policy_set(routing="dualmap", settings={"both_over": "random"})


fleets = st.sets(st.integers(0, 40), min_size=2, max_size=16)


@examples(60)
@given(fleets, st.integers(41, 60))
def test_candidate_pairs_are_distinct_and_an_instance_that_joins_moves_only_its_share(
    numbers: set[int], newcomer: int
) -> None:
    before = tuple(sorted(InstanceId(f"engine-{n}") for n in numbers))
    after = tuple(sorted((*before, InstanceId(f"engine-{newcomer}"))))
    prefixes = [BlockKey(n * 0x9E3779B97F4A7C15 % 2**64) for n in range(400)]

    pairs = [(candidate_pair(before, p), candidate_pair(after, p)) for p in prefixes]

    assert all(len(set(old)) == 2 for old, _ in pairs)
    moved = [new for old, new in pairs if set(new) != set(old)]
    assert all(InstanceId(f"engine-{newcomer}") in new for new in moved), "only the newcomer takes over prefixes"
    assert len(moved) / len(pairs) <= 2 / len(after) * 1.6 + 0.05

"""What the baselines of the papers prefer, and that no policy at all ever places where nobody serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pointsman.contracts.decisions import RequestPlaced
from pointsman.contracts.fleet import InstanceDraining, InstanceLeft
from pointsman.contracts.reasons import CancelCause
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.routing import ROUTING_POLICIES, RoutingPolicy
from pointsman.policies.routing.approximate_token_load import ApproximateTokenLoad
from pointsman.policies.routing.cache_affinity import CacheAffinity
from pointsman.policies.routing.d2lpm import D2Lpm
from pointsman.policies.routing.dynamo_cost import DynamoCost
from pointsman.policies.routing.lbgr import Lbgr
from pointsman.policies.routing.power_of_two import PowerOfTwo
from pointsman.policies.routing.preble import Preble
from pointsman.policies.routing.random_choice import RandomChoice
from pointsman.primitives import BlockKey, Epoch, InstanceId, RequestId, Tenant, Term
from pointsman.state.state import PoolSettings, State
from pointsman.state.trackers.active_blocks import ActiveBlocks
from pointsman.state.trackers.decayed_load import DecayedLoad
from pointsman.state.trackers.deficits import Deficits
from pointsman.state.trackers.residuals import LeastSquares
from pointsman.state.trackers.windowed_load import WindowedLoad
from tests.support.events import BLOCK, finished, first_token, joined, reported, route, stored
from tests.support.examples import examples
from tests.support.leading import leader_of, place, prompt

POLICIES = [*(policy() for policy in ROUTING_POLICIES.values()), DynamoCost(temperature=0.5)]
FLEET = ("a", "b", "c", "d")
A, B = InstanceId("a"), InstanceId("b")


def pool(policy: RoutingPolicy, *, instances: tuple[str, ...] = FLEET) -> Dispatcher:
    policies = PolicySet(routing=policy, admission=AdmitAll(), ordering=FirstComeFirstServed())
    return leader_of(instances, policies)


def pool_with_all_memories() -> Dispatcher:
    policies = PolicySet(routing=RandomChoice(), admission=AdmitAll(), ordering=FirstComeFirstServed())
    state = State(PoolSettings(), [memory for policy in POLICIES for memory in policy.trackers()])
    for instance in FLEET:
        state.apply(joined(instance))
    return Dispatcher(state, policies, term=Term(1))


def answer(dispatcher: Dispatcher, request: str, instance: str, *, at: float) -> None:
    dispatcher.state.apply(first_token(request, instance, at=at))
    dispatcher.state.apply(finished(request, instance, at=at))


def story(policy: RoutingPolicy) -> list[RequestPlaced]:
    """Prompts that share prefixes, some of them answered in between."""
    dispatcher = pool(policy)
    placements = []
    for number in range(40):
        keys = [*prompt(1 + number % 5 * 1000, 8), *prompt(10_000 + number * 100, number % 7)]
        placed = place(dispatcher, f"r{number}", keys, now=number * 0.2, tenant=f"t{number % 3}")
        placements.append(placed)
        if number % 3 == 0:
            answer(dispatcher, f"r{number}", placed.instance, at=number * 0.2 + 0.1)
    return placements


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@given(seed=st.integers(0, 10_000), draining=st.sampled_from(FLEET))
@examples(25)
def test_no_policy_places_on_a_draining_a_silent_or_a_failed_instance(
    policy: RoutingPolicy, seed: int, draining: str
) -> None:
    dispatcher = pool(policy)
    silent = FLEET[seed % 4]
    failed = FLEET[(seed + 1) % 4]
    dispatcher.state.apply(InstanceDraining(at=0.0, instance=InstanceId(draining), epoch=Epoch(1)))
    dispatcher.state.apply(reported(silent, 0, [], serving=False))

    for number in range(8):
        placed = place(dispatcher, f"r{number}", prompt(1 + seed * number, number), excluded=[failed])
        assert placed.instance not in {draining, silent, failed}, f"seed {seed}"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_same_history_gives_the_same_decisions(policy: RoutingPolicy) -> None:
    assert story(policy) == story(policy)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_whoever_folds_the_log_would_decide_the_same(policy: RoutingPolicy) -> None:
    leader = pool(policy)
    follower = pool(policy)
    for number in range(20):
        command = route(f"r{number}", prompt(1 + number % 4 * 100, 10), arrived_at=float(number))
        for event in leader.route(command, float(number)):
            follower.state.apply(event)

    successor = Dispatcher(follower.state, follower.policies, term=Term(leader.term + 1))
    decided, rebuilt = (place(dispatcher, "next", prompt(1, 12), now=20.0) for dispatcher in (leader, successor))

    assert replace(decided, stamp=None) == replace(rebuilt, stamp=None)


@given(st.lists(st.tuples(st.sampled_from(["place", "retry", "cancel", "answer", "leave"]), st.integers(0, 9))))
@examples(60)
def test_whatever_happens_nothing_weighs_on_an_instance_once_all_requests_ended(story: list[tuple[str, int]]) -> None:
    dispatcher = pool_with_all_memories()
    state, now, epoch = dispatcher.state, 0.0, 1
    for step, (what, number) in enumerate(story):
        now = step * 0.5
        request = RequestId(f"r{number}")
        known = state.workload.requests.get(request)
        if what == "place":
            dispatcher.route(route(request, prompt(number % 3, 300), arrived_at=now), now)
        elif what == "leave":
            instance, epoch = InstanceId(FLEET[number % 4]), epoch + 1
            state.apply(InstanceLeft(at=now, instance=instance, epoch=state.fleet[instance].epoch, reason="test"))
            state.apply(joined(instance, at=now, epoch=epoch))
        elif known and what == "retry":
            again = route(request, prompt(number % 3, 300), attempt=known.attempt + 1, excluded=[known.instance])
            dispatcher.route(again, now)
        elif known and what == "cancel":
            dispatcher.cancel_any(request, CancelCause.NEVER_ENDED, now)
        elif known:
            answer(dispatcher, request, known.instance, at=now)
    for request in list(state.workload.requests):
        dispatcher.cancel_any(request, CancelCause.NEVER_ENDED, now)

    load, active = state.tracker(DecayedLoad), state.tracker(ActiveBlocks)
    window = state.tracker(WindowedLoad)
    later = now + 1000.0
    home = place(dispatcher, "later", [], now=later).instance
    for instance in set(state.fleet.ready) - {home}:
        assert (load.seconds(instance, later), load.requests(instance)) == (0.0, 0)
        assert active.blocks_with([], [instance]) == {instance: 0}
        assert (window.seconds(instance), window.hit_share(instance)) == (0.0, 0.0)


def test_random_reaches_every_instance_and_another_seed_chooses_otherwise() -> None:
    one, other = (
        [place(dispatcher, f"r{n}", prompt(1)).instance for n in range(60)]
        for dispatcher in (pool(RandomChoice()), pool(RandomChoice(seed=1)))
    )

    assert set(one) == set(FLEET)
    assert one != other


def test_power_of_two_never_takes_the_busiest_and_draws_distinct_instances() -> None:
    dispatcher = pool(PowerOfTwo())
    busiest = place(dispatcher, "long", prompt(1, 400)).instance

    placements = [place(dispatcher, f"r{n}", prompt(1000 + 10 * n, 1)) for n in range(40)]

    assert all(len({candidate.instance for candidate in placed.candidates}) == 2 for placed in placements)
    assert {placed.instance for placed in placements} == set(FLEET) - {busiest}


def test_cache_affinity_keeps_a_prefix_home_however_busy_and_spreads_prompts_without_one() -> None:
    dispatcher = pool(CacheAffinity())

    homes = {place(dispatcher, f"r{n}", [*prompt(1), *prompt(1000 * (n + 1), 40)]).instance for n in range(20)}
    strays = {place(dispatcher, f"s{n}", []).instance for n in range(40)}

    assert len(homes) == 1
    assert strays == set(FLEET)


def test_preble_exploits_a_hit_of_more_than_half_of_the_prompt_and_explores_below() -> None:
    dispatcher = pool(Preble(), instances=("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(1, 10)))
    place(dispatcher, "load", [*prompt(1, 10), *prompt(5000, 8)])

    exploits = place(dispatcher, "exploits", [*prompt(1, 10), *prompt(6000, 8)])
    explores = place(dispatcher, "explores", [*prompt(1, 10), *prompt(7000, 11)])

    assert exploits.instance == "a"
    assert exploits.reason.startswith("exploit")
    assert explores.instance == "b"
    assert explores.reason.startswith("explore")


def test_preble_weighs_finished_work_until_it_leaves_the_window() -> None:
    dispatcher = pool(Preble(window_s=180.0), instances=("a", "b"))
    place(dispatcher, "long", prompt(1, 40))
    answer(dispatcher, "long", "a", at=3.0)

    within = place(dispatcher, "within", prompt(1000, 8), now=100.0)
    answer(dispatcher, "within", within.instance, at=101.0)
    load = dispatcher.state.tracker(WindowedLoad)

    assert within.instance == "b"
    assert (load.seconds(A), load.seconds(B)) == pytest.approx((2.561, 0.513))
    assert place(dispatcher, "after", prompt(2000, 8), now=181.0).instance == "a"


def test_dynamo_cost_keeps_away_from_decoding_blocks_and_counts_shared_ones_once() -> None:
    dispatcher = pool(DynamoCost(), instances=("a", "b"))
    for number in range(3):
        placed = place(dispatcher, f"r{number}", [*prompt(1, 20), 100 + number])
        dispatcher.state.apply(first_token(f"r{number}", placed.instance, at=1.0))
    active = dispatcher.state.tracker(ActiveBlocks)

    assert active.blocks_with([BlockKey(key) for key in prompt(1, 20)], [A, B]) == {A: 23, B: 20}
    assert place(dispatcher, "stranger", prompt(5000, 4), now=2.0).instance == "b"


def test_dynamo_cost_forgets_blocks_when_their_last_request_ends() -> None:
    dispatcher = pool(DynamoCost(), instances=("a",))
    place(dispatcher, "one", prompt(1, 20))
    place(dispatcher, "two", prompt(1, 10))
    answer(dispatcher, "one", "a", at=1.0)
    active = dispatcher.state.tracker(ActiveBlocks)

    assert active.blocks_with([], [A]) == {A: 10}


def test_a_temperature_lets_dearer_instances_have_a_chance() -> None:
    cold, warm = (
        [place(pool(DynamoCost(temperature=t)), f"r{n}", prompt(1)).instance for n in range(60)] for t in (0.0, 5.0)
    )

    assert len(set(cold)) == 1
    assert set(warm) == set(FLEET)


def test_approximate_token_load_sticks_to_holders_until_they_cost_more_than_the_penalty() -> None:
    def placed_with(penalty_s: float, blocks_behind: int) -> str:
        dispatcher = pool(ApproximateTokenLoad(penalty_s=penalty_s), instances=("a", "b"))
        dispatcher.state.apply(stored("a", 1, [*prompt(1, 20), *prompt(500, 80)]))
        place(dispatcher, "busy", [*prompt(1, 20), *prompt(500, 80), *prompt(2000, blocks_behind)])
        return place(dispatcher, "r", prompt(1, 20)).instance

    assert placed_with(penalty_s=1.0, blocks_behind=20) == "a"
    assert placed_with(penalty_s=1.0, blocks_behind=24) == "a"
    assert placed_with(penalty_s=0.1, blocks_behind=24) == "b"


def test_approximate_token_load_ignores_a_hit_below_its_share() -> None:
    dispatcher = pool(ApproximateTokenLoad(), instances=("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(1, 15)))
    place(dispatcher, "busy", [*prompt(1, 15), 100])

    assert place(dispatcher, "r", prompt(1, 20)).instance == "b"


def test_lbgr_learns_to_leave_an_instance_that_is_slower_than_predicted() -> None:
    dispatcher = pool(Lbgr(), instances=("a", "b"))
    chosen = []
    for number in range(30):
        now = number * 60.0
        placed = place(dispatcher, f"r{number}", prompt(1 + number * 100), now=now)
        late = 3.0 if placed.instance == "a" else 0.0
        answer(dispatcher, f"r{number}", placed.instance, at=now + placed.prefill_seconds + late)
        chosen.append(placed.instance)

    assert chosen[0] == "a"
    assert set(chosen[5:]) == {"b"}


def test_lbgr_load_fades_and_is_released_when_a_request_ends() -> None:
    dispatcher = pool(Lbgr(decay_s=5.0), instances=("a",))
    place(dispatcher, "one", prompt(1, 20))
    place(dispatcher, "two", prompt(1000, 40), now=5.0)
    load = dispatcher.state.tracker(DecayedLoad)

    assert load.seconds(A, 5.0) == pytest.approx(2.561 + 1.281 / 2.718281828)
    answer(dispatcher, "two", "a", at=10.0)
    assert load.seconds(A, 10.0) == pytest.approx(1.281 / 2.718281828**2)
    answer(dispatcher, "one", "a", at=11.0)
    assert load.seconds(A, 11.0) == 0.0


@given(st.lists(st.floats(-5, 5), min_size=3, max_size=3))
@examples(30)
def test_least_squares_finds_the_weights_behind_what_it_sees(weights: list[float]) -> None:
    model = LeastSquares(3, forgetting=0.98)
    for number in range(300):
        features = (1.0, number % 7 / 3, number % 5 / 2)
        model.learn(features, sum(w * f for w, f in zip(weights, features, strict=True)))

    assert model.predict((1.0, 1.5, 0.5)) == pytest.approx(weights[0] + 1.5 * weights[1] + 0.5 * weights[2], abs=1e-2)


def test_least_squares_is_not_thrown_by_one_odd_sight_after_a_long_time_of_sameness() -> None:
    model = LeastSquares(2, forgetting=0.9)
    for _ in range(5000):
        model.learn((1.0, 0.0), 1.0)

    model.learn((1.0, 0.01), 2.0)

    assert abs(model.predict((1.0, 1.0))) < 5.0


def test_d2lpm_takes_the_longest_hit_while_the_client_has_tokens_left_there() -> None:
    dispatcher = pool(D2Lpm(quantum_tokens=1500.0), instances=("a", "b"))
    dispatcher.state.apply(stored("a", 1, prompt(1, 10)))

    homes = [
        place(dispatcher, f"r{n}", [*prompt(1, 10), *prompt(1000 * (n + 1), 14)], tenant=Tenant("busy")).instance
        for n in range(3)
    ]
    other = place(dispatcher, "other", [*prompt(1, 10), *prompt(1000, 14)], tenant=Tenant("quiet")).instance

    assert homes == ["a", "a", "b"]
    assert other == "a"


def test_d2lpm_sends_equal_hits_to_the_least_loaded_so_that_clients_do_not_move_in_step() -> None:
    dispatcher = pool(D2Lpm(quantum_tokens=100_000.0), instances=("a", "b", "c"))

    homes = [
        place(dispatcher, f"r{n}", prompt(1000 * (n + 1), 20), tenant=Tenant(client)).instance
        for n, client in enumerate(("x", "y", "z"))
    ]

    assert sorted(homes) == ["a", "b", "c"]


def test_d2lpm_charges_computed_and_weighted_output_tokens_and_gives_back_what_never_ran() -> None:
    dispatcher = pool(D2Lpm(quantum_tokens=1000.0, output_weight=2.0), instances=("a", "b"))
    client, deficits = Tenant("t"), dispatcher.state.tracker(Deficits)
    place(dispatcher, "r", prompt(1, 4))
    dispatcher.state.apply(first_token("r", "a", at=1.0))
    dispatcher.state.apply(finished("r", A, at=2.0, prompt_tokens=257, completion_tokens=50))
    spent = deficits.tokens_left(client, A)
    for number in range(3):
        place(dispatcher, f"w{number}", prompt(1000 * (number + 1), 300), now=3.0)
    waiting = next(r for line in dispatcher.state.workload.queues.values() for r in line.pending.values())
    before = deficits.tokens_left(client, waiting.instance)
    dispatcher.cancel_ungranted(waiting.id, CancelCause.CLIENT_GONE, 4.0)

    assert spent == 1000 - 257 - 100
    assert deficits.tokens_left(client, waiting.instance) == before + waiting.uncached_tokens


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 60)), max_size=60))
@examples(40)
def test_d2lpm_spreads_each_client_within_a_quantum_and_its_longest_prompt(requests: list[tuple[str, int]]) -> None:
    quantum = 2000.0
    dispatcher = pool(D2Lpm(quantum_tokens=quantum))
    for number, (client, blocks) in enumerate(requests):
        place(dispatcher, f"r{number}", [*prompt(1, 5), *prompt(1000 * (number + 1), blocks)], tenant=client)

    deficits = dispatcher.state.tracker(Deficits)
    for client in "xyz":
        left = [deficits.tokens_left(Tenant(client), InstanceId(instance)) for instance in FLEET]
        assert max(left) - min(left) <= quantum + 66 * BLOCK

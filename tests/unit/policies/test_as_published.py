"""Policies to the letter of their papers, each where its default decides otherwise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.reasons import CancelCause
from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.ordering.deficit_longest_prefix_match import DeficitLongestPrefixMatch
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet, policy_set, recorded_policy_set
from pointsman.policies.routing import RoutingPolicy
from pointsman.policies.routing.d2lpm import D2Lpm
from pointsman.policies.routing.lbgr import Lbgr
from pointsman.policies.routing.round_robin import RoundRobin
from pointsman.policies.routing.sticky_least_loaded import StickyLeastLoaded
from pointsman.primitives import InstanceId, Tenant
from pointsman.state.trackers.decayed_load import DecayedLoad
from pointsman.state.trackers.deficits import Deficits
from pointsman.state.trackers.queue_deficits import QueueDeficits
from pointsman.state.trackers.residuals import Residuals
from tests.support.events import BLOCK, finished, first_token, stored
from tests.support.examples import examples
from tests.support.leading import leader_of, place, prompt
from tests.support.single_server import INSTANCE, SingleServer

A, B = InstanceId("a"), InstanceId("b")


def pool(policy: RoutingPolicy, instances: tuple[str, ...] = ("a", "b")) -> Dispatcher:
    return leader_of(instances, PolicySet(routing=policy, admission=AdmitAll(), ordering=FirstComeFirstServed()))


def fresh(number: int, blocks: int) -> list[int]:
    return prompt(10_000 * (number + 1), blocks)


# --- D2LPM, Algorithm 2 ---


@pytest.mark.parametrize("as_published", [True, False])
def test_d2lpm_charges_the_whole_prompt_or_only_what_is_computed(as_published: bool) -> None:
    dispatcher = pool(D2Lpm(quantum_tokens=10_000.0, as_published=as_published))
    dispatcher.state.apply(stored("a", 1, prompt(1, 10)))

    placed = place(dispatcher, "r", [*prompt(1, 10), *fresh(1, 5)], tenant="t")

    assert (placed.instance, placed.uncached_tokens) == ("a", 5 * BLOCK + 1)
    spent = 10_000 - dispatcher.state.tracker(Deficits).tokens_left(Tenant("t"), A)
    assert spent == (15 if as_published else 5) * BLOCK + 1


def test_d2lpm_gives_back_what_it_charged_for_what_never_ran() -> None:
    dispatcher = pool(D2Lpm(quantum_tokens=50_000.0, as_published=True), ("a",))
    dispatcher.state.apply(stored("a", 1, prompt(1, 10)))
    for number in range(3):
        place(dispatcher, f"r{number}", [*prompt(1, 10), *fresh(number, 200)], tenant="t")
    deficits = dispatcher.state.tracker(Deficits)
    waiting = next(iter(dispatcher.state.workload.queue(A).pending.values()))
    before = deficits.tokens_left(Tenant("t"), A)

    dispatcher.cancel_ungranted(waiting.id, CancelCause.CLIENT_GONE, 1.0)

    assert deficits.tokens_left(Tenant("t"), A) == before + 210 * BLOCK + 1


def test_d2lpm_takes_the_shorter_queue_once_the_longest_match_has_no_tokens_left() -> None:
    """The default takes the second-longest hit, on b; Algorithm 2 the shortest queue, that of c."""

    def third(as_published: bool) -> str:
        dispatcher = pool(D2Lpm(quantum_tokens=20 * BLOCK, as_published=as_published), ("a", "b", "c"))
        dispatcher.state.apply(stored("a", 1, prompt(1, 10)))
        dispatcher.state.apply(stored("b", 1, prompt(1, 5)))
        place(dispatcher, "spends", [*prompt(1, 10), *fresh(0, 30)], tenant="t")
        place(dispatcher, "on-b", [*prompt(1, 5), *fresh(2, 1)], tenant="u", excluded=["a", "c"])
        return place(dispatcher, "r", [*prompt(1, 10), *fresh(3, 1)], tenant="t").instance

    assert third(as_published=False) == "b"
    assert third(as_published=True) == "c"


def test_d2lpm_sends_equal_matches_to_the_shorter_queue_not_to_the_lighter() -> None:
    def third(as_published: bool) -> str:
        dispatcher = pool(D2Lpm(quantum_tokens=1e6, as_published=as_published))
        place(dispatcher, "long", fresh(0, 90), tenant="x", excluded=["b"])
        for number in range(3):
            place(dispatcher, f"short{number}", fresh(number + 1, 2), tenant="y", excluded=["a"])
        return place(dispatcher, "r", fresh(9, 2), tenant="z").instance

    assert third(as_published=False) == "b"
    assert third(as_published=True) == "a"


# --- DLPM, Algorithm 1 ---


@pytest.mark.parametrize("as_published", [True, False])
def test_dlpm_forgives_the_debt_of_who_waits_again_or_keeps_it(as_published: bool) -> None:
    server = SingleServer(DeficitLongestPrefixMatch(quantum_tokens=100.0, as_published=as_published), busy=True)
    server.arrive("first", blocks=20, tenant="u")
    server.run()
    deficits = server.state.tracker(QueueDeficits)
    debt = deficits.balance(InstanceId(INSTANCE), Tenant("u"))

    server.arrive("keeps busy", blocks=1, tenant="t")
    server.arrive("second", blocks=1, tenant="u")

    assert debt == 100 - (20 * BLOCK + 1)
    assert deficits.balance(InstanceId(INSTANCE), Tenant("u")) == (0 if as_published else debt)


def test_dlpm_as_published_does_not_age() -> None:
    def order(**given: bool) -> list[str]:
        server = SingleServer(DeficitLongestPrefixMatch(quantum_tokens=1e6, ageing_tokens=1000.0, **given), busy=True)
        keys = server.fresh_keys(4)
        server.state.apply(stored(INSTANCE, 1, keys))
        server.arrive("old", blocks=2, tenant="t")
        server.advance(10.0)
        server.arrive("held", keys=[*keys, *server.fresh_keys(1)], tenant="t")
        return server.run()

    assert order() == ["old", "held"]
    assert order(as_published=True) == ["held", "old"]


# --- The push-based router, Algorithm 1 ---


def test_sticky_as_published_never_leaves_a_holder_and_takes_any_hit() -> None:
    def homes(policy: StickyLeastLoaded) -> tuple[str, str]:
        dispatcher = pool(policy)
        dispatcher.state.apply(stored("a", 1, prompt(1, 1)))
        small = place(dispatcher, "busy", [*prompt(1, 1), *fresh(0, 400)], excluded=["b"])
        assert small.instance == "a"
        hardly = place(dispatcher, "hardly", [*prompt(1, 1), *fresh(1, 60)]).instance
        dispatcher.state.apply(stored("a", 2, prompt(1, 16)[1:], parent=prompt(1, 1)[0]))
        return hardly, place(dispatcher, "r", prompt(1, 16)).instance

    assert homes(StickyLeastLoaded()) == ("b", "b")
    assert homes(StickyLeastLoaded(as_published=True)) == ("a", "a")


# --- LBGR, Algorithm 2 ---


def test_lbgr_as_published_counts_a_second_for_each_thousand_uncached_tokens() -> None:
    dispatcher = pool(Lbgr(decay_s=1e9, as_published=True), ("a",))
    dispatcher.state.apply(stored("a", 1, prompt(1, 10)))
    place(dispatcher, "r", [*prompt(1, 10), *fresh(1, 25)])

    assert dispatcher.state.tracker(DecayedLoad).seconds(A, 0.0) == pytest.approx((25 * BLOCK + 1) / 1000)


def test_lbgr_as_published_learns_from_whole_answers() -> None:
    def learned(as_published: bool) -> float:
        dispatcher = pool(Lbgr(as_published=as_published), ("a",))
        for number in range(20):
            now = 100.0 * number
            place(dispatcher, f"r{number}", fresh(number, 10), now=now)
            dispatcher.state.apply(first_token(f"r{number}", "a", at=now + (10 * BLOCK + 1) / 1000))
            dispatcher.state.apply(finished(f"r{number}", "a", at=now + 7.0))
        tokens = 10 * BLOCK + 1
        return dispatcher.state.tracker(Residuals).seconds(A, uncached=tokens, cached=0, now=5000.0)

    assert learned(as_published=False) == pytest.approx(0.0, abs=0.01)
    assert learned(as_published=True) == pytest.approx(7.0 - (10 * BLOCK + 1) / 1000, abs=0.5)


# --- Round robin of each client ---


@given(clients=st.lists(st.sampled_from("xyz"), min_size=1, max_size=40))
@examples(20)
def test_each_client_takes_turns_of_its_own(clients: list[str]) -> None:
    dispatcher = pool(RoundRobin(per_client=True), ("a", "b", "c"))
    homes: dict[str, list[str]] = {}
    for number, client in enumerate(clients):
        placed = place(dispatcher, f"r{number}", fresh(number, 1), tenant=client)
        homes.setdefault(client, []).append(placed.instance)

    for visited in homes.values():
        assert visited == ["abc"[turn % 3] for turn in range(len(visited))]


# --- Records ---


@pytest.mark.parametrize("policy", ["d2lpm", "lbgr", "sticky_least_loaded"])
def test_only_the_letter_is_recorded_so_that_old_records_are_those_of_the_default(policy: str) -> None:
    usual = policy_set(routing=policy, ordering="dlpm")
    letter = policy_set(routing=policy, ordering="dlpm", settings={"as_published": True, "order.as_published": True})

    assert not any("as_published" in name for name in usual.settings)
    assert recorded_policy_set(policy, usual.settings) == usual
    assert recorded_policy_set(policy, letter.settings) == letter != usual


def test_a_setting_that_a_record_lacks_has_the_value_that_it_had_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the default is another by now."""
    monkeypatch.setattr(RoundRobin, "absent", {"per_client": True})

    rebuilt = recorded_policy_set("round_robin", policy_set(routing="round_robin").settings | {"per_client": False})
    old = recorded_policy_set("round_robin", policy_set(routing="round_robin", settings={"per_client": True}).settings)

    assert (rebuilt.routing, old.routing) == (RoundRobin(per_client=False), RoundRobin(per_client=True))
    assert "per_client" not in old.routing.settings

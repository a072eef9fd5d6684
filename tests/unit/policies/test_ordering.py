"""Which of an instance's waiting requests each ordering grants next, and that none waits for ever."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.policies.ordering import OrderingPolicy
from pointsman.policies.ordering.deficit_longest_prefix_match import DeficitLongestPrefixMatch
from pointsman.policies.ordering.earliest_deadline_first import EarliestDeadlineFirst
from pointsman.policies.ordering.fair_deadlines import FairDeadlines
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.ordering.longest_prefix_match import LongestPrefixMatch
from pointsman.policies.ordering.moore_hodgson import MooreHodgson
from pointsman.policies.ordering.shortest_prefill import ShortestPrefill
from pointsman.policies.ordering.virtual_token_counter import VirtualTokenCounter
from pointsman.primitives import InstanceId
from pointsman.state.fold_versions import FOLD_VERSION
from pointsman.state.prefill_rate import PrefillRate
from tests.support.events import stored
from tests.support.examples import examples
from tests.support.single_server import SingleServer

ALL: tuple[OrderingPolicy, ...] = (
    FirstComeFirstServed(),
    EarliestDeadlineFirst(),
    ShortestPrefill(),
    LongestPrefixMatch(),
    VirtualTokenCounter(),
    DeficitLongestPrefixMatch(),
    MooreHodgson(),
    FairDeadlines(),
)


def by_name(policy: OrderingPolicy) -> str:
    return policy.name


def test_shortest_prefill_grants_the_least_work_first() -> None:
    server = SingleServer(ShortestPrefill(), busy=True)
    for request, blocks in (("long", 40), ("short", 4), ("middling", 20)):
        server.arrive(request, blocks=blocks)

    assert server.run() == ["short", "middling", "long"]


def test_shortest_prefill_lets_a_long_one_grow_older_into_the_front() -> None:
    server = SingleServer(ShortestPrefill(ageing=0.1), busy=True)
    server.arrive("long", blocks=40)
    server.advance(30.0)
    server.arrive("short", blocks=4)

    assert server.run() == ["long", "short"]


def test_lpm_grants_what_is_cached_now_and_not_what_is_promised() -> None:
    server = SingleServer(LongestPrefixMatch(), busy=True)
    server.arrive("cold", blocks=30)
    server.arrive("warm", blocks=10)
    server.state.apply(stored("a", 1, server.keys("warm")[:5]))

    assert server.run() == ["warm", "cold"]


def test_vtc_serves_the_tenant_that_got_least() -> None:
    server = SingleServer(VirtualTokenCounter(), busy=True)
    for request, tenant in (("a1", "greedy"), ("a2", "greedy"), ("a3", "greedy"), ("b1", "modest"), ("b2", "modest")):
        server.arrive(request, blocks=10, tenant=tenant)

    assert server.run() == ["a1", "b1", "a2", "b2", "a3"]


def test_vtc_lifts_a_tenant_that_comes_back_so_that_absence_saves_up_nothing() -> None:
    server = SingleServer(VirtualTokenCounter(), busy=True)
    for number in range(20):
        server.arrive(f"a{number}", blocks=10, tenant="busy")
    server.run(10)
    for number in range(6):
        server.arrive(f"b{number}", blocks=10, tenant="new")

    assert [request[0] for request in server.run(8)].count("b") in {3, 4, 5}, "every other turn, not all of them"


def test_dlpm_follows_the_prefix_until_the_quantum_is_used_up() -> None:
    policy = DeficitLongestPrefixMatch(quantum_tokens=1000, output_weight=0.0)
    server = SingleServer(policy, busy=True)
    server.state.apply(stored("a", 1, server.keys("shared")[:8]))
    for number in range(6):
        server.arrive(f"w{number}", keys=[*server.keys("shared")[:8], *server.fresh_keys(8)], tenant="warm")
        server.arrive(f"c{number}", blocks=8, tenant="cold")

    granted = server.run(6)

    assert granted == ["w0", "w1", "c0", "c1", "w2", "w3"], "513 tokens each: two fit a quantum, which may be overdrawn"


def test_moore_hodgson_sets_the_longest_aside_when_not_all_can_be_on_time() -> None:
    server = SingleServer(MooreHodgson(late_share=0.0), busy=True)
    server.arrive("long", blocks=60, slo_ttft=5.0)
    for number in range(3):
        server.arrive(f"s{number}", blocks=20, slo_ttft=5.1)

    assert server.run() == ["s0", "s1", "s2", "long"]


def test_fair_edf_grants_by_deadline_and_late_requests_last() -> None:
    server = SingleServer(FairDeadlines(late_share=0.0), busy=True)
    server.arrive("late", blocks=60, slo_ttft=1.0)
    server.arrive("relaxed", blocks=10, slo_ttft=30.0)
    server.arrive("urgent", blocks=10, slo_ttft=4.0)

    assert server.run() == ["urgent", "relaxed", "late"]


def test_fair_edf_prefers_the_longer_prefix_among_deadlines_that_are_close() -> None:
    server = SingleServer(FairDeadlines(tie_seconds=0.25), busy=True)
    server.arrive("first", blocks=10, slo_ttft=9.9)
    server.arrive("warm", blocks=10, slo_ttft=10.0)
    server.arrive("warm-but-later", blocks=12, slo_ttft=12.0)
    server.state.apply(stored("a", 1, server.keys("warm")[:5]))
    server.state.apply(stored("a", 2, server.keys("warm-but-later")))

    assert server.run() == ["warm", "first", "warm-but-later"]


def test_fair_edf_lets_nobody_be_overtaken_who_would_be_late_for_it() -> None:
    server = SingleServer(FairDeadlines(tie_seconds=0.25, late_share=0.0), busy=True)
    server.arrive("relaxed", blocks=1, slo_ttft=3.0)
    server.arrive("tight", blocks=40, slo_ttft=3.0)
    server.arrive("cached", blocks=10, slo_ttft=3.1)
    server.state.apply(stored("a", 1, server.keys("cached")[:5]))

    assert server.run() == ["relaxed", "tight", "cached"]


def test_fair_edf_sets_nobody_aside_whom_a_small_error_of_the_prediction_makes_late() -> None:
    server = SingleServer(FairDeadlines(late_share=0.0), busy=True)
    server.arrive("barely", blocks=10, slo_ttft=0.62)
    server.arrive("hopeless", blocks=10, slo_ttft=0.5)
    server.arrive("patient", blocks=1, slo_ttft=60.0)

    assert server.run() == ["barely", "patient", "hopeless"]


def test_fair_edf_keeps_a_tenant_from_running_ahead_of_another() -> None:
    server = SingleServer(FairDeadlines(lead_tokens_max=700, output_weight=0.0), busy=True)
    for number in range(6):
        server.arrive(f"a{number}", blocks=10, tenant="hurried", slo_ttft=10.0)
        server.arrive(f"b{number}", blocks=10, tenant="patient", slo_ttft=60.0)

    assert server.run(6) == ["a0", "a1", "b0", "a2", "b1", "a3"]


def _after_one(*others: tuple[str, int, float], fold_version: int = FOLD_VERSION) -> list[str]:
    """`hurried` is served 0.9 s of work, and asks for `others` (name, blocks, SLO); `patient` waits with 0.3 s of work."""
    server = SingleServer(FairDeadlines(lead_tokens_max=100, output_weight=0.0, late_share=0.0), busy=True)
    server.state.settings = replace(server.state.settings, fold_version=fold_version)
    server.arrive("served", blocks=14, tenant="hurried", slo_ttft=1.2)
    for name, blocks, slo_ttft in others:
        server.arrive(name, blocks=blocks, tenant="hurried", slo_ttft=slo_ttft)
    server.arrive("patient", blocks=5, tenant="patient", slo_ttft=60.0)
    assert server.run(1) == ["served"]
    return server.run()


def test_fair_edf_makes_nobody_late_who_was_to_be_on_time_for_a_tenant_that_got_less() -> None:
    assert _after_one(("tight", 3, 1.35)) == ["tight", "patient"]


def test_fair_edf_serves_the_tenant_that_got_less_first_where_others_can_wait() -> None:
    assert _after_one(("relaxed", 3, 2.0)) == ["patient", "relaxed"]


def test_fair_edf_serves_the_tenant_that_got_less_first_where_others_were_placed_to_be_late() -> None:
    """Though they could be on time if they went first: nobody counted on it."""
    assert _after_one(("huge", 16, 60.0), ("behind", 3, 1.35))[0] == "patient"


def test_fair_edf_of_an_older_log_decides_as_it_did() -> None:
    assert _after_one(("tight", 3, 1.35), fold_version=9) == ["patient", "tight"]


def test_fair_edf_leaves_time_for_what_shares_a_step_with_those_that_are_overtaken() -> None:
    server = SingleServer(FairDeadlines(tie_seconds=0.25), busy=True)
    server.state.latency.rates[InstanceId("a")] = PrefillRate(beside_seconds=1.0, beside_tokens=1000)
    server.arrive("first", blocks=3, slo_ttft=0.6)
    server.arrive("warm", blocks=3, slo_ttft=0.7)
    server.state.apply(stored("a", 1, server.keys("warm")[:2]))

    assert server.run() == ["first", "warm"], "half a step of a second does not fit in"


@pytest.mark.parametrize("policy", [MooreHodgson(late_share=0.1), FairDeadlines(late_share=0.1)], ids=by_name)
def test_late_requests_get_their_share_and_no_more_while_others_can_be_on_time(policy: OrderingPolicy) -> None:
    server = SingleServer(policy, busy=True)
    for number in range(40):
        server.arrive(f"late{number}", blocks=10, slo_ttft=0.1)
    granted = []
    for number in range(200):
        server.arrive(f"fresh{number}", blocks=10, slo_ttft=5.0)
        granted += server.run(1)

    late = [request for request in granted if request.startswith("late")]
    assert late == [f"late{number}" for number in range(len(late))], "oldest first"
    assert 15 <= len(late) <= 22, "a tenth of the work, and one second saved up"


@pytest.mark.parametrize("policy", ALL, ids=by_name)
def test_no_request_starves_while_easier_ones_keep_coming(policy: OrderingPolicy) -> None:
    server = SingleServer(policy, busy=True)
    hot = server.fresh_keys(6)
    server.state.apply(stored("a", 1, hot))
    server.arrive("victim", blocks=40, slo_ttft=1.0, tenant="unlucky")

    granted: list[str] = []
    for number in range(2000):
        server.arrive(f"easy{number}", keys=[*hot, *server.fresh_keys(2)], slo_ttft=1.0, tenant=f"t{number % 3}")
        granted += server.run(1)
        if "victim" in granted:
            break

    assert granted[-1] == "victim"
    assert server.now < 120.0, "the load keeps the server exactly busy, so only the order decides"


@pytest.mark.parametrize("policy", ALL, ids=by_name)
def test_the_same_arrivals_give_the_same_order(policy: OrderingPolicy) -> None:
    def history() -> list[str]:
        server = SingleServer(policy, busy=True)
        for number in range(60):
            blocks, tenant = 1 + number * 7 % 23, f"t{number * 5 % 3}"
            server.arrive(f"r{number}", blocks=blocks, tenant=tenant, slo_ttft=1.0 + number % 9)
        return server.run()

    assert history() == history()
    assert sorted(history()) == sorted(f"r{number}" for number in range(60))


jobs = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 80)), min_size=1, max_size=7)


@examples(80)
@given(jobs)
def test_moore_hodgson_has_as_many_on_time_as_any_order(requests: list[tuple[int, int]]) -> None:
    """Jobs are (prefill in blocks, objective in tenths of seconds)."""
    server = SingleServer(MooreHodgson(late_share=0.0))
    server.hold()
    for number, (blocks, tenths) in enumerate(requests):
        server.arrive(f"r{number}", blocks=blocks, slo_ttft=tenths / 10 + 1e-6)
    server.release()
    server.run()

    assert server.on_time == _most_on_time(
        [((blocks * 64 + 1) / 1000, tenths / 10 + 1e-6) for blocks, tenths in requests]
    )


def _most_on_time(requests: list[tuple[float, float]]) -> int:
    """By trying all subsets, each in the order of its deadlines."""
    sizes = range(len(requests), 0, -1)
    return next((size for size in sizes if any(_all_on_time(s) for s in combinations(requests, size))), 0)


def _all_on_time(subset: tuple[tuple[float, float], ...]) -> bool:
    return all(finish <= deadline for finish, deadline in _finishes(sorted(subset, key=lambda job: job[1])))


def _finishes(ordered: list[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    now = 0.0
    for prefill, deadline in ordered:
        now += prefill
        yield now, deadline


@pytest.mark.parametrize("policy", ALL, ids=by_name)
def test_a_long_line_is_granted_one_by_one_and_none_twice(policy: OrderingPolicy) -> None:
    server = SingleServer(policy, busy=True)
    for number in range(300):
        server.arrive(f"r{number}", blocks=1 + number % 5, tenant=f"t{number % 10}", slo_ttft=1.0 + number % 60)

    assert sorted(server.run()) == sorted(f"r{number}" for number in range(300))
    assert not server.state.workload.requests

"""What our default weighs: the work behind a queue, the late, a view that is not fresh, and who is equal."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.policy_set import policy_set
from pointsman.primitives import BlockKey, InstanceId, Term
from pointsman.state.state import PoolSettings, State
from tests.support.events import BLOCK, joined, stored
from tests.support.leading import place

FLEET = ("a", "b", "c", "d", "e", "f", "g", "h")
PROMPT_BLOCKS = 16
"""A prompt of 1025 tokens, which takes 1.025 s where nothing of it is cached."""


def pool(*instances: str, stale: bool = False, **own: float) -> Dispatcher:
    """Idle instances under our policy; `own` are its settings. `stale`: policies see only what was so at time 0."""
    policies = policy_set(routing="pointsman", admission="none", settings=dict(own))
    state, seen = (State(PoolSettings(), policies.trackers()) for _ in range(2))
    for instance in instances:
        state.apply(joined(instance))
        seen.apply(joined(instance))
    return Dispatcher(state, policies, term=Term(1), policy_state=seen if stale else None)


def occupy(dispatcher: Dispatcher, instance: str, seconds: float, *, requests: int = 1) -> None:
    """Give an instance a queue of about so many seconds, in prompts that nobody shares."""
    others = [known.id for known in dispatcher.state.fleet.instances if known.id != instance]
    blocks = round(seconds * 1000 / BLOCK / requests)
    for number in range(requests):
        first = 1_000_000 * (1 + len(dispatcher.state.workload.requests))
        keys = list(range(first, first + blocks))
        placed = place(dispatcher, f"busy-{instance}-{number}", keys, excluded=others, slo_ttft=1000.0)
        assert placed.instance == instance


def prompt(first: int = 1, blocks: int = PROMPT_BLOCKS) -> list[int]:
    return list(range(first, first + blocks))


def test_a_request_stays_where_it_is_warm_while_recomputing_costs_more_than_the_wait() -> None:
    short, long = pool("a", "b"), pool("a", "b")
    for dispatcher, seconds in ((short, 0.5), (long, 1.5)):
        dispatcher.state.apply(stored("a", 1, prompt()[:9]))
        occupy(dispatcher, "a", seconds)

    assert place(short, "r", prompt()).instance == "a"
    assert place(long, "r", prompt()).instance == "b"


def test_the_same_recomputing_costs_more_behind_a_queue() -> None:
    idle, busy = pool("a", "b"), pool("a", "b")
    for dispatcher in (idle, busy):
        dispatcher.state.apply(stored("a", 1, prompt()[:9]))
        occupy(dispatcher, "a", 1.5)
    occupy(busy, "b", 1.0)

    assert place(idle, "r", prompt()).instance == "b"
    assert place(busy, "r", prompt()).instance == "a", "although its first token comes later there"


def test_a_warm_instance_is_left_when_it_would_be_late_and_another_is_on_time() -> None:
    dispatcher = pool("a", "b")
    dispatcher.state.apply(stored("a", 1, prompt()))
    occupy(dispatcher, "a", 1.5)

    assert place(dispatcher, "patient", prompt(), slo_ttft=5.0).instance == "a"
    assert place(dispatcher, "urgent", prompt(), slo_ttft=1.2).instance == "b"


def test_a_request_is_let_go_late_when_its_punctuality_would_displace_several() -> None:
    short_ones, long_ones = pool("a", "b"), pool("a", "b")
    for dispatcher, requests in ((short_ones, 19), (long_ones, 1)):
        dispatcher.state.apply(stored("a", 1, prompt()))
        occupy(dispatcher, "a", 8.0)
        occupy(dispatcher, "b", 3.8, requests=requests)

    let_go, kept = place(short_ones, "r", prompt()), place(long_ones, "r", prompt())

    assert let_go.instance == "a"
    assert let_go.reason.startswith("on time only at the cost of others")
    assert kept.instance == "b", "a second of work is little where requests are long"
    assert kept.predicted_ttft < 5.0


def test_work_that_is_let_go_late_counts_for_nothing_once_requests_are_given_up() -> None:
    short, given_up = pool("a", "b"), pool("a", "b")
    for dispatcher, queue in ((short, 5.5), (given_up, 100.0)):
        dispatcher.state.apply(stored("a", 1, prompt()[:1]))
        occupy(dispatcher, "a", queue)
        occupy(dispatcher, "b", 3.8, requests=10)

    assert place(short, "r", prompt()).instance == "b", "at a it would take nearly as much from others"
    assert place(given_up, "r", prompt()).instance == "a", "nobody on time is behind a"


def test_while_no_queue_is_long_a_little_lateness_is_better_than_work_done_twice() -> None:
    pressed, slack = pool("a", "b"), pool("a", "b")
    for dispatcher, other_queue in ((pressed, 3.6), (slack, 1.0)):
        dispatcher.state.apply(stored("a", 1, prompt()))
        occupy(dispatcher, "a", 5.2)
        occupy(dispatcher, "b", other_queue)

    direct, detour = place(pressed, "r", prompt()), place(slack, "r", prompt())

    assert direct.instance == "a"
    assert direct.reason.startswith("costs least")
    assert direct.predicted_ttft > 5.0
    assert detour.instance == "b", "where there is slack, nobody is displaced"
    assert detour.predicted_ttft < 5.0


def test_what_is_late_everywhere_joins_the_longest_queue() -> None:
    dispatcher = pool("a", "b", "c")
    for instance, seconds in (("a", 2.0), ("b", 4.0), ("c", 3.0)):
        occupy(dispatcher, instance, seconds)

    placed = place(dispatcher, "late", prompt(), slo_ttft=1.5)

    assert placed.instance == "b"
    assert placed.reason.startswith("late everywhere")


@pytest.mark.parametrize(("cached_blocks", "chosen"), [(9, "a"), (7, "b")])
def test_what_is_late_everywhere_stays_where_at_least_half_of_it_is_cached(cached_blocks: int, chosen: str) -> None:
    dispatcher = pool("a", "b")
    dispatcher.state.apply(stored("a", 1, prompt()[:cached_blocks]))
    occupy(dispatcher, "a", 2.0)
    occupy(dispatcher, "b", 4.0)

    assert place(dispatcher, "late", prompt(), slo_ttft=1.5).instance == chosen


def test_of_equally_warm_instances_the_late_join_the_longest_queue() -> None:
    dispatcher = pool("a", "b")
    for instance, seconds in (("a", 2.0), ("b", 4.0)):
        dispatcher.state.apply(stored(instance, 1, prompt()))
        occupy(dispatcher, instance, seconds)

    assert place(dispatcher, "late", prompt(), slo_ttft=1.5).instance == "b"


def test_the_queue_of_the_late_is_bounded() -> None:
    bounded, full = pool("a", "b", "c", late_queue_max_s=3.5), pool("a", "b", "c", late_queue_max_s=1.0)
    for dispatcher in (bounded, full):
        for instance, seconds in (("a", 2.0), ("b", 4.0), ("c", 3.0)):
            occupy(dispatcher, instance, seconds)

    assert place(bounded, "late", prompt(), slo_ttft=1.5).instance == "c", "the longest that is not too long"
    assert place(full, "late", prompt(), slo_ttft=1.5).instance == "a", "the shortest where all are too long"


def test_a_prompt_that_is_longer_than_its_objective_goes_by_cost() -> None:
    dispatcher = pool("a", "b")
    occupy(dispatcher, "a", 4.0)

    placed = place(dispatcher, "long", prompt(), slo_ttft=0.5)

    assert placed.instance == "b"
    assert placed.reason.startswith("costs least")


@given(first=st.integers(1, 10**9))
@settings(max_examples=25)
def test_a_stale_view_is_trusted_only_for_ring_candidates(first: int) -> None:
    placed = place(pool(*FLEET, stale=True), "r", prompt(first), now=10.0)
    fresh = place(pool(*FLEET), "r", prompt(first), now=10.0)

    considered = {candidate.instance for candidate in placed.candidates}
    assert len(considered) == 3
    assert placed.instance in considered
    assert {candidate.instance for candidate in fresh.candidates} == set(FLEET)


def test_equals_are_told_apart_by_prefix_and_not_by_name() -> None:
    homes = [place(pool(*FLEET), "r", prompt(first)).instance for first in range(1, 100_000, 1000)]
    again = [place(pool(*FLEET), "other", prompt(first)).instance for first in range(1, 100_000, 1000)]

    assert set(homes) == set(FLEET)
    assert max(homes.count(instance) for instance in homes) < len(homes) / 3
    assert homes == again


fleets = st.sets(st.integers(0, 40), min_size=2, max_size=16).map(
    lambda numbers: tuple(sorted(InstanceId(f"engine-{n}") for n in numbers))
)
newcomers = st.integers(41, 60).map(lambda number: InstanceId(f"engine-{number}"))
PREFIXES = [BlockKey(n * 0x9E3779B97F4A7C15 % 2**64) for n in range(1, 200)]


@given(fleets, newcomers, st.integers(1, 4))
@settings(max_examples=30)
def test_ring_candidates_are_distinct_and_a_newcomer_moves_only_its_share(
    before: tuple[InstanceId, ...], newcomer: InstanceId, count: int
) -> None:
    after = tuple(sorted((*before, newcomer)))

    found = [(ring_candidates(before, p, count), ring_candidates(after, p, count)) for p in PREFIXES]

    assert all(len(set(old)) == len(old) == min(count, len(before)) for old, _ in found)
    moved = [new for old, new in found if new != old]
    assert all(newcomer in new for new in moved), "who stays is not moved about"
    assert len(moved) / len(found) <= count / len(after) * 1.6 + 0.1


@given(fleets, st.sampled_from(PREFIXES))
def test_more_ring_candidates_only_continue_the_fewer(instances: tuple[InstanceId, ...], prefix: BlockKey) -> None:
    by_count = [ring_candidates(instances, prefix, count) for count in range(len(instances) + 2)]

    assert all(more[: len(fewer)] == fewer for fewer, more in pairwise(by_count))
    assert set(by_count[-1]) == set(instances)


@given(fleets, newcomers, st.sampled_from(PREFIXES))
def test_a_home_among_a_few_moves_only_to_a_newcomer(
    instances: tuple[InstanceId, ...], newcomer: InstanceId, prefix: BlockKey
) -> None:
    home = home_among(instances, prefix)

    assert home_among(reversed(instances), prefix) == home
    assert home_among((*instances, newcomer), prefix) in {home, newcomer}
    assert home_among([i for i in instances if i == home or i < home], prefix) == home

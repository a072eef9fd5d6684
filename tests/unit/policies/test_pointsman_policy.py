"""What our default weighs: the work behind a queue, the late, a view that is not fresh, and who is equal."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.contracts.block_keys import unpack_keys
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.hash_ring import home_among, ring_candidates
from pointsman.policies.policy_set import policy_set
from pointsman.policies.pool_view import PoolView
from pointsman.primitives import BlockKey, InstanceId, RequestId, Term
from pointsman.state.state import PoolSettings, State
from pointsman.state.workload import Request
from tests.support.events import BLOCK, first_token, joined, route, stored
from tests.support.examples import examples
from tests.support.leading import place

FLEET = ("a", "b", "c", "d", "e", "f", "g", "h")
PROMPT_BLOCKS = 16
"""A prompt of 1025 tokens, which takes 1.025 s where nothing of it is cached."""


def pool(*instances: str, stale: bool = False, window_tokens: int = 16_384, **own: float) -> Dispatcher:
    """Idle instances under our policy; `own` are its settings. `stale`: policies see only what was so at time 0."""
    policies = policy_set(
        routing="pointsman", admission="none", settings=dict(own), prefill_window_tokens=window_tokens
    )
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


@pytest.mark.parametrize(
    ("sharing", "demand_max", "copied"),
    [(20, 1.0, True), (20, 1e9, False), (20, 3.0, False), (4, 1.0, False), (4, 0.2, True)],
    ids=["over a quarter", "never", "not three quarters", "not a quarter", "over a twentieth"],
)
def test_a_prefix_that_many_wait_for_is_copied_whatever_that_displaces(
    sharing: int, demand_max: float, copied: bool
) -> None:
    """On four instances. 20 of 54 that wait, or 4 of 54."""
    dispatcher = pool("a", "b", "c", "d", window_tokens=BLOCK, demand_max=demand_max)
    dispatcher.state.apply(stored("a", 1, prompt()))
    for instance in ("b", "c", "d"):
        occupy(dispatcher, instance, 3.8, requests=10)
    occupy(dispatcher, "a", 5.2, requests=24 - sharing)
    elsewhere = [InstanceId(name) for name in ("b", "c", "d")]
    for number in range(sharing):
        place(dispatcher, f"same-{number}", prompt(), excluded=elsewhere)

    assert (place(dispatcher, "r", prompt()).instance != "a") == copied


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
@examples(25)
def test_a_stale_view_is_trusted_only_for_ring_candidates(first: int) -> None:
    placed = place(pool(*FLEET, stale=True), "r", prompt(first), now=10.0)
    fresh = place(pool(*FLEET), "r", prompt(first), now=10.0)

    considered = {candidate.instance for candidate in placed.candidates}
    assert len(considered) == 3
    assert placed.instance in considered
    assert {candidate.instance for candidate in fresh.candidates} == set(FLEET)


# Decodes, and KV memory


def answer(dispatcher: Dispatcher, instance: str, requests: int, *, blocks: int = 2, output: int = 100) -> None:
    """Requests that have their first token and decode there."""
    others = [known.id for known in dispatcher.state.fleet.instances if known.id != instance]
    for number in range(requests):
        first = 1_000_000 * (1 + len(dispatcher.state.workload.requests))
        name = f"answer-{instance}-{number}"
        place(dispatcher, name, prompt(first, blocks), excluded=others, slo_ttft=1000.0, max_output_tokens=output)
        dispatcher.state.apply(first_token(name, instance, at=0.0))
    dispatcher.state.latency.forget(InstanceId(instance))


def test_a_request_goes_where_its_prefill_stalls_fewer_decodes() -> None:
    dispatcher, off = pool("a", "b"), pool("a", "b", decode_seconds=0.0)
    for each in (dispatcher, off):
        answer(each, "a", 10)
        occupy(each, "b", 0.4)

    assert place(dispatcher, "r", prompt()).instance == "b", "10 decodes there count as 0.5 s of queue"
    assert place(dispatcher, "loose", prompt(500), slo_tpot=1.0).instance == "a", "a tenth of it at ten times the SLO"
    assert place(off, "r", prompt()).instance == "a"


@pytest.mark.parametrize(("queued", "chosen"), [(1.0, "b"), (3.5, "a")])
def test_a_request_that_lacks_kv_blocks_waits_as_if_behind_a_queue(queued: float, chosen: str) -> None:
    dispatcher, off = pool("a", "b"), pool("a", "b", kv_turnover=0.0)
    for each in (dispatcher, off):
        answer(each, "a", 11, blocks=150, output=400)  # more than 100,000 tokens
        occupy(each, "b", queued)

    placed = place(dispatcher, "r", prompt(), max_output_tokens=400)

    assert placed.instance == chosen
    assert placed.predicted_ttft > 1.5
    assert place(off, "r", prompt(), max_output_tokens=400).instance == "a"


def test_who_allows_an_hour_a_token_is_not_thought_to_wait_hours_for_kv_blocks() -> None:
    dispatcher, before = pool("a"), pool("a", kv_tpot_max=1e9)
    for each in (dispatcher, before):
        answer(each, "a", 11, blocks=150, output=400)  # more than 100,000 tokens

    placed = place(dispatcher, "r", prompt(), max_output_tokens=400, slo_tpot=3600.0)

    assert 1.5 < placed.predicted_ttft < 10
    assert place(before, "r", prompt(), max_output_tokens=400, slo_tpot=3600.0).predicted_ttft > 3600
    assert "kv_tpot_max" not in before.policies.settings, "records of before, which lack it, mean this"


@given(
    answers=st.integers(0, 30),
    blocks=st.integers(1, 150),
    output=st.integers(1, 1000),
    capacity=st.integers(0, 200_000),
)
@examples(40)
def test_the_wait_for_kv_blocks_is_what_is_lacking_over_what_a_full_cache_frees(
    answers: int, blocks: int, output: int, capacity: int
) -> None:
    dispatcher = pool()
    dispatcher.state.apply(joined("a", kv_capacity_tokens=capacity))
    answer(dispatcher, "a", answers, blocks=blocks, output=output)
    request = route("r", prompt(), max_output_tokens=output)
    dispatcher.route(request, 0.0)
    view = PoolView(dispatcher.state, dispatcher.state.workload.requests[RequestId("r")], 0.0)
    expected = view.expected_output_tokens

    (wait,) = view.kv_waits(view.candidates, 1.0)

    asked = (
        answers * (blocks * BLOCK + 1) + 2 * (PROMPT_BLOCKS * BLOCK + 1) + (answers + 2) * expected
    )  # it waits there
    if not capacity or asked <= capacity:
        assert wait == 0.0
    else:
        freed_each_second = capacity / (expected * 0.1)
        assert wait == pytest.approx((asked - capacity) / freed_each_second)


# The whole rule, told again


queues = st.lists(st.tuples(st.floats(0, 7), st.integers(0, PROMPT_BLOCKS), st.integers(0, 12)), min_size=1, max_size=6)


@given(queues)
@examples(60)
def test_on_time_requests_make_the_sum_of_squared_queues_grow_least(fleet: list[tuple[float, int, int]]) -> None:
    """The twin adds up all queues, squared, before and after."""
    names = [f"i{number}" for number in range(len(fleet))]
    dispatcher = pool(*names, displaced_max=1e9)
    for name, (queue, cached, decodes) in zip(names, fleet, strict=True):
        if cached:
            dispatcher.state.apply(stored(name, 1, prompt()[:cached]))
        answer(dispatcher, name, decodes, output=2)
        if round(queue * 1000 / BLOCK):
            occupy(dispatcher, name, queue)
    view = _view_of(dispatcher)
    own = {
        c.instance: (c.queue_seconds, c.prefill_seconds, decodes)
        for c, (*_, decodes) in zip(view.candidates, fleet, strict=True)
    }

    placed = place(dispatcher, "r", prompt())

    def grown(name: str) -> float:
        queue, work, decodes = own[InstanceId(name)]
        return (queue + 0.05 * decodes + work) ** 2 - (queue + 0.05 * decodes) ** 2

    on_time = [name for name in names if sum(own[InstanceId(name)][:2]) <= 5.0]
    if on_time:
        assert grown(placed.instance) == pytest.approx(min(map(grown, on_time)))
        assert placed.instance in on_time
    else:
        holders = [name for name, (_, cached, _) in zip(names, fleet, strict=True) if cached * BLOCK >= 1025 / 2]
        assert own[placed.instance][0] == max(own[InstanceId(name)][0] for name in holders or names)


@given(queues, st.floats(0, 20))
@examples(60)
def test_it_is_late_by_choice_only_to_save_work(fleet: list[tuple[float, int, int]], displaced_max: float) -> None:
    names = [f"i{number}" for number in range(len(fleet))]
    dispatcher = pool(*names, displaced_max=displaced_max)
    for name, (queue, cached, _) in zip(names, fleet, strict=True):
        if cached:
            dispatcher.state.apply(stored(name, 1, prompt()[:cached]))
        if round(queue * 1000 / BLOCK):
            occupy(dispatcher, name, queue)
    candidates = {c.instance: c for c in _view_of(dispatcher).candidates}

    placed = candidates[place(dispatcher, "r", prompt()).instance]

    on_time = [c for c in candidates.values() if c.predicted_ttft <= 5.0]
    if on_time and placed.predicted_ttft > 5.0:
        assert placed.prefill_seconds < min(c.prefill_seconds for c in on_time)


def _view_of(dispatcher: Dispatcher) -> PoolView:
    """What the policy sees of a request that is not there yet."""
    command = route("seen", prompt())
    request = Request(
        id=command.request, tenant=command.tenant, session=command.session, keys=unpack_keys(command.keys),
        prompt_tokens=command.prompt_tokens, max_output_tokens=command.max_output_tokens, slo_ttft=5.0, slo_tpot=0.1,
        arrived_at=0.0, exact=False, streaming=True,
    )  # fmt: skip
    return PoolView(dispatcher.state, request, 0.0)


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
@examples(30)
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

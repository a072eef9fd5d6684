"""DualMap whole: what each ablation decides by, the decode bottleneck, and the tree that says how long a prefix is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.policies.admission.admit_all import AdmitAll
from pointsman.policies.dispatch import Dispatcher
from pointsman.policies.hash_ring import candidate_pair, ring_candidates
from pointsman.policies.ordering.first_come_first_served import FirstComeFirstServed
from pointsman.policies.policy_set import PolicySet
from pointsman.policies.pool_view import PoolView
from pointsman.policies.routing.dualmap import DualMap
from pointsman.primitives import BlockKey, InstanceId
from pointsman.state.hotness import ARRIVALS_MIN, Hotness
from pointsman.state.state import PoolSettings
from tests.support.events import stored
from tests.support.examples import examples
from tests.support.leading import leader_of, place, prompt

FLEET = ("a", "b", "c", "d")


def pool(dualmap: DualMap | None = None, *, tree: PoolSettings | None = None) -> Dispatcher:
    policies = PolicySet(routing=dualmap or DualMap(), admission=AdmitAll(), ordering=FirstComeFirstServed())
    return leader_of(FLEET, policies, settings=tree)


def pair_of(dispatcher: Dispatcher, keys: list[int]) -> tuple[InstanceId, ...]:
    key = dispatcher.state.hotness.affinity_key([BlockKey(key) for key in keys])
    assert key is not None
    return candidate_pair(dispatcher.state.fleet.ready, key)


def with_a_warm_but_busy_candidate(dualmap: DualMap, *, busy_blocks: int) -> tuple[Dispatcher, str, str]:
    """A pool where one candidate of `prompt(1)` holds 8 of its 16 blocks and has work before it, and the other none."""
    dispatcher = pool(dualmap)
    warm, cold = pair_of(dispatcher, prompt(1))
    dispatcher.state.apply(stored(warm, 1, prompt(1, 8)))
    queue_up(dispatcher, warm, busy_blocks)
    return dispatcher, warm, cold


def queue_up(dispatcher: Dispatcher, instance: str, blocks: int) -> None:
    """Give one instance a prompt of its own to work on."""
    others = [InstanceId(other) for other in FLEET if other != instance]
    number = FLEET.index(instance)
    busy = place(dispatcher, f"busy-{number}", prompt(10_000_000 + 1000 * number, blocks), excluded=others)
    assert busy.instance == instance


def test_each_ablation_decides_by_one_thing_only() -> None:
    chosen = {}
    for ablation in ("", "cache-affinity", "least-loaded", "min-ttft"):
        dispatcher, warm, cold = with_a_warm_but_busy_candidate(DualMap(ablation=ablation), busy_blocks=6)
        instance = place(dispatcher, "r", prompt(1)).instance
        chosen[ablation] = {warm: "warm", cold: "cold"}[instance]

    assert chosen == {"": "warm", "cache-affinity": "warm", "least-loaded": "cold", "min-ttft": "warm"}


def test_cache_affinity_stays_where_min_ttft_leaves() -> None:
    chosen = {}
    for ablation in ("cache-affinity", "min-ttft"):
        dispatcher, warm, cold = with_a_warm_but_busy_candidate(DualMap(ablation=ablation), busy_blocks=90)
        chosen[ablation] = {warm: "warm", cold: "cold"}[place(dispatcher, "r", prompt(1)).instance]

    assert chosen == {"cache-affinity": "warm", "min-ttft": "cold"}


@pytest.mark.parametrize("count", [1, 3, 4, 9])
def test_more_candidates_than_two_are_the_owners_on_further_rings(count: int) -> None:
    dispatcher = pool(DualMap(candidates=count))
    key = dispatcher.state.hotness.affinity_key([BlockKey(key) for key in prompt(1)])
    assert key is not None
    owners = ring_candidates(dispatcher.state.fleet.ready, key, count)
    least, *others = owners
    for other in others:
        queue_up(dispatcher, other, 20)

    assert len(owners) == min(count, len(FLEET))
    assert place(dispatcher, "r", prompt(1)).instance == least


@pytest.mark.parametrize(("both_over", "expected"), [("affine", "holder"), ("least_loaded", "idle")])
def test_of_many_late_candidates_the_setting_decides_too(both_over: str, expected: str) -> None:
    dispatcher = pool(DualMap(candidates=4, both_over=both_over, ttft_slo_threshold=0.0))
    dispatcher.state.apply(stored("a", 1, prompt(1, 8)))
    for busy in ("a", "b", "c"):
        queue_up(dispatcher, busy, 20)

    assert place(dispatcher, "r", prompt(1)).instance == {"holder": "a", "idle": "d"}[expected]


def test_a_pair_has_at_least_one_candidate() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DualMap(candidates=0)


def test_without_any_hit_cache_affinity_takes_the_first_candidate() -> None:
    dispatcher = pool(DualMap(ablation="cache-affinity"))
    first, _ = pair_of(dispatcher, prompt(1))
    queue_up(dispatcher, first, 50)

    assert place(dispatcher, "r", prompt(1)).instance == first


@pytest.mark.parametrize(("both_over", "expected"), [("affine", "warm"), ("least_loaded", "cold")])
def test_when_both_candidates_are_over_the_setting_decides(both_over: str, expected: str) -> None:
    dispatcher, warm, cold = with_a_warm_but_busy_candidate(DualMap(both_over=both_over), busy_blocks=60)

    placed = place(dispatcher, "r", prompt(1), slo_ttft=0.9)

    assert placed.instance == {"warm": warm, "cold": cold}[expected]
    assert placed.reason.startswith("both candidates would miss the SLO")


def test_a_lower_threshold_leaves_the_longer_hit_earlier() -> None:
    for threshold, expected in ((1.0, "warm"), (0.5, "cold")):
        dualmap = DualMap(ttft_slo_threshold=threshold)
        dispatcher, warm, cold = with_a_warm_but_busy_candidate(dualmap, busy_blocks=40)
        assert place(dispatcher, "r", prompt(1), slo_ttft=4.0).instance == {"warm": warm, "cold": cold}[expected]


@pytest.mark.parametrize(("stall_seconds", "expected"), [(3.0, "cold"), (0.0, "warm")])
def test_a_candidate_that_finishes_no_prefill_counts_as_that_much_busier(stall_seconds: float, expected: str) -> None:
    dispatcher, warm, cold = with_a_warm_but_busy_candidate(DualMap(stall_seconds=stall_seconds), busy_blocks=10)

    placed = place(dispatcher, "r", prompt(1), now=4.8)

    assert placed.instance == {"warm": warm, "cold": cold}[expected]
    by_name = {candidate.instance: candidate for candidate in placed.candidates}
    assert by_name[InstanceId(warm)].queue_seconds == (4.8 if stall_seconds else 0.0)


def test_the_paper_to_the_letter_is_a_matter_of_settings() -> None:
    paper = pool(DualMap(both_over="least_loaded"), tree=PoolSettings(hot_share=2.0, cold_share=1.0))

    homes = [place(paper, f"r{n}", [*prompt(1, 8), *prompt(1000 * (n + 1), 8)]).instance for n in range(60)]

    assert paper.policies.settings["both_over"] == "least_loaded"
    assert set(homes) == set(FLEET), "a prefix with all of the traffic is hot by any threshold"


def test_an_unknown_ablation_is_refused() -> None:
    with pytest.raises(ValueError, match="ablation must be empty or one of cache-affinity, least-loaded, min-ttft"):
        DualMap(ablation="no-rebalance")


def test_every_candidate_of_a_request_is_one_of_its_pair() -> None:
    dispatcher = pool()
    for number in range(30):
        placed = place(dispatcher, f"r{number}", prompt(number * 100, 1 + number % 12))
        request = dispatcher.state.workload.requests[placed.request]
        ring_key = PoolView(dispatcher.state, request, 0.0).ring_key
        assert {c.instance for c in placed.candidates} == set(candidate_pair(dispatcher.state.fleet.ready, ring_key))


# The hotness tree

WINDOW = 60


def hotness(*, hot: float = 1.0, cold: float = 0.5) -> Hotness:
    return Hotness(block_tokens=1, level_tokens=2, hot_share=hot, cold_share=cold, window_arrivals=WINDOW)


def is_extended(tree: Hotness, key: BlockKey) -> bool:
    return key in tree._extended


def chain(path: list[int]) -> list[BlockKey]:
    """Keys of a prompt: equal beginnings give equal keys."""
    key = 0
    keys = []
    for step in path:
        key = key * 5 + step + 1
        keys.append(BlockKey(key))
    return keys


class SlowHotness:
    """The same tree, counting the whole window again at every arrival."""

    def __init__(self, hot: float, cold: float) -> None:
        self.hot, self.cold = hot, cold
        self.paths: list[list[BlockKey]] = []
        self.extended: set[BlockKey] = set()

    def path(self, keys: list[BlockKey]) -> list[BlockKey]:
        levels = keys[1::2]
        last_hot = next((n for n, key in enumerate(levels) if key not in self.extended), None)
        if last_hot is not None:
            return levels[: last_hot + 1]
        return levels if levels[-1:] == keys[-1:] else [*levels, keys[-1]]

    def counts(self) -> Counter[BlockKey]:
        return Counter(key for path in self.paths[-WINDOW:] for key in path)

    def arrived(self, keys: list[BlockKey], instances: int) -> None:
        self.paths.append(self.path(keys))
        touched = {*self.paths[-1], *(self.paths[-WINDOW - 1] if len(self.paths) > WINDOW else [])}
        counts, arrivals = self.counts(), min(len(self.paths), WINDOW)
        for key in touched:
            if not counts[key] or counts[key] < self.cold * arrivals / instances:
                self.extended.discard(key)
            elif counts[key] > self.hot * arrivals / instances and arrivals >= ARRIVALS_MIN:
                self.extended.add(key)


arrivals = st.lists(
    st.tuples(st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=9), st.integers(1, 6)), min_size=1, max_size=260
)


@given(arrivals, st.sampled_from([(1.0, 0.5), (2.0, 1.0), (0.5, 0.0)]))
@examples(60)
def test_the_window_arithmetic_equals_counting_again(
    history: list[tuple[list[int], int]], shares: tuple[float, float]
) -> None:
    fast, slow = hotness(hot=shares[0], cold=shares[1]), SlowHotness(*shares)

    for path, instances in history:
        keys = chain(path)
        assert fast.affinity_key(keys) == next(reversed(slow.path(keys)), None)
        fast.arrived(keys, instances)
        slow.arrived(keys, instances)

    counts = slow.counts()
    assert len(fast) == len(counts)
    assert all(fast.arrivals_of(key) == count for key, count in counts.items())
    assert slow.extended <= set(counts), "only what the window holds is extended"


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=12), max_size=300), st.integers(1, 8))
@examples(40)
def test_memory_is_bounded_by_the_window_and_empties_with_it(history: list[list[int]], instances: int) -> None:
    tree = hotness(cold=0.0)
    for path in history:
        tree.arrived(chain(path), instances)
        assert len(tree) <= WINDOW * 7

    for _ in range(WINDOW):
        tree.arrived([], instances)

    assert len(tree) == 0
    assert tree.extended == 0


def test_a_prefix_is_extended_above_the_hot_share_and_stays_so_until_below_the_cold_one() -> None:
    tree = hotness()
    hot = chain([0, 0, 0, 0])

    def traffic(of_ten: int, rounds: int = 10) -> bool:
        for number in range(rounds * 10):
            tree.arrived(hot if number % 10 < of_ten else [BlockKey(10**6 + number)] * 2, instances=4)
        return is_extended(tree, hot[1])

    assert not traffic(2), "a share of 0.2 is below 1/4"
    assert traffic(4), "0.4 is above it"
    assert traffic(2), "0.2 is above half of it"
    assert not traffic(1), "0.1 is not"
    assert not traffic(2)


def test_more_instances_make_a_prefix_hot_earlier() -> None:
    spread, gathered = hotness(), hotness()
    for number in range(40):
        keys = chain([0, 0, 0]) if number % 5 == 0 else [BlockKey(10**6 + number)] * 2
        spread.arrived(keys, instances=8)
        gathered.arrived(keys, instances=4)

    assert is_extended(spread, chain([0, 0])[1])
    assert not is_extended(gathered, chain([0, 0])[1])


def test_a_cold_share_above_the_hot_one_is_refused() -> None:
    with pytest.raises(ValueError, match="must be at least 0 and at most hot_share"):
        hotness(hot=1.0, cold=1.5)

"""Randomised leaf token against LRU: what it keeps true, and where it wins by how much."""

from collections import OrderedDict
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.simulation.block_cache import (
    EVICTION_ORDERS,
    BlockCache,
    BlockHash,
    BlocksEvicted,
    CacheReset,
    OpaqueChain,
    RunCached,
)
from pointsman.simulation.eviction_rlt import RandomisedLeafToken
from tests.support.examples import examples


class Requests:
    """Requests that run through one cache, each holding its blocks until it is let go."""

    def __init__(self, cache: BlockCache) -> None:
        self.cache = cache
        self.parents: dict[BlockHash, BlockHash | None] = {}
        self.evicted: list[BlockHash] = []
        self._open: OrderedDict[int, Sequence[BlockHash]] = OrderedDict()
        self._count = 0

    def begin(self, hashes: Sequence[BlockHash]) -> int | None:
        """Compute a prompt; how many blocks were hit, or None where there is no room."""
        cache = self.cache
        hit = cache.hit(hashes, blocks_max=len(hashes))
        if len(hashes) - hit > cache.free_beside(hashes[:hit]):
            return None
        self._count += 1
        cache.hold(hashes[:hit])
        assert cache.allocate(len(hashes) - hit)
        cache.fill(OpaqueChain(hashes, unique=self._count), hit, len(hashes))
        self._open[self._count] = hashes
        self._take_in_changes()
        return hit

    def let_go(self) -> None:
        """End the oldest request."""
        if self._open:
            self.cache.release(self._open.popitem(last=False)[1], private=0)

    def run(self, hashes: Sequence[BlockHash]) -> int:
        hit = self.begin(hashes)
        assert hit is not None
        self.let_go()
        return hit

    def _take_in_changes(self) -> None:
        for change in self.cache.take_changes():
            match change:
                case RunCached(parent, hashes):
                    for block in hashes:
                        assert parent is None or parent in self.parents, "a block without the one before it"
                        self.parents[block] = parent
                        parent = block
                case BlocksEvicted(hashes):
                    for block in hashes:
                        assert block not in self.parents.values(), "an inner block was evicted"
                        del self.parents[block]
                        self.evicted.append(block)
                case CacheReset():
                    self.parents.clear()


def tree_prompt(path: Sequence[int]) -> list[BlockHash]:
    """A block for each step; equal beginnings give equal blocks."""
    block = 0
    hashes = []
    for step in path:
        block = block * 4 + step + 1
        hashes.append(block)
    return hashes


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6)
histories = st.lists(st.one_of(paths, st.just([])), max_size=80)


@given(histories, st.integers(8, 14), st.integers(0, 99))
@examples(150)
def test_what_is_cached_stays_closed_under_prefixes_within_capacity_and_the_same_for_a_seed(
    history: list[list[int]], blocks_max: int, seed: int
) -> None:
    first, again = (Requests(BlockCache(blocks_max=blocks_max, order=RandomisedLeafToken(seed))) for _ in range(2))

    for path in history:
        for requests in (first, again):
            if path:
                requests.begin(tree_prompt(path))
            else:
                requests.let_go()
            assert set(requests.parents) == requests.cache.cached()
            assert len(requests.cache) <= blocks_max
            assert requests.cache.blocks_free >= 0

    assert first.evicted == again.evicted


@given(histories, st.integers(0, 99))
@examples(100)
def test_what_was_used_in_this_phase_is_not_evicted_in_it(history: list[list[int]], seed: int) -> None:
    order = RandomisedLeafToken[BlockHash](seed)
    requests = Requests(BlockCache(blocks_max=10, order=order))
    used: set[BlockHash] = set()
    phase = order.phase

    for path in history:
        prompt = tree_prompt(path)
        if not prompt or requests.begin(prompt) is None:
            continue
        requests.let_go()
        fresh = [block for block in requests.evicted if block in used]
        assert not fresh or order.phase > phase
        used = used | set(prompt) if order.phase == phase else set(prompt)
        phase = order.phase
        requests.evicted.clear()


def test_any_leaf_may_go_and_different_seeds_take_different_ones() -> None:
    gone = set()
    for seed in range(40):
        requests = Requests(BlockCache(blocks_max=6, order=RandomisedLeafToken(seed)))
        for path in ([0, 0], [1, 1], [2, 2]):
            requests.run(tree_prompt(path))
        requests.run([1000])
        gone.update(requests.evicted)

    assert gone == {tree_prompt([step, step])[1] for step in (0, 1, 2)}


def test_a_reset_forgets_the_tree() -> None:
    requests = Requests(BlockCache(blocks_max=4, order=RandomisedLeafToken()))
    requests.run([1, 2, 3])

    assert requests.cache.reset()

    assert requests.cache.take_changes()
    assert requests.run([1, 2, 3]) == 0
    assert requests.run([7, 8, 9]) == 0


def round_robin_hit_share(eviction: str, *, prompts: int, blocks_each: int, rounds: int) -> float:
    """Prompts in turn, one more of them than the cache has room for; the first round is cold and does not count."""
    cache = BlockCache(blocks_max=(prompts - 1) * blocks_each, order=EVICTION_ORDERS[eviction]())
    requests = Requests(cache)
    chains = [[number * blocks_each + n + 1 for n in range(blocks_each)] for number in range(prompts)]
    hits = [requests.run(chain) for _ in range(rounds) for chain in chains]
    return sum(hits[prompts:]) / (prompts * blocks_each * (rounds - 1))


@pytest.mark.parametrize("blocks_each", [1, 8])
def test_one_prompt_too_many_in_turn_leaves_lru_without_a_hit_and_rlt_with_most(blocks_each: int) -> None:
    lru = round_robin_hit_share("lru", prompts=17, blocks_each=blocks_each, rounds=40)
    rlt = round_robin_hit_share("rlt", prompts=17, blocks_each=blocks_each, rounds=40)

    assert lru == 0.0
    assert rlt > 0.6


def test_on_that_sequence_lru_misses_n_times_what_the_best_misses_and_rlt_log_n_times() -> None:
    """Theorem 4: of n + 1 one-block prompts in turn the offline optimum misses one in n."""
    n = 64
    harmonic = sum(1 / k for k in range(1, n + 1))
    best = 1 / n

    lru = 1 - round_robin_hit_share("lru", prompts=n + 1, blocks_each=1, rounds=60)
    rlt = 1 - round_robin_hit_share("rlt", prompts=n + 1, blocks_each=1, rounds=60)

    assert lru / best == pytest.approx(n)
    assert rlt / best <= 2 * harmonic


def offline_misses(pages: Sequence[int], places: int) -> int:
    """Belady's rule, which no order without knowledge of the future beats: drop what is used again last."""
    following: dict[int, list[int]] = {}
    for at, page in enumerate(pages):
        following.setdefault(page, []).append(at)
    cached: set[int] = set()
    misses = 0
    for page in pages:
        following[page].pop(0)
        if page in cached:
            continue
        misses += 1
        if len(cached) == places:
            cached.remove(max(cached, key=lambda kept: following[kept][0] if following[kept] else len(pages)))
        cached.add(page)
    return misses


def misses(pages: Sequence[int], places: int, seed: int) -> int:
    requests = Requests(BlockCache(blocks_max=places, order=RandomisedLeafToken(seed)))
    return sum(1 - requests.run([page]) for page in pages)


@pytest.mark.parametrize("sequence", ["in turn", "random", "zipf", "sliding"])
def test_rlt_misses_at_most_log_n_times_what_the_best_misses(sequence: str) -> None:
    """Theorem 6, with the constant of marking: 2 (1 + 1/2 + ... + 1/n), in expectation over its own draws."""
    n, count = 16, 1500
    chance = Random(7)
    pages = {
        "in turn": [number % (n + 1) + 1 for number in range(count)],
        "random": [chance.randrange(2 * n) + 1 for _ in range(count)],
        "zipf": chance.choices(range(1, 4 * n), weights=[1 / rank for rank in range(1, 4 * n)], k=count),
        "sliding": [number // 20 + chance.randrange(n + 2) + 1 for number in range(count)],
    }[sequence]
    best = offline_misses(pages, n)
    mean_misses = sum(misses(pages, n, seed) for seed in range(5)) / 5

    assert best <= mean_misses <= 2 * sum(1 / k for k in range(1, n + 1)) * best + n


def test_a_phase_lasts_until_the_whole_cache_was_used_or_evicted() -> None:
    order = RandomisedLeafToken[BlockHash]()
    chance = Random(1)
    cache = BlockCache(blocks_max=20_000, order=order)
    evicted = 0
    for number in range(3_000):
        chain = [chance.randrange(500) + 1, *range(number * 100 + 1_000, number * 100 + 1_019)]
        hit = cache.hit(chain, blocks_max=20)
        cache.hold(chain[:hit])
        assert cache.allocate(20 - hit)
        cache.fill(OpaqueChain(chain, unique=number), hit, 20)
        cache.release(chain, private=0)
        evicted += sum(len(change.hashes) for change in cache.take_changes() if isinstance(change, BlocksEvicted))

    assert evicted > 30_000
    assert order.phase == 1 + -(-evicted // 20_000)

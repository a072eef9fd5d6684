"""The plug-in's queue of free blocks, as vLLM's block pool uses it, with vLLM left out."""

from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman_vllm.free_blocks import RandomisedFreeBlocks
from pointsman_vllm.settings import EvictionSettings, WrongSettingError, eviction_settings
from tests.support.examples import examples

Hash = tuple[int, ...]
"""Of a block: the path that leads to it."""


@dataclass(eq=False)
class Block:
    """A physical block, as far as the queue looks at it."""

    block_id: int
    ref_cnt: int = 0
    block_hash: Hash | None = None


@dataclass
class Pool:
    """What vLLM's pool and its callers do: find, hold, fill, let go, tail first; copies of a block are kept."""

    blocks: list[Block]
    free: RandomisedFreeBlocks[Block]
    by_hash: dict[Hash, dict[int, Block]] = field(default_factory=dict)
    roots: set[Hash] = field(default_factory=set)
    """Cached prefixes that lost the prefix before them, even if that is cached again."""
    evicted: list[Hash] = field(default_factory=list)

    @classmethod
    def of(cls, size: int, seed: int = 0) -> "Pool":
        blocks = [Block(number) for number in range(size)]
        return cls(blocks, RandomisedFreeBlocks(blocks, blocks, seed=seed))

    def begin(self, path: Hash, *, unlike: bool = False) -> list[Block] | None:
        """Compute a prompt of a block a step and hold its blocks; None where there is no room. `unlike`: as if it had begun
        before what is cached was, so that it gets copies."""
        prefixes = [path[: end + 1] for end in range(len(path))]
        hits = [] if unlike else self._hits(prefixes)
        fresh = len(path) - len(hits)
        if fresh > self.free.num_free_blocks - sum(not block.ref_cnt for block in hits):
            return None
        for block in hits:
            self._hold(block)
        table = hits + [self._emptied(block) for block in self.free.popleft_n(fresh)]
        for block, prefix in zip(table, prefixes, strict=True):
            if block.block_hash is None:
                block.block_hash = prefix
                self.by_hash.setdefault(prefix, {})[block.block_id] = block
        self.free.cached(table[len(hits) - 1] if hits else None, table[len(hits) :])
        return table

    def let_go(self, table: list[Block]) -> None:
        for block in table:
            block.ref_cnt -= 1
        unheld = [block for block in reversed(table) if not block.ref_cnt]
        self.free.prepend_n([block for block in unheld if block.block_hash is None])
        self.free.append_n([block for block in unheld if block.block_hash is not None])

    def lose(self, block: Block) -> None:
        """The block loses its hash, whoever holds it."""
        self._forget(block)
        self.free.uncached(block)

    def assert_sound(self) -> None:
        unheld = [block.block_id for block in self.blocks if not block.ref_cnt]
        listed = [block.block_id for block in self.free.get_all_free_blocks()]
        assert sorted(listed) == unheld
        assert self.free.num_free_blocks == len(unheld)

    def _hits(self, prefixes: list[Hash]) -> list[Block]:
        hits: list[Block] = []
        for prefix in prefixes:
            copies = self.by_hash.get(prefix)
            if not copies:
                break
            hits.append(next(iter(copies.values())))
        return hits

    def _hold(self, block: Block) -> None:
        if not block.ref_cnt:
            self.free.remove(block)
        block.ref_cnt += 1

    def _emptied(self, block: Block) -> Block:
        assert block.ref_cnt == 0, "a held block was taken"
        if block.block_hash is not None:
            assert self._is_evictable(block) or not self._has_evictable(), "an inner block was evicted"
            self.evicted.append(block.block_hash)
            self._forget(block)
            self.free.uncached(block)
        block.ref_cnt = 1
        return block

    def _is_evictable(self, block: Block) -> bool:
        """An extra copy, or no longer prefix depends on it."""
        assert block.block_hash is not None
        return len(self.by_hash[block.block_hash]) > 1 or not self._next_prefixes(block.block_hash) - self.roots

    def _has_evictable(self) -> bool:
        return any(b.block_hash is not None and self._is_evictable(b) for b in self.free.get_all_free_blocks())

    def _next_prefixes(self, prefix: Hash) -> set[Hash]:
        return {longer for longer in self.by_hash if longer[:-1] == prefix}

    def _forget(self, block: Block) -> None:
        prefix, block.block_hash = block.block_hash, None
        assert prefix is not None
        del self.by_hash[prefix][block.block_id]
        if not self.by_hash[prefix]:
            del self.by_hash[prefix]
            self.roots.discard(prefix)
            self.roots |= self._next_prefixes(prefix)


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
deeds = st.one_of(
    st.tuples(st.just("begin"), paths),
    st.tuples(st.just("begin unlike"), paths),
    st.tuples(st.just("let go"), st.integers(0, 9)),
)
violent_deeds = st.one_of(deeds, st.tuples(st.just("lose"), st.integers(0, 13)))


def carried_out(pool: Pool, history: list[tuple[str, Hash | int]]) -> list[list[Block]]:
    """The tables that are open at the end."""
    tables: list[list[Block]] = []
    for deed, what in history:
        if isinstance(what, tuple):
            table = pool.begin(what, unlike=deed == "begin unlike")
            tables += [] if table is None else [table]
        elif deed == "let go" and tables:
            pool.let_go(tables.pop(what % len(tables)))
        elif deed == "lose" and pool.blocks[what].block_hash is not None:
            pool.lose(pool.blocks[what])
        pool.assert_sound()
    return tables


a_copy_after_another_copy_is_held = [
    ("begin", (0,)),
    ("begin", (1, 0, 0, 2)),
    ("begin unlike", (0, 1, 0, 0)),
    ("let go", 0),
    ("begin", (0, 0, 0)),
    *[("let go", 0)] * 3,
    ("begin unlike", (1, 0, 0, 2, 1, 1)),
    ("begin", (1, 0, 0, 2, 1, 1)),
    ("begin unlike", (0,)),
    ("let go", 0),
    ("begin", (0, 1, 0, 0)),
]
a_held_block_outlives_the_copy_it_was_filled_after = [
    ("begin unlike", (0, 2, 1)),
    ("let go", 0),
    ("begin unlike", (0, 0, 0, 0, 1, 0)),
    ("let go", 0),
    ("begin unlike", (1, 2, 2)),
    ("begin unlike", (1, 0, 0, 0, 0)),
    ("begin", (0, 0, 0, 1, 0, 0)),
    ("let go", 2),
    ("begin unlike", (1, 0, 0)),
]


@given(st.lists(deeds, max_size=80), st.integers(0, 99))
@example(a_copy_after_another_copy_is_held, 0)
@example(a_held_block_outlives_the_copy_it_was_filled_after, 0)
@examples(150)
def test_no_held_block_and_no_inner_block_is_evicted_and_a_seed_evicts_the_same(
    history: list[tuple[str, Hash | int]], seed: int
) -> None:
    pool, again = Pool.of(14, seed), Pool.of(14, seed)
    carried_out(pool, history)
    carried_out(again, history)

    assert pool.evicted == again.evicted
    assert all(prefix[:-1] in pool.by_hash for prefix in pool.by_hash if len(prefix) > 1)


@given(st.lists(violent_deeds, max_size=80), st.integers(0, 99))
@examples(150)
def test_every_free_block_can_be_had_whatever_lost_its_hash(history: list[tuple[str, Hash | int]], seed: int) -> None:
    pool = Pool.of(14, seed)
    tables = carried_out(pool, history)

    held = {block.block_id for table in tables for block in table}
    taken = [block.block_id for block in pool.free.popleft_n(pool.free.num_free_blocks)]
    assert sorted([*held, *taken]) == list(range(14))
    with pytest.raises(ValueError, match="No free blocks"):
        pool.free.popleft()


def test_empty_blocks_go_before_cached_ones_and_a_reset_empties_all() -> None:
    pool = Pool.of(4)
    table = pool.begin((1, 2))
    assert table is not None
    pool.let_go(table)
    first_two = pool.free.popleft_n(2)
    pool.free.prepend_n(first_two)
    for block in table:
        block.block_hash = None
    pool.free.all_uncached()

    assert {block.block_id for block in first_two} == {2, 3}
    assert [block.block_id for block in pool.free.iter_blocks_after(first_two[1])] == [1, 0]
    pool.assert_sound()


def test_prompts_in_turn_cost_lru_a_miss_each_and_randomised_eviction_a_harmonic_number_a_phase() -> None:
    """Theorem 4's worst case: one prompt more than fits. Who knows the future misses once in as many as fit."""
    fit, rounds = 16, 400
    pool = Pool.of(fit + 1)
    lru: OrderedDict[int, None] = OrderedDict()
    misses_rlt = misses_lru = 0
    for number in range(rounds * (fit + 2)):
        prompt = number % (fit + 2)
        misses_rlt += (prompt,) not in pool.by_hash
        table = pool.begin((prompt,))
        assert table is not None
        pool.let_go(table)
        misses_lru += prompt not in lru
        lru[prompt] = None
        lru.move_to_end(prompt)
        if len(lru) > fit + 1:
            lru.popitem(last=False)

    best = rounds * (fit + 2) / (fit + 1)
    harmonic = sum(1 / n for n in range(1, fit + 2))
    assert misses_lru == rounds * (fit + 2)
    assert misses_rlt <= 2 * harmonic * best


def test_settings_come_from_the_environment_and_must_fit() -> None:
    assert eviction_settings({}) == EvictionSettings("lru", 0)
    assert eviction_settings({"POINTSMAN_VLLM_EVICTION": "RLT", "POINTSMAN_VLLM_SEED": "7"}) == EvictionSettings(
        "rlt", 7
    )
    with pytest.raises(WrongSettingError, match="POINTSMAN_VLLM_EVICTION must be lru or rlt, not 'fifo'"):
        eviction_settings({"POINTSMAN_VLLM_EVICTION": "fifo"})

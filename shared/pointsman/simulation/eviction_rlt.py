"""Randomised leaf token: evicts a random leaf among the blocks that no request used lately.

Source: "Randomization Boosts KV Caching, Learning Balances Query Load" (ICLR 2026), Algorithm 1, on blocks. Released
blocks are marked; a uniformly random unmarked leaf is evicted; when all are marked, the marks are wiped and a new phase
begins. O(log n)-competitive (Theorem 6); deterministic orders, LRU included, are Omega(n) (Theorem 4).

Bias: ignores recency within a phase. Each eviction takes O(1). `pointsman_vllm.eviction_rlt` has the same class; a test
holds them equal.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from random import Random
from typing import Generic, TypeVar

Block = TypeVar("Block", bound=Hashable)
"""Identity of a cached block."""


class RandomisedLeafToken(Generic[Block]):
    """Cached blocks as a tree, and the unheld ones with the phase in which they were released."""

    def __init__(self, seed: int = 0) -> None:
        """The same seed and the same history give the same evictions."""
        self.phase = 1
        """Marking phases so far, the current one included."""
        self._random = Random(seed)
        self._parents: dict[Block, Block | None] = {}
        self._children: dict[Block, int] = {}
        self._released: dict[Block, int] = {}
        self._leaves: list[Block] = []
        """Unmarked unheld leaves, unordered; `_places` has the index of each."""
        self._places: dict[Block, int] = {}

    def grow(self, parent: Block | None, hashes: Sequence[Block]) -> None:
        """These consecutive blocks are cached now and held by the request that filled them."""
        children = self._children
        parents = self._parents
        if parent is not None:
            children[parent] += 1
        for block in hashes:
            parents[block] = parent
            children[block] = 1
            parent = block
        children[hashes[-1]] = 0

    def add(self, hashes: Iterable[Block]) -> None:
        """The last holder released these blocks: mark them."""
        self._released.update(dict.fromkeys(hashes, self.phase))

    def discard(self, block: Block) -> None:
        """The block is held again."""
        del self._released[block]
        if block in self._places:
            self._take_leaf(self._places[block])

    def take(self, count: int) -> list[Block]:
        """Evict `count` blocks, one random unmarked leaf after the other. At least `count` must be unheld."""
        evicted = []
        for _ in range(count):
            if not self._leaves:
                self._begin_phase()
            block = self._take_leaf(int(self._random.random() * len(self._leaves)))
            del self._released[block]
            self._drop(block)
            evicted.append(block)
        return evicted

    def forget(self, block: Block) -> None:
        """The owner dropped the block, held or not. Its children become roots; the same identity must never be added again."""
        self._released.pop(block, None)
        if block in self._places:
            self._take_leaf(self._places[block])
        self._drop(block)

    def clear(self) -> None:
        for blocks in (self._parents, self._children, self._released, self._leaves, self._places):
            blocks.clear()

    def __len__(self) -> int:
        return len(self._released)

    def __iter__(self) -> Iterator[Block]:
        """Unheld blocks, the earliest released first. Not the order of eviction, which is random."""
        return iter(self._released)

    def _begin_phase(self) -> None:
        """Wipe all marks. If blocks are held without their parents there may be no leaf; then the earliest released goes."""
        self.phase += 1
        children = self._children
        self._leaves = [block for block in self._released if not children[block]] or [next(iter(self._released))]
        self._places = {block: place for place, block in enumerate(self._leaves)}

    def _take_leaf(self, place: int) -> Block:
        """Remove one from the list; the last one moves into its place."""
        leaves = self._leaves
        block = leaves[place]
        last = leaves.pop()
        if last != block:
            leaves[place] = last
            self._places[last] = place
        del self._places[block]
        return block

    def _drop(self, block: Block) -> None:
        """Remove a block from the tree; its parent may become a leaf."""
        del self._children[block]
        parent = self._parents.pop(block)
        if parent is None or parent not in self._children:
            return
        self._children[parent] -= 1
        unmarked = self._released.get(parent, self.phase) < self.phase
        if unmarked and not self._children[parent] and parent not in self._places:
            self._places[parent] = len(self._leaves)
            self._leaves.append(parent)

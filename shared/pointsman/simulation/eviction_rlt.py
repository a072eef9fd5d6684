"""Randomised leaf token: evict a random leaf of what nobody has used lately.

Source: "Randomization Boosts KV Caching, Learning Balances Query Load" (ICLR 2026), Algorithm 1, on blocks instead of
single tokens. Time is cut into marking phases: a block that a request used in this phase is marked; evicted is a
uniformly random leaf among the unmarked; when every block is marked, all marks are wiped and a new phase begins. A
randomised order is O(log n)-competitive where every deterministic one, LRU included, is Omega(n) in the worst case
(Theorem 4): LRU evicts exactly what is asked for next when prompts come round in turn.

A request marks its blocks when it lets go of them: until then they are held and cannot go anyway. It lets go of an
ancestor no earlier than of its descendants, so that below any unmarked block there is an unmarked leaf, and what is
cached stays closed under prefixes.

Bias: it forgets recency within a phase, so where LRU is right (one hot set that fits) it evicts some of it too. Each
eviction takes O(1): leaves lie in a list from which any one can be taken, and a phase begins in time proportional to
the blocks that it then has to see evicted or used.

It obeys `block_cache.EvictionOrder` by shape alone: that module lists it by name, and imports run one way only. Nothing
of Pointsman is imported when it runs: the plug-in for vLLM (`shared/pointsman_vllm`) has this very file, by a link.
"""

from collections.abc import Iterable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.simulation.block_cache import BlockHash


class RandomisedLeafToken:
    """Cached blocks as a tree, and those that nobody holds with the phase in which they were let go."""

    def __init__(self, seed: int = 0) -> None:
        """The same seed and the same history give the same evictions."""
        self.phase = 1
        """Marking phases so far, the current one included."""
        self._random = Random(seed)
        self._parents: dict[BlockHash, BlockHash | None] = {}
        self._children: dict[BlockHash, int] = {}
        self._let_go: dict[BlockHash, int] = {}
        self._leaves: list[BlockHash] = []
        """Unmarked leaves that nobody holds, in no order that matters; `_places` says where each one is."""
        self._places: dict[BlockHash, int] = {}

    def grow(self, parent: "BlockHash | None", hashes: "Sequence[BlockHash]") -> None:
        """These consecutive blocks are cached now, held by the request that filled them."""
        children = self._children
        parents = self._parents
        if parent is not None:
            children[parent] += 1
        for block in hashes:
            parents[block] = parent
            children[block] = 1
            parent = block
        children[hashes[-1]] = 0

    def add(self, hashes: "Iterable[BlockHash]") -> None:
        """The last holder let go of these blocks: they are marked."""
        self._let_go.update(dict.fromkeys(hashes, self.phase))

    def discard(self, block: "BlockHash") -> None:
        """The block is held again."""
        del self._let_go[block]
        if block in self._places:
            self._take_leaf(self._places[block])

    def take(self, count: int) -> "list[BlockHash]":
        """Evict `count` blocks, one random unmarked leaf after the other. There are at least as many."""
        evicted = []
        for _ in range(count):
            if not self._leaves:
                self._begin_phase()
            block = self._take_leaf(int(self._random.random() * len(self._leaves)))
            del self._let_go[block]
            self._drop(block)
            evicted.append(block)
        return evicted

    def forget(self, block: "BlockHash") -> None:
        """The block, held or not, is no longer cached for a reason of its owner's. What came after it begins a prompt now;
        the block must never be known under the same name again."""
        self._let_go.pop(block, None)
        if block in self._places:
            self._take_leaf(self._places[block])
        self._drop(block)

    def clear(self) -> None:
        for blocks in (self._parents, self._children, self._let_go, self._leaves, self._places):
            blocks.clear()

    def __len__(self) -> int:
        return len(self._let_go)

    def __iter__(self) -> "Iterator[BlockHash]":
        """The blocks that nobody holds, who was let go longest ago first. It is not the order of eviction: lots are."""
        return iter(self._let_go)

    def _begin_phase(self) -> None:
        """Wipe all marks. Held blocks need none: they are marked when they are let go.

        Where an owner holds blocks without what came before them, there may be no leaf at all; then any block may go.
        """
        self.phase += 1
        children = self._children
        self._leaves = [block for block in self._let_go if not children[block]] or list(self._let_go)
        self._places = {block: place for place, block in enumerate(self._leaves)}

    def _take_leaf(self, place: int) -> "BlockHash":
        """Take one out of the list; the last one moves into its place."""
        leaves = self._leaves
        block = leaves[place]
        last = leaves.pop()
        if last != block:
            leaves[place] = last
            self._places[last] = place
        del self._places[block]
        return block

    def _drop(self, block: "BlockHash") -> None:
        """Take a block out of the tree; its parent may be the next leaf."""
        del self._children[block]
        parent = self._parents.pop(block)
        if parent is None or parent not in self._children:
            return
        self._children[parent] -= 1
        unmarked = self._let_go.get(parent, self.phase) < self.phase
        if unmarked and not self._children[parent] and parent not in self._places:
            self._places[parent] = len(self._leaves)
            self._leaves.append(parent)

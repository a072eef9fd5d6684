"""vLLM's queue of free blocks with another order, without imports of vLLM. Empty blocks go first, the last one put to
the front before the others, as in vLLM. `RandomisedLeafToken` chooses among cached ones; its tree has each filling of a
block under a number of its own, and copies of one block as separate leaves. Operations are O(1), amortised over a
phase."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, dropwhile
from typing import Generic, Protocol, TypeVar

from pointsman_vllm.eviction_rlt import RandomisedLeafToken


class Block(Protocol):
    @property
    def block_id(self) -> int: ...

    @property
    def ref_cnt(self) -> int: ...

    @property
    def block_hash(self) -> object | None: ...


B = TypeVar("B", bound=Block)

NOT_CACHED = -1


class RandomisedFreeBlocks(Generic[B]):
    def __init__(self, blocks: Sequence[B], free: Iterable[B], *, seed: int) -> None:
        """`blocks`: the whole pool, indexed by id. `free`: unheld blocks, all empty."""
        self._blocks = blocks
        self._order = RandomisedLeafToken[int](seed)
        self._empty: OrderedDict[int, B] = OrderedDict((block.block_id, block) for block in free)
        self._nodes = [NOT_CACHED] * len(blocks)
        """By block id: number of its current filling; modulo the number of blocks it is the id."""
        self._fillings = count(0, len(blocks))

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._order)

    def cached(self, parent: B | None, blocks: Iterable[B]) -> None:
        """These held, consecutive blocks after `parent` got hashes. Null blocks are skipped."""
        before = NOT_CACHED if parent is None else self._nodes[parent.block_id]
        fresh = [
            block for block in blocks if block.block_hash is not None and self._nodes[block.block_id] == NOT_CACHED
        ]
        if fresh:
            self._plant(fresh, before)

    def uncached(self, block: B) -> None:
        """The block lost its hash other than by being taken from here."""
        node = self._nodes[block.block_id]
        if node == NOT_CACHED:
            return
        self._nodes[block.block_id] = NOT_CACHED
        self._order.forget(node)
        if not block.ref_cnt:
            self._empty[block.block_id] = block

    def all_uncached(self) -> None:
        free = self.get_all_free_blocks()
        self._order.clear()
        self._nodes = [NOT_CACHED] * len(self._blocks)
        self._empty = OrderedDict((block.block_id, block) for block in free)

    def popleft(self) -> B:
        """Raises ValueError if no block is free."""
        if not self.num_free_blocks:
            msg = "No free blocks available"
            raise ValueError(msg)
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[B]:
        """At least `n` must be free."""
        assert n <= self.num_free_blocks
        taken = [self._empty.popitem(last=False)[1] for _ in range(min(n, len(self._empty)))]
        if len(taken) < n:
            size = len(self._blocks)
            for node in self._order.take(n - len(taken)):
                self._nodes[node % size] = NOT_CACHED
                taken.append(self._blocks[node % size])
        return taken

    def remove(self, block: B) -> None:
        """The block is held again. Raises KeyError if it is not free."""
        node = self._nodes[block.block_id]
        if node == NOT_CACHED:
            del self._empty[block.block_id]
        else:
            self._order.discard(node)

    def append(self, block: B) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[B]) -> None:
        """Released blocks, of one prompt the last block first. Cached ones are marked as used."""
        released = []
        for block in blocks:
            if block.block_hash is None:
                self._empty[block.block_id] = block
                continue
            if self._nodes[block.block_id] == NOT_CACHED:
                self._plant([block], NOT_CACHED)
            released.append(self._nodes[block.block_id])
        self._order.add(released)

    def prepend_n(self, blocks: Sequence[B]) -> None:
        """Empty blocks, taken first and in this order."""
        for block in reversed(blocks):
            self._empty[block.block_id] = block
            self._empty.move_to_end(block.block_id, last=False)

    def get_all_free_blocks(self) -> list[B]:
        return [*self._empty.values(), *(self._blocks[node % len(self._blocks)] for node in self._order)]

    def iter_blocks_after(self, cursor: B | None) -> Iterator[B]:
        """Free blocks after `cursor`; all if it is None or not free. O(free blocks)."""
        free = self.get_all_free_blocks()
        rest = list(dropwhile(lambda block: block is not cursor, free))
        return iter(rest[1:] if rest else free)

    def _plant(self, blocks: Sequence[B], before: int) -> None:
        nodes = [filling + block.block_id for filling, block in zip(self._fillings, blocks, strict=False)]
        for node, block in zip(nodes, blocks, strict=True):
            self._nodes[block.block_id] = node
        self._order.grow(None if before == NOT_CACHED else before, nodes)

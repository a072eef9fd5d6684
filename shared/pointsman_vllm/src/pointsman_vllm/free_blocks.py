"""vLLM's queue of free blocks with another order, without imports of vLLM. Empty blocks go first, the last one put to
the front before the others, as in vLLM; then extra copies of blocks; then `RandomisedLeafToken` chooses among cached
prefixes. Its nodes are prefixes, not blocks: a request may hold copies that were not computed together, so a tree of
blocks could have held blocks below free ones. Operations are O(1), amortised over a phase."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import dropwhile
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


@dataclass(eq=False, slots=True)
class Prefix(Generic[B]):
    """A cached prefix, named by the hash of its last block. `copies`: of that block, by block id."""

    block_hash: object
    copies: int = 0
    """Of its last block."""
    held: int = 0
    kept: B | None = None
    """The free copy that is not spare; None while one is held."""


class RandomisedFreeBlocks(Generic[B]):
    def __init__(self, blocks: Sequence[B], free: Iterable[B], *, seed: int) -> None:
        """`blocks`: the whole pool, indexed by id. `free`: unheld blocks, all empty."""
        self._order = RandomisedLeafToken[Prefix[B]](seed)
        self._empty: OrderedDict[int, B] = OrderedDict((block.block_id, block) for block in free)
        self._spare: OrderedDict[int, B] = OrderedDict()
        """Free copies of prefixes with another copy, held or kept."""
        self._by_hash: dict[object, Prefix[B]] = {}
        self._by_block: list[Prefix[B] | None] = [None] * len(blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + len(self._spare) + len(self._order)

    def cached(self, parent: B | None, blocks: Iterable[B]) -> None:
        """These held, consecutive blocks after `parent` got hashes. Null blocks are skipped."""
        before = None if parent is None else self._by_block[parent.block_id]
        for block in blocks:
            if block.block_hash is not None:
                before = self._by_block[block.block_id] or self._insert_prefix(block, before)

    def uncached(self, block: B) -> None:
        """The block lost its hash other than by being taken from here."""
        prefix = self._by_block[block.block_id]
        if prefix is None:
            return
        self._drop_copy(prefix, block)
        if block.ref_cnt:
            prefix.held -= 1
        else:
            self._spare.pop(block.block_id, None)
            self._empty[block.block_id] = block
        if not prefix.copies:
            self._order.forget(prefix)
        elif not prefix.held and (prefix.kept is None or prefix.kept is block):
            if prefix.kept is None:
                self._order.add([prefix])
            prefix.kept = next(other for other in self._spare.values() if self._by_block[other.block_id] is prefix)
            del self._spare[prefix.kept.block_id]

    def all_uncached(self) -> None:
        free = self.get_all_free_blocks()
        self._order.clear()
        self._spare.clear()
        self._by_hash.clear()
        self._by_block = [None] * len(self._by_block)
        self._empty = OrderedDict((block.block_id, block) for block in free)

    def popleft(self) -> B:
        """Raises ValueError if no block is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[B]:
        """At least `n` must be free."""
        assert n <= self.num_free_blocks
        taken = [self._empty.popitem(last=False)[1] for _ in range(min(n, len(self._empty)))]
        spare = [self._spare.popitem(last=False)[1] for _ in range(min(n - len(taken), len(self._spare)))]
        # Prefixes are evicted only when no copy is spare, so each has only the copy it kept.
        kept = [prefix.kept for prefix in self._order.take(n - len(taken) - len(spare)) if prefix.kept is not None]
        for block in (*spare, *kept):
            prefix = self._by_block[block.block_id]
            assert prefix is not None
            self._drop_copy(prefix, block)
        return [*taken, *spare, *kept]

    def remove(self, block: B) -> None:
        """The block is held again. Raises KeyError if it is not free."""
        prefix = self._by_block[block.block_id]
        if prefix is None:
            del self._empty[block.block_id]
        else:
            self._hold_copy(prefix)
            del self._spare[block.block_id]

    def append(self, block: B) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[B]) -> None:
        """Released blocks, of one prompt the last block first. Cached ones are marked as used."""
        released = []
        for block in blocks:
            if block.block_hash is None:
                self._empty[block.block_id] = block
                continue
            prefix = self._by_block[block.block_id] or self._insert_prefix(block, None)
            prefix.held -= 1
            if prefix.held:
                self._spare[block.block_id] = block
            else:
                prefix.kept = block
                released.append(prefix)
        self._order.add(released)

    def prepend_n(self, blocks: Sequence[B]) -> None:
        """Empty blocks, taken first and in this order."""
        for block in reversed(blocks):
            self._empty[block.block_id] = block
            self._empty.move_to_end(block.block_id, last=False)

    def get_all_free_blocks(self) -> list[B]:
        """Empty blocks, extra copies, then others in order of release, not of eviction."""
        kept = (prefix.kept for prefix in self._order if prefix.kept is not None)
        return [*self._empty.values(), *self._spare.values(), *kept]

    def iter_blocks_after(self, cursor: B | None) -> Iterator[B]:
        """Free blocks after `cursor`; all if it is None or not free. O(free blocks)."""
        free = self.get_all_free_blocks()
        rest = list(dropwhile(lambda block: block is not cursor, free))
        return iter(rest[1:] if rest else free)

    def _insert_prefix(self, block: B, before: Prefix[B] | None) -> Prefix[B]:
        """Add a held, newly cached block as a copy of its prefix."""
        prefix = self._by_hash.get(block.block_hash)
        if prefix is None:
            prefix = self._by_hash[block.block_hash] = Prefix(block.block_hash)
            self._order.grow(before, [prefix])
        prefix.copies += 1
        self._by_block[block.block_id] = prefix
        self._hold_copy(prefix)
        return prefix

    def _hold_copy(self, prefix: Prefix[B]) -> None:
        prefix.held += 1
        if prefix.kept is not None:
            self._order.discard(prefix)
            self._spare[prefix.kept.block_id] = prefix.kept
            prefix.kept = None

    def _drop_copy(self, prefix: Prefix[B], block: B) -> None:
        self._by_block[block.block_id] = None
        prefix.copies -= 1
        if not prefix.copies:
            del self._by_hash[prefix.block_hash]

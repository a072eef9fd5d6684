"""Which instance holds which prefix. One dictionary maps block keys to bit masks of instances. Invariant: a bit is set
only if the instance holds *every block before it* too ("anchored"). Along a prompt masks only lose bits, so equal masks
at two depths are equal in between, and bisection finds each depth in few look-ups. Blocks whose predecessor is missing
("detached": a lost event, a parent evicted first) are kept aside and anchored when the gap closes; rare, may be slow.
Keys by instance are kept for anti-entropy (count and xor digest), snapshots and departure."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import pairwise
from operator import or_, xor
from sys import byteorder
from typing import cast

import msgspec

from pointsman.primitives import BlockKey, InstanceId

ROOT = BlockKey(0)

SLOTS_MAX = 65_536
FORK_PRUNE_MIN = 16


class Holding:
    """`digest` is the xor of all its keys."""

    __slots__ = ("bit", "detached", "digest", "held")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.held: set[BlockKey] = set()
        self.detached: set[BlockKey] = set()
        self.digest = 0


class Fork(set[BlockKey]):
    """Several children of a block; dead ones are pruned as it grows."""

    __slots__ = ("prune_at",)

    def __init__(self, children: Iterable[BlockKey]) -> None:
        super().__init__(children)
        self.prune_at = FORK_PRUNE_MIN


class PackedHolding(msgspec.Struct, frozen=True):
    """An instance, its bit as a slot, and its detached keys."""

    instance: InstanceId
    slot: int
    digest: int
    detached: bytes


class PackedFork(msgspec.Struct, frozen=True):
    parent: BlockKey
    prune_at: int
    children: bytes


class PackedIndex(msgspec.Struct, frozen=True):
    """24 bytes a block. `anchored`: the keys of each mask (little-endian). `parents` and `children`: links, pairwise."""

    slots: int
    anchored: list[tuple[bytes, bytes]]
    parents: bytes
    children: bytes
    forks: list[PackedFork]
    holdings: list[PackedHolding]


class PrefixIndex:
    def __init__(self) -> None:
        self._anchored: dict[BlockKey, int] = {}
        self._children: dict[BlockKey, BlockKey | Fork] = {}
        self._holdings: dict[InstanceId, Holding] = {}
        self._names: list[InstanceId | None] = []
        self._detached_total = 0

    def __len__(self) -> int:
        return len(self._anchored)

    @property
    def instances(self) -> list[InstanceId]:
        return list(self._holdings)

    def add(self, instance: InstanceId) -> None:
        if instance in self._holdings:
            return
        slot = self._names.index(None) if None in self._names else len(self._names)
        if slot == len(self._names):
            self._names.append(instance)
        else:
            self._names[slot] = instance
        self._holdings[instance] = Holding(1 << slot)

    def drop(self, instance: InstanceId) -> None:
        if instance not in self._holdings:
            return
        self.clear(instance)
        holding = self._holdings.pop(instance)
        self._names[holding.bit.bit_length() - 1] = None

    def blocks(self, instance: InstanceId) -> int:
        holding = self._holdings.get(instance)
        return len(holding.held) if holding else 0

    def digest(self, instance: InstanceId) -> int:
        holding = self._holdings.get(instance)
        return holding.digest if holding else 0

    def keys(self, instance: InstanceId) -> frozenset[BlockKey]:
        holding = self._holdings.get(instance)
        return frozenset(holding.held) if holding else frozenset()

    def holds(self, instance: InstanceId, key: BlockKey) -> bool:
        holding = self._holdings.get(instance)
        return holding is not None and key in holding.held

    def holders(self, key: BlockKey) -> int:
        """Bits of the instances that hold this block and all before it."""
        return self._anchored.get(key, 0)

    def bits(self, instances: Iterable[InstanceId]) -> int:
        return reduce(or_, (self._holdings[i].bit for i in instances if i in self._holdings), 0)

    def depth(self, instance: InstanceId, keys: list[BlockKey]) -> int:
        holding = self._holdings.get(instance)
        if holding is None:
            return 0
        mask_of, bit = self._anchored.get, holding.bit
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high) >> 1
            if mask_of(keys[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        """Leading blocks by instance; absent: none. O(different depths * log len(keys))."""
        mask_of = self._anchored.get
        first = mask_of(keys[0], 0) if keys else 0
        if not first:
            return {}
        found: dict[InstanceId, int] = {}
        last = len(keys) - 1
        deepest = mask_of(keys[last], 0)
        if deepest:
            self._assign(deepest, last + 1, found)
        gaps = [(0, first, last, deepest)] if deepest != first else []
        while gaps:
            low, low_mask, high, high_mask = gaps.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                mask = mask_of(keys[middle], 0)
                if mask == low_mask:
                    low = middle
                elif mask == high_mask:
                    high = middle
                else:
                    gaps.append((low, low_mask, middle, mask))
                    low, low_mask = middle, mask
            self._assign(low_mask & ~high_mask, high, found)
        return found

    def store(self, instance: InstanceId, parent: BlockKey, keys: list[BlockKey]) -> None:
        """`keys`: consecutive blocks after `parent`; some may be held already."""
        holding = self._holdings[instance]
        held = holding.held
        if not keys or not held.isdisjoint(keys) or holding.detached or self._detached_total:
            self._store_each(holding, parent, keys)
            return
        bit = holding.bit
        anchored = self._anchored
        if parent != ROOT and not anchored.get(parent, 0) & bit:
            self._store_each(holding, parent, keys)
            return
        before = len(held)
        held.update(keys)
        if len(held) - before != len(keys):
            held.difference_update(keys)
            self._store_each(holding, parent, keys)
            return
        holding.digest ^= reduce(xor, keys)
        known = 0
        for key in keys:
            mask = anchored.get(key)
            if mask is None:
                break
            anchored[key] = mask | bit
            known += 1
        if known < len(keys):
            fresh = keys[known:] if known else keys
            above = keys[known - 1] if known else parent
            if anchored.keys().isdisjoint(fresh):
                anchored.update(dict.fromkeys(fresh, bit))
                self._link(above, fresh[0])
                self._children.update(pairwise(fresh))
            else:  # another instance holds one of them detached
                for key in fresh:
                    anchored[key] = anchored.get(key, 0) | bit
                    self._link(above, key)
                    above = key

    def remove(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        holding = self._holdings[instance]
        held = holding.held
        gone = held.intersection(keys)
        held -= gone
        if self._detached_total:
            self._remove_each(holding, gone)
            return
        holding.digest = reduce(xor, gone, holding.digest)
        bit = holding.bit
        anchored = self._anchored
        children = self._children
        stranded: list[BlockKey] = []
        for key in gone:
            child = children.get(key)
            if child is not None and (not held.isdisjoint(child) if isinstance(child, Fork) else child in held):
                stranded.append(key)
            mask = anchored[key] ^ bit
            if mask:
                anchored[key] = mask
            else:
                del anchored[key]
                if child is not None and not stranded:
                    del children[key]
        for key in stranded:
            self._detach_below(holding, key)

    def clear(self, instance: InstanceId) -> None:
        holding = self._holdings[instance]
        anchored = self._anchored
        bit = holding.bit
        self._detached_total -= len(holding.detached)
        for key in holding.held - holding.detached:
            mask = anchored[key] ^ bit
            if mask:
                anchored[key] = mask
            else:
                del anchored[key]
                if not self._detached_total:
                    self._children.pop(key, None)
        holding.held = set()
        holding.detached = set()
        holding.digest = 0
        if not self._detached_total:
            self._forget_dead_links()

    def pack(self, *, canonical: bool = False) -> PackedIndex:
        """`canonical`: equal for equal indexes, whatever their history; much slower."""
        order: Callable[[Iterable[BlockKey]], Iterable[BlockKey]] = sorted if canonical else iter
        by_mask: dict[int, list[BlockKey]] = {}
        for key, mask in self._anchored.items():
            same = by_mask.get(mask)
            if same is None:
                same = by_mask[mask] = []
            same.append(key)
        links = self._children
        forks = [(parent, fork) for parent, fork in links.items() if isinstance(fork, Fork)]
        single = {parent: child for parent, child in links.items() if not isinstance(child, Fork)} if forks else links
        parents = list(order(single))
        return PackedIndex(
            slots=len(self._names),
            anchored=[
                (mask.to_bytes((mask.bit_length() + 7) // 8, "little"), _packed(order(by_mask[mask])))
                for mask in (sorted(by_mask) if canonical else by_mask)
            ],
            parents=_packed(parents),
            children=_packed(cast("list[BlockKey]", [single[parent] for parent in parents])),
            forks=[PackedFork(parent, fork.prune_at, _packed(sorted(fork))) for parent, fork in sorted(forks)],
            holdings=[
                PackedHolding(instance, h.bit.bit_length() - 1, h.digest, _packed(order(h.detached)))
                for instance, h in self._holdings.items()
            ],
        )

    @classmethod
    def unpack(cls, packed: PackedIndex) -> "PrefixIndex":
        """Raises ValueError."""
        if packed.slots > SLOTS_MAX or any(not 0 <= found.slot < packed.slots for found in packed.holdings):
            msg = f"{packed.slots} slots, or a holding in none of them"
            raise ValueError(msg)
        index = cls()
        index._names = [None] * packed.slots
        by_slot: dict[int, Holding] = {}
        for found in packed.holdings:
            holding = index._holdings[found.instance] = by_slot[found.slot] = Holding(1 << found.slot)
            index._names[found.slot] = found.instance
            holding.digest = found.digest
            holding.detached = set(_unpacked(found.detached))
            holding.held = set(holding.detached)
            index._detached_total += len(holding.detached)
        for mask_bytes, packed_keys in packed.anchored:
            mask, keys = int.from_bytes(mask_bytes, "little"), _unpacked(packed_keys)
            index._anchored.update(dict.fromkeys(keys, mask))
            for slot, holding in by_slot.items():
                if mask >> slot & 1:
                    holding.held.update(keys)
        index._children.update(zip(_unpacked(packed.parents), _unpacked(packed.children), strict=True))
        for known in packed.forks:
            fork = index._children[known.parent] = Fork(_unpacked(known.children))
            fork.prune_at = known.prune_at
        return index

    def _assign(self, mask: int, depth: int, found: dict[InstanceId, int]) -> None:
        names = self._names
        while mask:
            bit = mask & -mask
            name = names[bit.bit_length() - 1]
            assert name is not None
            found[name] = depth
            mask ^= bit

    def _store_each(self, holding: Holding, parent: BlockKey, keys: list[BlockKey]) -> None:
        for key in keys:
            if key not in holding.held:
                holding.held.add(key)
                holding.digest ^= key
                self._link(parent, key)
                if parent == ROOT or self._anchored.get(parent, 0) & holding.bit:
                    self._anchor_from(holding, key)
                else:
                    holding.detached.add(key)
                    self._detached_total += 1
            parent = key

    def _remove_each(self, holding: Holding, gone: set[BlockKey]) -> None:
        for key in gone:
            holding.digest ^= key
            if key in holding.detached:
                holding.detached.discard(key)
                self._detached_total -= 1
                continue
            self._lift(holding, key)
            self._detach_below(holding, key)
        if not self._detached_total:
            self._forget_dead_links()

    def _anchor_from(self, holding: Holding, key: BlockKey) -> None:
        """Anchor `key` and every detached block that it reconnects."""
        waiting = [key]
        while waiting:
            block = waiting.pop()
            self._anchored[block] = self._anchored.get(block, 0) | holding.bit
            if holding.detached:
                for child in self._children_of(block):
                    if child in holding.detached:
                        holding.detached.discard(child)
                        self._detached_total -= 1
                        waiting.append(child)

    def _detach_below(self, holding: Holding, key: BlockKey) -> None:
        """Detach what this instance holds below the removed `key`."""
        waiting = [key]
        while waiting:
            for child in list(self._children_of(waiting.pop())):
                if child in holding.held and self._anchored.get(child, 0) & holding.bit:
                    self._lift(holding, child)
                    holding.detached.add(child)
                    self._detached_total += 1
                    waiting.append(child)

    def _lift(self, holding: Holding, key: BlockKey) -> None:
        mask = self._anchored[key] ^ holding.bit
        if mask:
            self._anchored[key] = mask
        else:
            del self._anchored[key]

    def _children_of(self, key: BlockKey) -> Iterator[BlockKey]:
        children = self._children.get(key)
        if isinstance(children, Fork):
            yield from children
        elif children is not None:
            yield children

    def _link(self, parent: BlockKey, child: BlockKey) -> None:
        if parent == ROOT:
            return
        children = self._children.get(parent)
        if children is None or children == child:
            self._children[parent] = child
        elif isinstance(children, Fork):
            children.add(child)
            if len(children) >= children.prune_at:
                self._prune(children)
        elif self._alive(children):
            self._children[parent] = Fork((children, child))
        else:
            self._children[parent] = child

    def _prune(self, fork: Fork) -> None:
        fork.intersection_update([child for child in fork if self._alive(child)])
        fork.prune_at = max(FORK_PRUNE_MIN, 2 * len(fork))

    def _alive(self, key: BlockKey) -> bool:
        return key in self._anchored or (
            self._detached_total > 0 and any(key in holding.detached for holding in self._holdings.values())
        )

    def _forget_dead_links(self) -> None:
        """Links below unheld blocks are useless without detached blocks."""
        if len(self._children) > len(self._anchored):
            self._children = {key: child for key, child in self._children.items() if key in self._anchored}


def _packed(keys: Iterable[BlockKey]) -> bytes:
    packed = array("Q", keys)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(packed: bytes) -> list[BlockKey]:
    keys = array("Q")
    keys.frombytes(packed)
    if byteorder == "big":
        keys.byteswap()
    return cast("list[BlockKey]", keys.tolist())

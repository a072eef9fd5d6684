"""Which instance holds which prefix. Each instance tells of its blocks with the block before them. Those that it holds with
*every block before them* ("anchored") are in a trie of runs (`runs.py`), where matching a prompt compares whole runs.
Blocks whose predecessor is missing ("detached": a lost event, a parent evicted first) are kept aside and anchored when the
gap closes; rare, may be slow. Instances that tell different predecessors of a block do not affect each other. Count and
xor digest by instance are kept for anti-entropy."""

from collections.abc import Iterable, Iterator
from functools import reduce
from operator import or_, xor

from pointsman.contracts.block_keys import KEY_BYTES, pack_keys, unpack_keys
from pointsman.primitives import BlockKey, InstanceId
from pointsman.state.key_table import NOWHERE, common
from pointsman.state.packed_index import (
    SLOTS_MAX,
    PackedHolding,
    PackedIndex,
    pack_runs,
    unpack_runs,
)
from pointsman.state.runs import LOW, PIECE, RUN_KEYS_MAX, SHARED, SWEPT, Runs

ROOT = BlockKey(0)


class Holding:
    """`digest` is the xor of all its keys, `anchored` a number of blocks. `detached`: their predecessors, and `waiting`
    the reverse."""

    __slots__ = ("anchored", "detached", "digest", "owner", "slot", "waiting")

    def __init__(self, slot: int, owner: int) -> None:
        self.slot = slot
        self.owner = owner
        self.empty()

    def empty(self) -> None:
        self.anchored = 0
        self.digest = 0
        self.detached: dict[BlockKey, BlockKey] = {}
        self.waiting: dict[BlockKey, set[BlockKey]] = {}

    def detach(self, key: BlockKey, parent: BlockKey) -> None:
        self.detached[key] = parent
        self.waiting.setdefault(parent, set()).add(key)

    def forget(self, key: BlockKey) -> None:
        """A detached one."""
        parent = self.detached.pop(key)
        siblings = self.waiting[parent]
        siblings.remove(key)
        if not siblings:
            del self.waiting[parent]


class PrefixIndex:
    def __init__(self) -> None:
        self._runs = Runs()
        self._holdings: dict[InstanceId, Holding] = {}
        self._names: list[InstanceId | None] = []

    def __len__(self) -> int:
        """Anchored blocks of all instances."""
        return sum(holding.anchored for holding in self._holdings.values())

    @property
    def has_blocks(self) -> bool:
        """Anchored ones, also of instances that have left, until they are swept."""
        return len(self._runs.table) > 0

    @property
    def instances(self) -> list[InstanceId]:
        return list(self._holdings)

    def add(self, instance: InstanceId) -> None:
        if instance in self._holdings:
            return
        slot = len(self._names) if len(self._holdings) == len(self._names) else self._names.index(None)
        if slot == len(self._names):
            self._names.append(instance)
        else:
            self._names[slot] = instance
        self._holdings[instance] = Holding(slot, self._runs.enroll(slot))

    def drop(self, instance: InstanceId) -> None:
        holding = self._holdings.pop(instance, None)
        if holding is not None:
            self._names[holding.slot] = None
            self._runs.retire(holding.owner)
            self._runs.sweep(PIECE)

    def clear(self, instance: InstanceId) -> None:
        holding = self._holdings[instance]
        holding.empty()
        self._runs.retire(holding.owner)
        holding.owner = self._runs.enroll(holding.slot)
        self._runs.sweep(PIECE)

    def blocks(self, instance: InstanceId) -> int:
        holding = self._holdings.get(instance)
        return holding.anchored + len(holding.detached) if holding else 0

    def digest(self, instance: InstanceId) -> int:
        holding = self._holdings.get(instance)
        return holding.digest if holding else 0

    def keys(self, instance: InstanceId) -> frozenset[BlockKey]:
        """Looks at all runs."""
        holding = self._holdings.get(instance)
        if holding is None:
            return frozenset()
        content = self._runs.content
        anchored = b"".join(content[run][: tip * KEY_BYTES] for run, tip in self._runs.of(holding.owner))
        return frozenset([*unpack_keys(anchored), *holding.detached])

    def holds(self, instance: InstanceId, key: BlockKey) -> bool:
        holding = self._holdings.get(instance)
        return holding is not None and (key in holding.detached or self._place(holding, key) != NOWHERE)

    def holders(self, key: BlockKey) -> int:
        """Bits of the instances that hold this block and all before it."""
        runs = self._runs
        bits = 0
        for place in runs.table.places(key):
            offset = place & LOW
            for owner, held in runs.tips(place >> 32).items():
                if held & LOW > offset and runs.slots[owner] >= 0:
                    bits |= 1 << runs.slots[owner]
        return bits

    def bits(self, instances: Iterable[InstanceId]) -> int:
        return reduce(or_, (1 << self._holdings[i].slot for i in instances if i in self._holdings), 0)

    def instances_of(self, bits: int) -> dict[int, InstanceId]:
        """Those that have these bits (`bits`), each by its own."""
        found: dict[int, InstanceId] = {}
        while bits:
            bit = bits & -bits
            name = self._names[bit.bit_length() - 1]
            assert name is not None, "who left holds nothing"
            found[bit] = name
            bits ^= bit
        return found

    def depth(self, instance: InstanceId, keys: list[BlockKey]) -> int:
        holding = self._holdings.get(instance)
        if holding is None:
            return 0
        runs, packed, end = self._runs, pack_keys(keys), len(keys)
        depth = run = at = 0
        while depth < end:
            run = runs.child(run, at, keys[depth])
            tip = runs.tip(run, holding.owner)
            if not tip:
                break
            at = common(runs.content[run][: tip * KEY_BYTES], packed[depth * KEY_BYTES : (depth + tip) * KEY_BYTES])
            depth += at
        return depth

    def hits(self, keys: list[BlockKey]) -> dict[InstanceId, int]:
        """Leading blocks by instance, the deepest first; absent: none."""
        runs, packed, end = self._runs, pack_keys(keys), len(keys)
        by_owner: dict[int, int] = {}
        depth = run = at = 0
        while depth < end:
            run = runs.child(run, at, keys[depth])
            if not run:
                break
            content = runs.content[run]
            at = common(content, packed[depth * KEY_BYTES : depth * KEY_BYTES + len(content)])
            owner = runs.owner[run]
            if owner == SHARED:
                whole = depth + at
                for owner, held in runs.tips(run).items():
                    reached = depth + (held & LOW)
                    by_owner[owner] = reached if reached < whole else whole
            else:
                by_owner[owner] = depth + min(runs.held[run] & LOW, at)
            depth += at
        slots, names = runs.slots, self._names
        order = sorted([end - reached << 32 | slots[owner] for owner, reached in by_owner.items() if slots[owner] >= 0])
        return {names[found & LOW]: end - (found >> 32) for found in order}  # type: ignore[misc]

    def store(self, instance: InstanceId, parent: BlockKey, keys: list[BlockKey]) -> int:
        """`keys`: consecutive blocks after `parent`; some may be held already. Returns how many the instance has detached."""
        holding = self._holdings[instance]
        runs = self._runs
        runs.sweep(SWEPT * len(keys))
        stored = 0
        if not (holding.detached or self._doubles(keys) or parent in runs.doubled or ROOT in keys):
            place = self._place(holding, parent) if parent != ROOT else NOWHERE
            if place != NOWHERE:
                stored = self._anchor(holding, place >> 32, (place & LOW) + 1, keys)
            elif parent == ROOT:
                stored = self._anchor(holding, 0, 0, keys)
        if stored < len(keys):
            self._store_each(holding, keys[stored - 1] if stored else parent, keys[stored:])
        return len(holding.detached)

    def remove(self, instance: InstanceId, keys: list[BlockKey], *, detached_max: int = LOW) -> int:
        """Returns how many blocks the instance has detached. Stops at more than `detached_max`; it is to be cleared then."""
        holding = self._holdings[instance]
        self._runs.sweep(SWEPT * len(keys))
        if holding.detached or self._doubles(keys) or not self._remove_tail(holding, keys):
            self._remove_each(holding, keys, detached_max)
        return len(holding.detached)

    def pack(self, *, canonical: bool = False) -> PackedIndex:
        """`canonical`: equal for equal indexes, whatever their history; much slower, and cannot be unpacked."""
        holdings = []
        for instance, holding in self._holdings.items():
            detached = sorted(holding.detached.items())
            if canonical:
                detached += sorted(self._anchored(holding))
            keys, parents = pack_keys(key for key, _ in detached), pack_keys(parent for _, parent in detached)
            owner = -1 if canonical else holding.owner
            holdings.append(
                PackedHolding(instance, holding.slot, holding.digest, keys, parents, owner, holding.anchored)
            )
        return PackedIndex(len(self._names), holdings, None if canonical else pack_runs(self._runs))

    @classmethod
    def unpack(cls, packed: PackedIndex) -> "PrefixIndex":
        """Raises ValueError."""
        if packed.slots > SLOTS_MAX or any(not 0 <= found.slot < packed.slots for found in packed.holdings):
            raise ValueError(f"{packed.slots} slots, or a holding in none of them")
        if packed.runs is None:
            raise ValueError("the runs are missing")
        index = cls()
        index._names = [None] * packed.slots
        index._runs = unpack_runs(packed.runs, packed.slots)
        for found in packed.holdings:
            index._names[found.slot] = found.instance
            holding = index._holdings[found.instance] = Holding(found.slot, found.owner)
            holding.anchored, holding.digest = found.anchored, found.digest
            for key, parent in zip(unpack_keys(found.detached), unpack_keys(found.parents), strict=True):
                holding.detach(key, parent)
            if packed.runs.slots[holding.owner] != holding.slot:
                raise ValueError(f"the blocks of {found.instance} are not in its slot")
        return index

    def _anchored(self, holding: Holding) -> Iterator[tuple[BlockKey, BlockKey]]:
        """With their predecessors."""
        runs = self._runs
        for run, tip in runs.of(holding.owner):
            keys = unpack_keys(runs.content[run][: tip * KEY_BYTES])
            yield from zip(keys, [runs.above(run), *keys[:-1]], strict=True)

    def _doubles(self, keys: list[BlockKey]) -> bool:
        """Whether one of them is at several places."""
        doubled = self._runs.doubled
        return bool(doubled) and not doubled.isdisjoint(keys)

    def _place(self, holding: Holding, key: BlockKey) -> int:
        """Where the instance holds this block anchored."""
        runs = self._runs
        for place in runs.places(key):
            if place >= 0 and runs.tip(place >> 32, holding.owner) > place & LOW:
                return place
        return NOWHERE

    def _anchor(self, holding: Holding, run: int, at: int, keys: list[BlockKey]) -> int:
        """After the first `at` keys of the run. Returns how many could be: a key that is elsewhere ends it."""
        runs = self._runs
        packed = pack_keys(keys)
        done = 0
        while done < len(keys):
            size = min(len(keys) - done, len(runs.content[run]) // KEY_BYTES - at)
            same = common(
                runs.content[run][at * KEY_BYTES : (at + size) * KEY_BYTES],
                packed[done * KEY_BYTES : (done + size) * KEY_BYTES],
            )
            if same:
                at += same
                done += same
                self._claim(holding, run, at)
                continue
            child = runs.child(run, at, keys[done])
            if child:
                run, at = child, 0
                continue
            end = done + RUN_KEYS_MAX
            fresh = runs.add(run, at, keys[done:end], packed[done * KEY_BYTES : end * KEY_BYTES], holding.owner)
            holding.anchored += fresh
            holding.digest = reduce(xor, keys[done : done + fresh], holding.digest)
            done += fresh
            if fresh < RUN_KEYS_MAX:
                break
            place = runs.table.place(keys[done - 1])
            run, at = place >> 32, (place & LOW) + 1
        return done

    def _claim(self, holding: Holding, run: int, tip: int) -> None:
        runs = self._runs
        before = runs.tip(run, holding.owner)
        if before < tip:
            holding.digest = reduce(
                xor, unpack_keys(runs.content[run][before * KEY_BYTES : tip * KEY_BYTES]), holding.digest
            )
            holding.anchored += tip - before
            runs.raise_tip(run, holding.owner, tip)

    def _store_each(self, holding: Holding, parent: BlockKey, keys: list[BlockKey]) -> None:
        for key in keys:
            if key not in holding.detached and self._place(holding, key) == NOWHERE:
                place = self._place(holding, parent)
                if parent == ROOT:
                    self._anchor_one(holding, 0, 0, key)
                elif place != NOWHERE:
                    self._anchor_one(holding, place >> 32, (place & LOW) + 1, key)
                else:
                    holding.digest ^= key
                    holding.detach(key, parent)
            parent = key

    def _anchor_one(self, holding: Holding, run: int, at: int, key: BlockKey) -> None:
        """And every detached block that it reconnects."""
        runs = self._runs
        waiting = [(run, at, key)]
        while waiting:
            run, at, key = waiting.pop()
            if runs.content[run][at * KEY_BYTES : (at + 1) * KEY_BYTES] == pack_keys([key]):
                self._claim(holding, run, at + 1)
            elif child := runs.child(run, at, key):
                self._claim(holding, child, 1)
            else:
                runs.add_again(run, at, key, holding.owner)
                holding.anchored += 1
                holding.digest ^= key
            if key in holding.waiting:
                place = self._place(holding, key)
                for child in sorted(holding.waiting[key]):
                    holding.forget(child)
                    holding.digest ^= child
                    waiting.append((place >> 32, (place & LOW) + 1, child))

    def _remove_tail(self, holding: Holding, keys: list[BlockKey]) -> bool:
        """If they are the last that the instance holds of one run, in order or in reverse."""
        runs, count = self._runs, len(keys)
        place = runs.table.place(keys[0]) if keys else NOWHERE
        if place == NOWHERE:
            return False
        run = place >> 32
        tip = runs.tip(run, holding.owner)
        start = tip - count
        if start < 0 or start < runs.bound(run, holding.owner):
            return False
        tail = runs.content[run][start * KEY_BYTES : tip * KEY_BYTES]
        if tail != pack_keys(keys[::-1] if place & LOW == tip - 1 else keys):
            return False
        holding.anchored -= count
        holding.digest ^= reduce(xor, keys)
        runs.cut(run, holding.owner, start)
        return True

    def _remove_each(self, holding: Holding, keys: list[BlockKey], detached_max: int) -> None:
        gone: set[BlockKey] = set()
        cuts: dict[int, int] = {}
        for key in keys:
            if key in holding.detached:
                holding.forget(key)
                holding.digest ^= key
            elif key not in gone and (place := self._place(holding, key)) != NOWHERE:
                gone.add(key)
                run, offset = place >> 32, place & LOW
                cuts[run] = min(cuts.get(run, offset), offset)
        holding.digest = reduce(xor, gone, holding.digest)
        for run, tip in cuts.items():
            self._cut(holding, run, tip, gone, detached_max)

    def _cut(self, holding: Holding, run: int, tip: int, gone: set[BlockKey], detached_max: int) -> None:
        """Detaches what the instance holds below the first `tip` keys, but for those that are `gone`."""
        runs, owner = self._runs, holding.owner
        above = runs.above(run) if runs.tip(run, owner) > tip == 0 else ROOT
        waiting = [(run, tip, above)]
        while waiting and len(holding.detached) <= detached_max:
            run, tip, above = waiting.pop()
            before = runs.tip(run, owner)
            if before <= tip:
                continue
            content = runs.content[run]
            if tip:
                above = unpack_keys(content[(tip - 1) * KEY_BYTES : tip * KEY_BYTES])[0]
            if runs.bound(run, owner) > tip:
                waiting += [(child, 0, runs.above(child)) for child in runs.children(run, tip, owner, detached_max)]
            for key in unpack_keys(content[tip * KEY_BYTES : before * KEY_BYTES]):
                if key not in gone:
                    holding.detach(key, above)
                above = key
            holding.anchored -= before - tip
            runs.cut(run, owner, tip)

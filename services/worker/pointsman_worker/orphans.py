"""Parks stores with an unknown parent block, within a bound."""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from pointsman.adapters.kv_events.events import EngineBlockStored, EngineHash
from pointsman.primitives import Seconds

PARKED_BLOCKS_MAX = 16_384  # then the oldest stores are dropped


@dataclass(slots=True)
class Orphan:
    """`event`: without its extra keys, of which each would keep a payload of the engine in memory; `keyed` blocks have none
    that count. `removed`: blocks removed while parked."""

    event: EngineBlockStored
    keyed: int
    since: Seconds
    removed: list[EngineHash] = field(default_factory=list)


_Numbers = OrderedDict[int, None]
"""Of orphans, the oldest first. Each is found and dropped without a search, because an engine can park one hash in every
orphan."""


class Orphans:
    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._parked: OrderedDict[int, Orphan] = OrderedDict()
        self._by_parent: dict[EngineHash, _Numbers] = {}
        self._by_hash: dict[EngineHash, _Numbers] = {}
        self._number = 0
        self.blocks = 0

    def __bool__(self) -> bool:
        return bool(self._parked)

    @property
    def since(self) -> Seconds | None:
        return next(iter(self._parked.values())).since if self._parked else None

    def park(self, event: EngineBlockStored, keyed: int, now: Seconds) -> list[EngineBlockStored]:
        """Returns stores dropped for the bound, oldest first. A store of no block is not parked: the bound counts blocks."""
        assert event.parent_block_hash is not None
        if not event.block_hashes:
            return []
        self._number += 1
        self._parked[self._number] = Orphan(msgspec.structs.replace(event, extra_keys=None), keyed, now)
        _note(self._by_parent, event.parent_block_hash, self._number)
        for engine_hash in event.block_hashes:
            _note(self._by_hash, engine_hash, self._number)
        self.blocks += len(event.block_hashes)
        dropped = []
        while self.blocks > self._blocks_max:
            dropped.append(self._take(next(iter(self._parked))).event)
        return dropped

    def take_children(self, parent: EngineHash) -> list[Orphan]:
        return [self._take(number) for number in list(self._by_parent.get(parent, ()))]

    def remove(self, engine_hash: EngineHash) -> None:
        """Of the oldest orphan that has it and where it was not removed yet; once for each orphan. An orphan of which nothing
        is left ends, unless another follows it."""
        numbers = self._by_hash.get(engine_hash)
        if numbers is None:
            return
        number = next(iter(numbers))
        orphan, hashes = self._parked[number], self._parked[number].event.block_hashes
        _drop(self._by_hash, engine_hash, number)
        orphan.removed.append(engine_hash)
        if len(orphan.removed) == len(hashes) and not any(h in self._by_parent for h in hashes):
            self._take(number)

    def __contains__(self, engine_hash: EngineHash) -> bool:
        """Parked, and not removed from each orphan that has it."""
        return engine_hash in self._by_hash

    def clear(self) -> None:
        self._parked.clear()
        self._by_parent.clear()
        self._by_hash.clear()
        self.blocks = 0

    def _take(self, number: int) -> Orphan:
        orphan = self._parked.pop(number)
        parent = orphan.event.parent_block_hash
        assert parent is not None
        _drop(self._by_parent, parent, number)
        for engine_hash in orphan.event.block_hashes:
            _drop(self._by_hash, engine_hash, number)
        self.blocks -= len(orphan.event.block_hashes)
        return orphan


def _note(numbers_of: dict[EngineHash, _Numbers], engine_hash: EngineHash, number: int) -> None:
    numbers_of.setdefault(engine_hash, OrderedDict())[number] = None


def _drop(numbers_of: dict[EngineHash, _Numbers], engine_hash: EngineHash, number: int) -> None:
    numbers = numbers_of.get(engine_hash)
    if numbers is None:
        return
    numbers.pop(number, None)
    if not numbers:
        del numbers_of[engine_hash]

"""Promised blocks: those that an instance will soon hold for a placed request. Keeps a burst of equal prompts together.
A promise covers a prompt from its first block, so promised blocks are closed under ancestors and binary search is
exact. `holdings` and `lifecycle` make and release promises, at instances of the fleet only: what was promised at one
ends when it leaves."""

from collections import Counter, deque
from collections.abc import Collection
from typing import ClassVar

from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId
from pointsman.state.derived import Derived


class Promises:
    """Blocks are counted: several requests may promise the same one."""

    DERIVED: ClassVar[Derived] = {"_by_first": lambda: None}

    def __init__(self) -> None:
        self._promised: dict[InstanceId, Counter[BlockKey]] = {}
        self._by_first: dict[BlockKey, dict[InstanceId, None]] | None = None
        """Instances by promised first block: only those can have promised others of a prompt that begins with it. After a
        checkpoint by any promised block, which is no less right, until those promises end."""
        self.unconfirmed: deque[tuple[EngineSeconds, InstanceId, Epoch, list[BlockKey]]] = deque()
        """Promises of computed prompts with their deadlines, the earliest first."""

    def promise(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        if keys:
            self._promised.setdefault(instance, Counter()).update(keys)
            if self._by_first is not None:
                self._by_first.setdefault(keys[0], {})[instance] = None

    def release(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        promised = self._promised.get(instance)
        if promised is None:
            return
        count, forget, by_first = promised.get, promised.pop, self._by_first or ()
        for key in keys:
            left = count(key, 1) - 1
            if left:
                promised[key] = left
            else:
                forget(key, None)
                if key in by_first:
                    self._forget_first(key, instance)
        if not promised:
            del self._promised[instance]

    def drop(self, instance: InstanceId) -> None:
        if self._promised.pop(instance, None) is not None:
            for key in list(self._by_first or ()):
                self._forget_first(key, instance)

    def blocks(self, instance: InstanceId) -> int:
        return len(self._promised.get(instance, ()))

    def extend_hits(self, keys: list[BlockKey], hits: dict[InstanceId, int]) -> None:
        """Raise `hits` (leading blocks by instance) to the promised blocks."""
        count = len(keys)
        for instance in self.beginning_with(keys):
            promised = self._promised[instance]
            low = hits.get(instance, 0)
            if low >= count or keys[low] not in promised:
                continue
            high = count
            low += 1
            while low < high:
                middle = (low + high) >> 1
                if keys[middle] in promised:
                    low = middle + 1
                else:
                    high = middle
            hits[instance] = low

    def beginning_with(self, keys: list[BlockKey]) -> Collection[InstanceId]:
        """Those that have promised some of a prompt; after a checkpoint perhaps others, too."""
        if not keys:
            return ()
        if self._by_first is None:
            self._by_first = {}
            for instance, promised in self._promised.items():
                for key in promised:
                    self._by_first.setdefault(key, {})[instance] = None
        return self._by_first.get(keys[0], ())

    def _forget_first(self, key: BlockKey, instance: InstanceId) -> None:
        assert self._by_first is not None
        having = self._by_first[key]
        having.pop(instance, None)
        if not having:
            del self._by_first[key]

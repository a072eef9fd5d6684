"""Promised blocks: those that an instance will soon hold for a placed request. Keeps a burst of equal prompts together.
A promise covers a prompt from its first block, so promised blocks are closed under ancestors and binary search is
exact. `holdings` and `lifecycle` make and release promises."""

from collections import Counter, deque

from typing_extensions import override

from pointsman.primitives import BlockKey, EngineSeconds, Epoch, InstanceId


class Promises:
    """Blocks are counted: several requests may promise the same one."""

    def __init__(self) -> None:
        self._promised: dict[InstanceId, Counter[BlockKey]] = {}
        self.unconfirmed: deque[tuple[EngineSeconds, InstanceId, Epoch, list[BlockKey]]] = deque()
        """Promises of computed prompts with their deadlines, the earliest first."""

    def promise(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        if keys:
            self._promised.setdefault(instance, Counter()).update(keys)

    def release(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        promised = self._promised.get(instance)
        if promised is None:
            return
        count, forget = promised.get, promised.pop
        for key in keys:
            left = count(key, 1) - 1
            if left:
                promised[key] = left
            else:
                forget(key, None)
        if not promised:
            del self._promised[instance]

    def drop(self, instance: InstanceId) -> None:
        self._promised.pop(instance, None)

    def blocks(self, instance: InstanceId) -> int:
        return len(self._promised.get(instance, ()))

    def extend_hits(self, keys: list[BlockKey], hits: dict[InstanceId, int]) -> None:
        """Raise `hits` (leading blocks by instance) to the promised blocks."""
        for instance, promised in self._promised.items():
            low = hits.get(instance, 0)
            if low >= len(keys) or keys[low] not in promised:
                continue
            high = len(keys)
            low += 1
            while low < high:
                middle = (low + high) >> 1
                if keys[middle] in promised:
                    low = middle + 1
                else:
                    high = middle
            hits[instance] = low


class NoPromises(Promises):
    """Of a State without an index, which finds no hits."""

    @override
    def promise(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        pass

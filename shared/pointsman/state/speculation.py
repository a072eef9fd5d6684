"""Blocks that an instance is about to hold, because a request with them was placed there.

A burst of equal prompts arrives faster than the engine can report what it stored; counting placed prompts as
held keeps the burst together. A promise ends when the cache events confirm it, when the request fails or moves,
or when its time is up. Each promise covers a prompt from its first block, so an instance's promised blocks are
closed under ancestors and a binary search over them is exact.
"""

from collections import Counter

from pointsman.primitives import BlockKey, InstanceId


class Speculation:
    """Promised blocks for each instance, counted, since several requests may promise the same block."""

    def __init__(self) -> None:
        self._promised: dict[InstanceId, Counter[BlockKey]] = {}

    def promise(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        """Count a prompt's whole blocks as held by the instance."""
        if keys:
            self._promised.setdefault(instance, Counter()).update(keys)

    def release(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        """Take back one promise of these keys. Of an instance that was dropped meanwhile: no-op."""
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
        """Raise `hits` (leading blocks by instance) to what is promised."""
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

"""Promised blocks: those that an instance will hold soon, because a request with them was placed there.

Keeps a burst of equal prompts together, which arrives faster than engines report. A promise covers a prompt from its
first block, so the promised blocks of an instance are closed under ancestors and a binary search over them is exact.
When promises are made and released is decided by `holdings` and `lifecycle`.
"""

from collections import Counter, deque

from pointsman.primitives import BlockKey, Epoch, InstanceId, Seconds


class Promises:
    """Promised blocks of each instance, counted: several requests may promise the same block."""

    def __init__(self) -> None:
        self._promised: dict[InstanceId, Counter[BlockKey]] = {}
        self.unconfirmed: deque[tuple[Seconds, InstanceId, Epoch, list[BlockKey]]] = deque()
        """Promises of computed prompts with their deadlines, the earliest first."""

    def promise(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        """Count a prompt's whole blocks as held by the instance."""
        if keys:
            self._promised.setdefault(instance, Counter()).update(keys)

    def release(self, instance: InstanceId, keys: list[BlockKey]) -> None:
        """Release one promise of these keys. No-op for an instance that was dropped."""
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

"""Caches that exist only on paper: one that never forgets (`SeenBlocks`), and one of a given size (`RecentBlocks`). Both
hold the blocks of prompts in order of their placement, so that whoever has a block has those before it (but for generated
blocks that outlive their prompt), and a prompt is looked up by bisection. Memory is bounded: docs/data.md has the bytes."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable

from pointsman.primitives import BlockKey

LISTED_MAX = 3
"""Entries in lists of uses, for each block held."""

EVICTED_MIN = 32
"""Entries of a list that are looked at together."""


class SeenBlocks:
    """Every block used before. Beyond `blocks_max`, at least the half of them used last."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max = blocks_max
        self._newer: set[BlockKey] = set()
        self._older: set[BlockKey] = set()

    def leading(self, keys: list[BlockKey]) -> int:
        newer, older = self._newer, self._older
        return bisect_left(keys, True, key=lambda key: key not in newer and key not in older)

    def unseen(self, keys: list[BlockKey]) -> list[BlockKey]:
        newer, older = self._newer, self._older
        if newer.issuperset(keys):
            return []
        return [key for key in keys if key not in newer and key not in older]

    def use(self, keys: Iterable[BlockKey]) -> None:
        self._newer.update(keys)
        if 2 * len(self._newer) >= self.blocks_max:
            self._older, self._newer = self._newer, set()


class RecentBlocks:
    """One cache, least recently used out. Of the blocks of one use, the last goes first, as in vLLM, so that what stays
    of a prompt is its beginning."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._used_in: dict[int, int] = {}
        self._uses: dict[int, array[int]] = {}
        """Blocks by use. Those used again later are still in it, until `_tidy` comes by."""
        self._listed = 0
        self._oldest = 0
        self._newest = -1
        self._tidied = 0

    def __len__(self) -> int:
        return len(self._used_in)

    def resize(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._evict()

    def leading(self, keys: list[BlockKey]) -> int:
        held = self._used_in
        return bisect_left(keys, True, key=lambda key: key not in held) if keys and keys[0] in held else 0

    def use(self, keys: list[BlockKey]) -> None:
        """`keys`: of a prompt, from its first block. The part that is too long for the cache is not taken in."""
        keys = keys[: self._blocks_max]
        if not keys:
            return
        self._newest += 1
        self._used_in.update(dict.fromkeys(keys, self._newest))
        self._uses[self._newest] = array("Q", keys)
        self._listed += len(keys)
        self._evict()
        self._tidy(2 * len(keys))

    def _evict(self) -> None:
        used_in = self._used_in
        used = used_in.get
        excess = len(used_in) - self._blocks_max
        while excess > 0:
            number, use = self._oldest, self._uses.get(self._oldest)
            if not use:
                self._uses.pop(number, None)
                self._oldest += 1
                continue
            last = use[-max(excess, EVICTED_MIN) :]
            del use[-len(last) :]
            held = [key for key in last if used(key) == number]
            stay = max(0, len(held) - excess)
            use.extend(held[:stay])
            for key in held[stay:]:
                used_in.pop(key, None)  # a forged prompt may have a block twice
            self._listed -= len(last) - stay
            excess = len(used_in) - self._blocks_max

    def _tidy(self, budget: int) -> None:
        """Drop what was used again from the lists of some earlier uses, in turn."""
        while budget > 0 and self._listed > LISTED_MAX * len(self._used_in):
            if not self._oldest <= self._tidied <= self._newest:
                self._tidied = self._oldest
            number, used_in = self._tidied, self._used_in
            self._tidied += 1
            use = self._uses.get(number)
            if use is None:
                budget -= 1
                continue
            left = array("Q", [key for key in use if used_in.get(key) == number])
            self._listed -= len(use) - len(left)
            budget -= len(use)
            if left:
                self._uses[number] = left
            else:
                del self._uses[number]

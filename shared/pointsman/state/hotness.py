"""How hot each prefix is, and so how many of a prompt's leading blocks decide where it belongs.

DualMap's hotness tree: a prefix that draws more than its share of the traffic is extended by one level, so that its
traffic spreads over more candidate pairs; one that cools down is shortened again. Levels are `level_tokens` apart,
traffic is counted over a sliding window of the last arrivals. Bias: a prefix must be hot for a while before it
spreads; a window of few arrivals makes the tree nervous, one of many makes it slow.
"""

from collections import deque

from pointsman.primitives import BlockKey, Tokens

WINDOW_ARRIVALS = 1000
ARRIVALS_MIN = 24
"""Below this many arrivals in the window nothing is called hot."""


class Hotness:
    """Counts arrivals by prefix. Changes only through `arrived`; `affinity_key` only reads."""

    def __init__(self, *, block_tokens: Tokens, level_tokens: Tokens, hot_share: float, cold_share: float) -> None:
        """`hot_share`, `cold_share`: in units of 1/n, n being the number of ready instances."""
        self._step = max(1, level_tokens // block_tokens)
        self._hot_share = hot_share
        self._cold_share = cold_share
        self._counts: dict[BlockKey, int] = {}
        self._window: deque[list[BlockKey]] = deque()
        self._extended: set[BlockKey] = set()

    def affinity_key(self, keys: list[BlockKey]) -> BlockKey | None:
        """The key that the rings look up for this prompt; None for a prompt without a whole block."""
        path = self._path(keys)
        return path[-1] if path else None

    def arrived(self, keys: list[BlockKey], instances: int) -> None:
        """Count one arrival among `instances` ready ones."""
        path = self._path(keys)
        self._window.append(path)
        counts = self._counts
        for key in path:
            counts[key] = counts.get(key, 0) + 1
        if len(self._window) > WINDOW_ARRIVALS:
            self._forget(self._window.popleft(), instances)
        arrivals = len(self._window)
        if arrivals < ARRIVALS_MIN:
            return
        hot = arrivals * self._hot_share / max(1, instances)
        self._extended.update(key for key in path if counts[key] > hot)

    def _forget(self, path: list[BlockKey], instances: int) -> None:
        cold = len(self._window) * self._cold_share / max(1, instances)
        for key in path:
            left = self._counts[key] - 1
            if left:
                self._counts[key] = left
            else:
                del self._counts[key]
            if left < cold:
                self._extended.discard(key)

    def _path(self, keys: list[BlockKey]) -> list[BlockKey]:
        """The keys at each level down to the one that decides: one level below the last hot one."""
        path = []
        for level in range(self._step - 1, len(keys), self._step):
            path.append(keys[level])
            if keys[level] not in self._extended:
                return path
        if keys and (not path or path[-1] != keys[-1]):
            path.append(keys[-1])
        return path

"""DualMap's hotness tree: how many leading blocks of a prompt are its affinity key. A prefix with more than `hot_share`
of the arrivals in the window is extended by one level (`level_tokens`), which spreads it over more candidate pairs;
below `cold_share` it is shortened. The paper's thresholds are 2/n and 1/n; the defaults are 1/n and 0.5/n, since only
1/n reproduces its Figure 6b. Bias: a prefix must be hot for a while before it spreads. Bound: one path per arrival in
the window."""

from collections import deque

from pointsman.primitives import BlockKey, Tokens

WINDOW_ARRIVALS = 1000
ARRIVALS_MIN = 24


class Hotness:
    def __init__(
        self,
        *,
        block_tokens: Tokens,
        level_tokens: Tokens,
        hot_share: float,
        cold_share: float,
        window_arrivals: int = WINDOW_ARRIVALS,
    ) -> None:
        """`hot_share`, `cold_share`: in units of 1/n, n being the number of ready instances. Raises ValueError."""
        if not 0 <= cold_share <= hot_share:
            raise ValueError(f"cold_share ({cold_share}) must be at least 0 and at most hot_share ({hot_share})")
        self._step = max(1, level_tokens // block_tokens)
        self._hot_share = hot_share
        self._cold_share = cold_share
        self._window_arrivals = window_arrivals
        self._counts: dict[BlockKey, int] = {}
        self._window: deque[list[BlockKey]] = deque()
        self._extended: set[BlockKey] = set()

    def affinity_key(self, keys: list[BlockKey]) -> BlockKey | None:
        """For hash rings; None for a prompt without a whole block."""
        path = self._path(keys)
        return path[-1] if path else None

    def arrivals_of(self, key: BlockKey) -> int:
        return self._counts.get(key, 0)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def arrivals(self) -> int:
        return len(self._window)

    @property
    def extended(self) -> int:
        return len(self._extended)

    def arrived(self, keys: list[BlockKey], instances: int) -> None:
        path = self._path(keys)
        counts = self._counts
        self._window.append(path)
        for key in path:
            counts[key] = counts.get(key, 0) + 1
        forgotten = self._window.popleft() if len(self._window) > self._window_arrivals else []
        for key in forgotten:
            counts[key] -= 1
        self._judge(path, instances)
        self._judge(forgotten, instances)

    def _judge(self, path: list[BlockKey], instances: int) -> None:
        arrivals = len(self._window)
        one_nth = arrivals / max(1, instances)
        hot, cold = one_nth * self._hot_share, one_nth * self._cold_share
        for key in path:
            count = self._counts.get(key, 0)
            if not count:
                self._counts.pop(key, None)
                self._extended.discard(key)
            elif count < cold:
                self._extended.discard(key)
            elif count > hot and arrivals >= ARRIVALS_MIN:
                self._extended.add(key)

    def _path(self, keys: list[BlockKey]) -> list[BlockKey]:
        """The key of each level down to one below the last hot one."""
        path = []
        for level in range(self._step - 1, len(keys), self._step):
            path.append(keys[level])
            if keys[level] not in self._extended:
                return path
        if keys and (not path or path[-1] != keys[-1]):
            path.append(keys[-1])
        return path

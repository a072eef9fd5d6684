"""What copies of prefixes ahead of need are decided from: arrivals by prefix, which fade, and the copies under way. Both
stay empty in a pool without instances that fetch from each other."""

from dataclasses import dataclass
from math import exp

from pointsman.primitives import BlockKey, EngineSeconds, InstanceId, RequestId, WallSeconds

FADE_SECONDS: EngineSeconds = 30.0
"""Arrivals count 1/e after so long."""
ARRIVALS_MIN = 24
"""Of a hot prefix; fewer may be chance."""
FORGOTTEN_COUNT = 0.5
KEPT_MIN = 20_000
COPY_WALL_SECONDS: WallSeconds = WallSeconds(30.0)
"""From the grant. Then its end is not expected any more: the request failed before its first token, or its ingress died."""


@dataclass(slots=True)
class FadingCount:
    value: float = 0.0
    at: EngineSeconds = 0.0

    def count(self, now: EngineSeconds) -> float:
        return self.value * exp(-max(0.0, now - self.at) / FADE_SECONDS)

    def add(self, now: EngineSeconds) -> None:
        self.value, self.at = self.count(now) + 1.0, max(now, self.at)


class PrefixDemand:
    """Arrivals of each prefix of whole levels (`level_blocks`)."""

    def __init__(self, *, level_blocks: int) -> None:
        self._level = level_blocks
        self._all = FadingCount()
        self._by_prefix: dict[BlockKey, FadingCount] = {}
        self._prune_at = KEPT_MIN

    def __len__(self) -> int:
        return len(self._by_prefix)

    def arrived(self, keys: list[BlockKey], now: EngineSeconds) -> None:
        self._all.add(now)
        for last in range(self._level - 1, len(keys), self._level):
            self._by_prefix.setdefault(keys[last], FadingCount()).add(now)
        if len(self._by_prefix) >= self._prune_at:
            kept = {key: known for key, known in self._by_prefix.items() if known.count(now) >= FORGOTTEN_COUNT}
            self._by_prefix, self._prune_at = kept, max(KEPT_MIN, 2 * len(kept))

    def hot_blocks(self, keys: list[BlockKey], instances: int, now: EngineSeconds) -> int:
        """Leading blocks that at least one in `instances` of all arrivals share."""
        least = max(ARRIVALS_MIN, self._all.count(now) / max(1, instances))
        blocks = 0
        for last in range(self._level - 1, len(keys), self._level):
            known = self._by_prefix.get(keys[last])
            if known is None or known.count(now) < least:
                break
            blocks = last + 1
        return blocks


@dataclass(frozen=True, slots=True)
class CopyUnderWay:
    source: InstanceId
    target: InstanceId
    until: EngineSeconds


class CopiesUnderWay:
    """By the request that carries each."""

    def __init__(self) -> None:
        self._copies: dict[RequestId, CopyUnderWay] = {}

    def __len__(self) -> int:
        return len(self._copies)

    def begin(
        self, request: RequestId, source: InstanceId, target: InstanceId, *, now: EngineSeconds, until: EngineSeconds
    ) -> None:
        self._copies = {known: copy for known, copy in self._copies.items() if copy.until > now}
        self._copies[request] = CopyUnderWay(source, target, until)

    def end(self, request: RequestId) -> bool:
        """False if it is not known (any more)."""
        return self._copies.pop(request, None) is not None

    def busy(self, now: EngineSeconds) -> set[InstanceId]:
        """That give or take one."""
        return {end for copy in self._copies.values() if copy.until > now for end in (copy.source, copy.target)}

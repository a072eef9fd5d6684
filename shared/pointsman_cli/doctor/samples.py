"""Deterministic statistics of long streams, in bounded memory."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pointsman.primitives import EngineSeconds

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SAMPLE_MAX = 2048
STRETCHES_MAX = 2048


def keep(known: dict[K, T], key: K, value: T, most: int) -> None:
    """Adds the value, and forgets the oldest key beyond `most`."""
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


class Sample(Generic[T]):
    """Every n-th value of a stream; n doubles when `most` is exceeded."""

    def __init__(self, most: int = SAMPLE_MAX) -> None:
        self.values: list[T] = []
        self.seen = 0
        self._most = most
        self._stride = 1

    def add(self, value: T) -> None:
        if self.seen % self._stride == 0:
            self.values.append(value)
            if len(self.values) > self._most:
                self.values = self.values[::2]
                self._stride *= 2
        self.seen += 1


@dataclass(slots=True)
class Share:
    part: int = 0
    whole: int = 0

    def count(self, *, hit: bool) -> None:
        self.whole += 1
        self.part += hit

    @property
    def value(self) -> float:
        return self.part / self.whole if self.whole else 0.0


@dataclass(slots=True)
class Heavy(Generic[K]):
    """Heavy hitters (Space-Saving, Metwally 2005): contains every key above one in `most`; a count is too high by at
    most that of the key it replaced."""

    most: int
    counts: Counter[K] = field(default_factory=Counter)

    def add(self, key: K) -> K | None:
        """Returns the key that was evicted."""
        if key in self.counts or len(self.counts) < self.most:
            self.counts[key] += 1
            return None
        least = min(self.counts, key=self.counts.__getitem__)
        self.counts[key] = self.counts.pop(least) + 1
        return least


@dataclass(frozen=True, slots=True)
class Stretch:
    begun: EngineSeconds
    ended: EngineSeconds
    share: Share

    @property
    def missed(self) -> int:
        return self.share.whole - self.share.part


class Timeline:
    def __init__(self, stretch_seconds: EngineSeconds) -> None:
        self._length = stretch_seconds
        self._shares: dict[int, Share] = {}

    def count(self, at: EngineSeconds, *, hit: bool) -> None:
        self._shares.setdefault(int(at // self._length), Share()).count(hit=hit)
        if len(self._shares) > STRETCHES_MAX:
            self._coarsen()

    def below(self, target: float, *, least: int) -> list[Stretch]:
        found: list[Stretch] = []
        for number, share in sorted(self._shares.items()):
            if share.value >= target:
                continue
            begun, ended = number * self._length, (number + 1) * self._length
            if found and found[-1].ended == begun:
                before = found.pop()
                share = Share(before.share.part + share.part, before.share.whole + share.whole)
                begun = before.begun
            found.append(Stretch(begun, ended, share))
        return sorted((f for f in found if f.share.whole >= least), key=lambda stretch: -stretch.missed)

    def _coarsen(self) -> None:
        shares, self._shares, self._length = self._shares, {}, 2 * self._length
        for number, share in shares.items():
            merged = self._shares.setdefault(number // 2, Share())
            merged.part, merged.whole = merged.part + share.part, merged.whole + share.whole

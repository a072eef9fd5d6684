"""Statistics of long streams in bounded memory. Deterministic."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

SAMPLE_MAX = 2048


class Sample(Generic[T]):
    """Every n-th value of a stream; n doubles when there are too many."""

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
    """How many of how many."""

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
    """The keys that come most often (Space-Saving, Metwally 2005): any that makes up more than one in `most` is among
    them, and its count is too high by at most the count of the key it has pushed out."""

    most: int
    counts: Counter[K] = field(default_factory=Counter)

    def add(self, key: K) -> K | None:
        """Count it; gives the key that was forgotten for it."""
        if key in self.counts or len(self.counts) < self.most:
            self.counts[key] += 1
            return None
        least = min(self.counts, key=self.counts.__getitem__)
        self.counts[key] = self.counts.pop(least) + 1
        return least

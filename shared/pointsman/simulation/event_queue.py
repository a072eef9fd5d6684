"""The clock of a simulation: runs calls in time order; equal times in order of insertion."""

import sys
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from pointsman.primitives import EngineSeconds

Action = Callable[[EngineSeconds], None]


class EventQueue:
    def __init__(self) -> None:
        self.now: EngineSeconds = 0.0
        self._due: list[tuple[EngineSeconds, int, Action]] = []
        self._order = count()
        self._repeating = 0
        """Entries that repeat without bound. When only they are left, nothing more can happen."""
        self._stopped = False

    def at(self, at: EngineSeconds, act: Action) -> None:
        heappush(self._due, (at, next(self._order), act))

    def every(self, seconds: EngineSeconds, act: Action, *, first: EngineSeconds) -> None:
        def repeat(now: EngineSeconds) -> None:
            act(now)
            self.at(now + seconds, repeat)

        self._repeating += 1
        self.at(first, repeat)

    def stop(self) -> None:
        self._stopped = True

    def run(self, events_max: int = sys.maxsize) -> bool:
        """Runs up to so many calls. Returns whether nothing more can happen."""
        due = self._due
        for _ in range(events_max):
            if self._stopped or len(due) <= self._repeating:
                return True
            self.now, _, act = heappop(due)
            act(self.now)
        return self._stopped or len(due) <= self._repeating

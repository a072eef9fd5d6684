"""The clock of a simulation: calls in the order of their times, equal times in the order in which they were added."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from pointsman.primitives import Seconds

Action = Callable[[Seconds], None]


class EventQueue:
    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._due: list[tuple[Seconds, int, Action]] = []
        self._order = count()
        self._repeating = 0
        """Entries that repeat without bound. When only they are left, nothing more can happen."""
        self._stopped = False

    def at(self, at: Seconds, act: Action) -> None:
        heappush(self._due, (at, next(self._order), act))

    def every(self, seconds: Seconds, act: Action, *, first: Seconds) -> None:
        """Repeat `act` as long as anything else is due."""

        def turn(now: Seconds) -> None:
            act(now)
            self.at(now + seconds, turn)

        self._repeating += 1
        self.at(first, turn)

    def stop(self) -> None:
        """End `run` after the present call."""
        self._stopped = True

    def run(self) -> None:
        """Until `stop`, or until only repeating calls are left."""
        due = self._due
        while not self._stopped and len(due) > self._repeating:
            self.now, _, act = heappop(due)
            act(self.now)

"""The time that a log has reached. In: its events, in order. Out: the newest believed `at`. A leader's clock is believed;
another's event that is far ahead of it is left out, so that one machine with a wrong clock moves no time. Before the first
event of a leader nothing can be judged, so every event is believed, and that first one corrects the time. Without a leader
and without any event for AHEAD_WALL_SECONDS_MAX, the time stands until a leader writes again."""

from collections.abc import Callable, Iterable
from itertools import islice

from pointsman.contracts.codec import LogEvent
from pointsman.contracts.decisions import LeaderElected
from pointsman.ports import LogEntry
from pointsman.primitives import EngineSeconds, WallSeconds, engine_seconds

AHEAD_WALL_SECONDS_MAX: WallSeconds = WallSeconds(120.0)
Passed = Callable[[LogEntry], bool]
"""Whether an entry lies behind a moment."""

SEARCHED_ENTRIES_MAX = 1000
"""Entries among which `leader_time` looks for an event of a leader."""


class LogTime:
    def __init__(self, speed: float, *, leader_at: EngineSeconds | None = None) -> None:
        """`leader_at`: what a leader's clock showed near the first entry, if known."""
        self.now: EngineSeconds = leader_at or 0.0
        self.is_led = leader_at is not None
        """Whether a leader told the time."""
        self._ahead_max = engine_seconds(AHEAD_WALL_SECONDS_MAX, speed)

    def tells(self, event: LogEvent) -> bool:
        """Whether the event is believed; if so, `now` is at least its time."""
        if _is_of_leader(event):
            self.is_led = True
            if self.now - event.at > self._ahead_max:
                self.now = event.at  # what was believed before was wrong, or the leader's clock was set back
        elif not self.believes(event.at):
            return False
        self.now = max(self.now, event.at)
        return True

    def believes(self, at: EngineSeconds) -> bool:
        return not self.is_led or at - self.now <= self._ahead_max


def leader_time(entries: Iterable[LogEntry]) -> EngineSeconds | None:
    """What the clock of a leader showed at the first of its events. None: it wrote none of the first entries."""
    for entry in islice(entries, SEARCHED_ENTRIES_MAX):
        if entry.event is not None and _is_of_leader(entry.event):
            return entry.event.at
    return None


def _is_of_leader(event: LogEvent) -> bool:
    return event.stamp is not None or isinstance(event, LeaderElected)

"""Tells silent instances from a silent log. Workers that get no answer to their heartbeats report through the log; while it
does not take entries, connections stay up, and suspecting all workers would reject all requests. Signs: our own decision
does not come back, or comes late (so do reports then), or several instances fall silent together, in the log and out of
it; the last excuses them for a bounded time only."""

from collections import deque

from pointsman.ports import Clock
from pointsman.primitives import EngineSeconds, WallSeconds

QUIET_SHARE = 0.5
"""Share of the suspect time without any entry, or without a decision of ours, after which the log may be silent."""
DOUBT_SHARE = 3.0
"""Multiple of the suspect time for which several silent instances are excused."""


class LogLiveness:
    """Wall time; `listening_since` and `steady_since` engine time."""

    def __init__(self, clock: Clock, *, suspect_seconds: WallSeconds) -> None:
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._last_entry_at = self._last_heartbeat_at = clock.wall()
        self._written: deque[tuple[int, WallSeconds]] = deque()
        """Own decisions that have not come back, bounded by the log's window."""
        self.listening_since: EngineSeconds = 0.0
        self.listening_since_wall = WallSeconds(0.0)
        self.steady_since: EngineSeconds = 0.0
        """From when on the clock has measured durations of this leader: it was not set, and no other leader's was in use."""

    def begin(self) -> None:
        self.clock_was_set()
        self._last_entry_at = self._last_heartbeat_at = self._clock.wall()
        self._written.clear()

    def clock_was_set(self) -> None:
        """Or the machine was suspended."""
        self.listen_from_now()
        self.steady_since = self.listening_since

    def listen_from_now(self) -> None:
        self.listening_since, self.listening_since_wall = self._clock.now(), self._clock.wall()

    def decision_written(self, number: int) -> None:
        self._written.append((number, self._clock.wall()))

    def entry_read(self, own_number: int = 0) -> None:
        self._last_entry_at = self._clock.wall()
        while self._written and self._written[0][0] <= own_number:
            self._written.popleft()

    def heartbeat(self) -> None:
        self._last_heartbeat_at = self._clock.wall()

    def log_is_silent(self, instances: int) -> bool:
        now, quiet_max = self._clock.wall(), QUIET_SHARE * self._suspect_seconds
        quiet = now - max(self._last_entry_at, self._last_heartbeat_at)
        late = bool(self._written) and now - self._written[0][1] >= quiet_max
        in_doubt = instances > 1 and quiet_max <= quiet < DOUBT_SHARE * self._suspect_seconds
        return in_doubt or late

"""How long workers gather cache changes before they write them: longer, the more cache events the pool's log takes. In: each
cache event that the leader reads. Out: seconds, told with the answer to a heartbeat. Limit: counts entries, not bytes."""

from pointsman.primitives import WallSeconds

EVENTS_PER_SECOND = 1_000.0
"""Of all engines. Below it, which some 16 busy engines reach, changes are gathered for `--flush-ms` of the worker."""
FLUSH_WALL_SECONDS_MIN = 0.01
FLUSH_WALL_SECONDS_MAX = 0.5
"""A quarter of the time that a promise waits for the cache events of its prompt."""
PERIOD_WALL_SECONDS = 1.0
STEP_MAX = 2.0


class FlushPace:
    def __init__(self, now: WallSeconds) -> None:
        self._since = now
        self._events = 0
        self._seconds = FLUSH_WALL_SECONDS_MIN

    def event_read(self) -> None:
        self._events += 1

    def seconds(self, now: WallSeconds) -> float:
        elapsed = now - self._since
        if float(elapsed) >= PERIOD_WALL_SECONDS:
            excess = self._events / float(elapsed) / EVENTS_PER_SECOND
            stepped = self._seconds * min(STEP_MAX, max(1 / STEP_MAX, excess))
            self._seconds = min(FLUSH_WALL_SECONDS_MAX, max(FLUSH_WALL_SECONDS_MIN, stepped))
            self._since, self._events = now, 0
        return 0.0 if self._seconds == FLUSH_WALL_SECONDS_MIN else self._seconds

"""Extra TTFT budget for requests that waited because no scheduler answered. An outage delays the requests held up and,
by its backlog, those behind them. Both get extra time; the latter less and less as the backlog drains. Engine seconds.
"""

from pointsman.primitives import EngineSeconds, WallSeconds, engine_seconds

HELD_UP_WALL_SECONDS_MIN: WallSeconds = WallSeconds(0.25)
HELD_UP_WALL_SECONDS_MAX: WallSeconds = WallSeconds(10.0)
DRAIN_SHARE = 0.1
"""Seconds of backlog that a busy pool works off per second."""


class Outages:
    def __init__(self, speed: float) -> None:
        self._least = engine_seconds(HELD_UP_WALL_SECONDS_MIN, speed)
        self._most = engine_seconds(HELD_UP_WALL_SECONDS_MAX, speed)
        self._seconds: EngineSeconds = 0.0
        self._at: EngineSeconds = 0.0

    def allowance(self, held_up: EngineSeconds, at: EngineSeconds) -> EngineSeconds:
        """Extra seconds for a request that arrives at `at` after waiting `held_up`."""
        if held_up >= self._least:
            held_up = min(held_up, self._most)
            if held_up > self._left(at):
                self._seconds, self._at = held_up, at
        return self._left(at)

    def _left(self, at: EngineSeconds) -> EngineSeconds:
        return max(0.0, self._seconds - DRAIN_SHARE * max(0.0, at - self._at))

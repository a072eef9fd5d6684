"""Extra time for requests that waited because no scheduler answered.

An outage makes the requests that waited through it late, and leaves a backlog that delays those behind them. Neither is
load, so the TTFT SLO of a request grows by what it was held up, and for a while by what others were, less and less as the
backlog drains. Engine seconds.
"""

from pointsman.primitives import Seconds

HELD_UP_WALL_SECONDS_MIN = 0.25
"""A shorter wait is ordinary."""
HELD_UP_WALL_SECONDS_MAX = 10.0
"""The most that a request gets."""
DRAIN_SHARE = 0.1
"""Seconds of backlog that a busy pool works off a second."""


class Outages:
    """The newest outage."""

    def __init__(self, speed: float) -> None:
        self._least = HELD_UP_WALL_SECONDS_MIN * speed
        self._most = HELD_UP_WALL_SECONDS_MAX * speed
        self._seconds: Seconds = 0.0
        self._at: Seconds = 0.0

    def allowance(self, held_up: Seconds, at: Seconds) -> Seconds:
        """Extra seconds for a request that arrives now and was held up so long."""
        if held_up >= self._least:
            held_up = min(held_up, self._most)
            if held_up > self._left(at):
                self._seconds, self._at = held_up, at
        return self._left(at)

    def _left(self, at: Seconds) -> Seconds:
        return max(0.0, self._seconds - DRAIN_SHARE * max(0.0, at - self._at))

"""How much later than its objective a request may be because no scheduler answered for a while.

An outage (a leader that died, a log server that restarted) makes the requests that waited through it late, and leaves
a backlog that makes those behind them late, too. Neither is load: admission would refuse requests that merely waited.
So the TTFT budget of a request grows by what it was held up, and for a while by what others were, less and less as the
backlog is worked off. All times are engine seconds.
"""

from pointsman.primitives import Seconds

HELD_UP_WALL_SECONDS_MIN = 0.25
"""A shorter wait is the ordinary time of a command."""
HELD_UP_WALL_SECONDS_MAX = 10.0
"""No request gets more than this."""
DRAIN_SHARE = 0.1
"""The backlog of an outage is taken to shrink by so many seconds a second: what a busy pool has to spare."""


class Outages:
    """The newest outage that arrivals tell of."""

    def __init__(self, speed: float) -> None:
        self._least = HELD_UP_WALL_SECONDS_MIN * speed
        self._most = HELD_UP_WALL_SECONDS_MAX * speed
        self._seconds: Seconds = 0.0
        self._at: Seconds = 0.0

    def allowance(self, held_up: Seconds, at: Seconds) -> Seconds:
        """By how much the TTFT budget grows of a request that arrives now and was held up so long."""
        if held_up >= self._least:
            held_up = min(held_up, self._most)
            if held_up > self._left(at):
                self._seconds, self._at = held_up, at
        return self._left(at)

    def _left(self, at: Seconds) -> Seconds:
        return max(0.0, self._seconds - DRAIN_SHARE * max(0.0, at - self._at))

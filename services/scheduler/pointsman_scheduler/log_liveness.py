"""Whether an instance is silent, or the log.

Workers report through the log. While its cluster elects a new leader, or its disk is full, no report arrives, though
connections stay up and commands are answered; suspecting every worker then would reject every request. Two signs: a decision
of our own does not come back, or several instances fall silent together. The second may also be true of the instances (a rack
without power), so it excuses them for a bounded time.
"""

from pointsman.ports import Clock
from pointsman.primitives import Seconds, WallSeconds

QUIET_SHARE = 0.5
"""Share of the suspect time: a log without any entry for so long may be silent itself."""
DOUBT_SHARE = 3.0
"""Multiple of the suspect time for which several silent instances are excused at most."""


class LogLiveness:
    """What one leader has heard of the log in its term. Wall time, but for `listening_since`."""

    def __init__(self, clock: Clock, *, suspect_seconds: WallSeconds) -> None:
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._last_entry_at = clock.wall()
        self._written = 0
        self._returned = 0
        self.listening_since: Seconds = 0.0
        """Engine time before which silence does not count: this process could not hear then."""
        self.listening_since_wall = WallSeconds(0.0)

    def begin(self) -> None:
        """A term of this scheduler begins."""
        self.listen_from_now()
        self._last_entry_at = self._clock.wall()
        self._written = self._returned = 0

    def listen_from_now(self) -> None:
        self.listening_since, self.listening_since_wall = self._clock.now(), self._clock.wall()

    def decision_written(self, number: int) -> None:
        """This decision of ours is on its way into the log."""
        self._written = number

    def entry_read(self, own_number: int = 0) -> None:
        """An entry came; `own_number` where it is a decision of ours."""
        self._last_entry_at = self._clock.wall()
        self._returned = max(self._returned, own_number)

    def log_is_silent(self, instances: int) -> bool:
        """`instances`: how many should be heard."""
        quiet = self._clock.wall() - self._last_entry_at
        if quiet < QUIET_SHARE * self._suspect_seconds:
            return False
        in_doubt = instances > 1 and quiet < DOUBT_SHARE * self._suspect_seconds
        return in_doubt or self._returned < self._written

"""Whether the log is heard, or whether it is the log that is silent and not those who would write into it.

Workers report through the log. While a cluster elects a new leader for it, or its disk is full, nobody's report arrives,
though connections stand and commands are answered. A leader that took this for the silence of its workers would refuse
every request for want of an instance.

Two things tell: a decision of our own that does not come back, and several instances that fall silent together. The
second may also be true of the instances (a rack without power), so it excuses them for a bounded time; then they are
suspected, and whether that decision comes back settles it.
"""

from pointsman.ports import Clock
from pointsman.primitives import Seconds

QUIET_SHARE = 0.5
"""Of the silence by which a worker is suspected: a log without any entry for so long may be silent itself."""
DOUBT_SHARE = 3.0
"""Of the same: the longest that several silent instances are put down to the log."""


class Heartbeats:
    """What one leader has heard of the log in its term. All times are wall time."""

    def __init__(self, clock: Clock, *, suspect_seconds: Seconds) -> None:
        """`suspect_seconds`: silence of a worker by which it is suspected."""
        self._clock = clock
        self._suspect_seconds = suspect_seconds
        self._heard_at = clock.wall()
        self._written = 0
        self._returned = 0

    def begin(self) -> None:
        """A term of ours begins."""
        self._heard_at = self._clock.wall()
        self._written = self._returned = 0

    def wrote(self, number: int) -> None:
        """This decision of ours is on its way into the log."""
        self._written = number

    def heard(self, own_number: int = 0) -> None:
        """An entry came; `own_number` where it is a decision of ours."""
        self._heard_at = self._clock.wall()
        self._returned = max(self._returned, own_number)

    def log_is_silent(self, instances: int) -> bool:
        """Whether nothing is heard because of the log. `instances`: how many should be heard."""
        quiet = self._clock.wall() - self._heard_at
        if quiet < QUIET_SHARE * self._suspect_seconds:
            return False
        in_doubt = instances > 1 and quiet < DOUBT_SHARE * self._suspect_seconds
        return in_doubt or self._returned < self._written
